"""What a run leaves behind: a draft in the published format, with a card that says how it was made."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from dflash import __version__
from dflash.backends.torch.draft import DFlashDraftModel
from dflash.train.evaluate import Acceptance
from dflash.train.files import write, write_tensors


def save_draft(draft: DFlashDraftModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

    The config goes last: a folder without one is not taken for a draft.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(dtype).cpu().contiguous() for name, p in draft.named_parameters()}
    write_tensors(folder / "model.safetensors", tensors)
    config = {**draft.config.to_published(), "dtype": str(dtype).removeprefix("torch.")}
    config["torch_dtype"] = config["dtype"]
    write(folder / "config.json", json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class Made:
    """How a draft was made, for its card.

    Attributes:
        target: what it is called here.
        target_id: of the target on the hub, where it is known to be there.
        command: as it was typed.
        data: answer files, each with its number of answers.
        supervised: answer tokens learned from, of all tokens.
        settings: of the answers: sampling, system prompt, thinking.
    """

    target: str
    target_id: str | None
    licence: str | None
    command: str
    data: dict[str, int]
    supervised: tuple[int, int]
    settings: dict[str, Any]
    recipe: dict[str, Any]
    blocks: int
    seconds: float


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "dflash": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }


def card(made: Made, draft: DFlashDraftModel, measured: Acceptance | None) -> str:
    """The model card, as Markdown with the hub's front matter."""
    config = draft.config
    size = sum(p.numel() for p in draft.parameters())
    learned, read = made.supervised
    # What other programs are given: our alias means nothing to them, nor does the bare name of a folder.
    target = made.target_id or "path/to/the/target"
    lines = [
        "---",
        *([f"license: {made.licence}"] if made.licence else []),
        "library_name: dflash",
        *([f"base_model: {made.target_id}"] if made.target_id else []),
        "tags: [speculative-decoding, dflash, draft]",
        "---",
        "",
        f"# DFlash draft for {made.target}",
        "",
        f"Proposes blocks of {config.block_size - 1} tokens in one pass; the target verifies them, so answers are "
        "exactly the target's own. It is of no use by itself.",
        "",
        "| | |",
        "|---|---|",
        f"| target | {made.target} ({config.num_target_layers} layers, {config.hidden_size} wide) |",
        f"| draft | {config.num_hidden_layers} layers, {size / 1e6:.1f} M parameters, bfloat16 |",
        f"| block | {config.block_size} (the known token and {config.block_size - 1} proposals) |",
        f"| taps | outputs of layers {', '.join(map(str, config.target_layer_ids))} |",
        f"| mask token | {config.mask_token_id} |",
        "",
        "## Measured",
        "",
    ]
    if measured is None:
        lines.append("Nothing was kept apart to measure on.")
    else:
        share = ", ".join(f"{p:.0%}" for p in measured.by_position)
        lines += [
            f"On answers kept apart from training, greedy: **{measured.length:.2f} tokens a round** "
            f"(the target's own included; {measured.rounds} rounds).",
            f"Rounds in which slot 1, 2, ... stood: {share}.",
        ]
    data = ", ".join(f"{name} ({count} answers)" for name, count in made.data.items())
    lines += [
        "",
        "## Training",
        "",
        f"- data: {data}; answers by the target itself, {learned} answer tokens of {read} tokens",
        f"- answers: {json.dumps(made.settings)}",
        f"- {made.blocks} blocks in {made.seconds / 60:.0f} minutes",
        f"- recipe: {json.dumps(made.recipe)}",
        f"- versions: {json.dumps(versions())}",
        "",
        "```",
        made.command,
        "```",
        "",
        "## Use",
        "",
        "```python",
        "from dflash import load, load_draft, stream_generate",
        "",
        f'model, tokenizer = load("{made.target if made.target_id else target}")',
        'draft = load_draft("path/to/this/folder")',
        "```",
        "",
        "```",
        f'vllm serve {target} --speculative-config \'{{"method":"dflash","model":"path/to/this/folder",'
        f'"num_speculative_tokens":{config.block_size - 1}}}\'',
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path path/to/this/folder --speculative-num-draft-tokens {config.block_size}",
        "```",
        "",
    ]
    return "\n".join(lines)
