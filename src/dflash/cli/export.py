"""``dflash export``: a draft in the format another engine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash.cli import console, options
from dflash.errors import RequestError


def export(
    draft: Annotated[str, typer.Option(metavar="D", help="A draft in either format: a hub id or a folder.")],
    output: Annotated[Path, typer.Option(metavar="DIR", parser=options.path, help="A new folder.")],
    format: Annotated[
        Literal["published", "speculators"],
        typer.Option("--format", metavar="NAME", help="published (z-lab; vLLM, SGLang) or speculators (vLLM)."),
    ] = "speculators",
    target: Annotated[
        str | None, typer.Option(metavar="M", help="The target's hub id, which speculators names the verifier.")
    ] = None,
    target_class: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="The target's architecture, as LlamaForCausalLM.")
    ] = None,
    revision: options.Revision = None,
) -> None:
    """Rewrite a draft's config, with the same weights. What a format cannot say is refused."""
    from safetensors.torch import load_file

    from dflash.backends.torch.load import load_draft
    from dflash.checkpoint import find_weights, locate_draft
    from dflash.draft_config import DFlashConfig
    from dflash.train.files import write, write_tensors

    folder = locate_draft(draft, revision)
    config = DFlashConfig.load(folder)
    if format == "speculators":
        if target is None:
            raise RequestError("the speculators format names its target: give --target with its hub id")
        written = config.to_speculators(target, target_class or [])
    else:
        written = config.to_published()
    if output.exists() and any(output.iterdir()):
        raise RequestError(f"{output} is not empty: give a new folder")
    load_draft(folder, device="cpu")  # what is no draft, or not whole, is told before anything is written
    tensors = {name: tensor for file in find_weights(folder).files for name, tensor in load_file(file).items()}
    output.mkdir(parents=True, exist_ok=True)
    write_tensors(output / "model.safetensors", tensors)
    write(output / "config.json", json.dumps(written, indent=2) + "\n")
    console.say("done", f"{format} format in {output}", "bold green")
