"""``dflash export``: a draft in the format another engine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash import packages
from dflash.cli import console, options
from dflash.errors import CheckpointError, ModelNotFound, RequestError


def export(
    draft: Annotated[str, typer.Option(metavar="D", help="A draft in either format: a hub id or a folder.")],
    output: Annotated[Path, typer.Option(metavar="DIR", parser=options.path, help="A new folder.")],
    format: Annotated[
        Literal["published", "speculators"],
        typer.Option("--format", metavar="NAME", help="published (z-lab; vLLM, SGLang) or speculators (vLLM)."),
    ] = "speculators",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="M", help="The target, which speculators names the verifier: a hub id, a folder or smollm2-135m."
        ),
    ] = None,
    target_class: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="The target's architecture, as LlamaForCausalLM. By default what its config says."
        ),
    ] = None,
    revision: options.Revision = None,
) -> None:
    """Rewrite a draft's config, with the same weights. What a format cannot say is refused."""
    packages.need(packages.BACKENDS["torch"], "to export a draft")
    from safetensors.torch import load_file

    from dflash.backends.torch.load import load_draft
    from dflash.checkpoint import find_weights, locate, locate_draft
    from dflash.draft_config import DFlashConfig
    from dflash.train.files import write, write_tensors

    folder = locate_draft(draft, revision)
    config = DFlashConfig.load(folder)
    if format == "speculators":
        if target is None:
            raise RequestError("the speculators format names its target: give --target with its hub id")
        written = config.to_speculators(target, [])  # what the format cannot say is told before anything is fetched
    else:
        written = config.to_published()
    if output.exists() and any(output.iterdir()):
        raise RequestError(f"{output} is not empty: give a new folder")
    load_draft(folder, device="cpu")  # what is no draft, or not whole, is told before anything is written
    if target is not None and format == "speculators":
        written = config.to_speculators(locate(target).hub or target, target_class or _classes(target))
    tensors = {name: tensor for file in find_weights(folder).files for name, tensor in load_file(file).items()}
    output.mkdir(parents=True, exist_ok=True)
    write_tensors(output / "model.safetensors", tensors)
    write(output / "config.json", json.dumps(written, indent=2) + "\n")
    console.say("done", f"{format} format in {output}", "bold green")


def _classes(target: str) -> list[str]:
    """What the target's config names.

    Raises:
        RequestError: it names nothing, or there is none to be had.
    """
    from dflash.checkpoint import architectures

    try:
        return architectures(target)
    except (CheckpointError, ModelNotFound) as error:
        raise RequestError(
            f"the class of the target cannot be told: give --target-class, for example LlamaForCausalLM ({error})"
        ) from error
