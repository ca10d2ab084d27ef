"""Checkpoints of a run: weights and optimiser state as safetensors, the rest as JSON; written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash.errors import CheckpointError


def save(folder: Path, step: int, draft: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Write ``step-N`` beside its place, move it there, then remove the older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".step-{step}.part"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    save_file({k: v.detach().cpu().contiguous() for k, v in draft.state_dict().items()}, beside / "draft.safetensors")
    numbers: dict[str, Any] = {"step": step, "optimizers": []}
    tensors: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        kept: dict[str, dict[str, Any]] = {}
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{i}.{index}.{key}"] = value.detach().cpu().contiguous()
                else:
                    kept.setdefault(str(index), {})[key] = value
        numbers["optimizers"].append(kept)
    save_file(tensors, beside / "optimizer.safetensors")
    (beside / "state.json").write_text(json.dumps(numbers), encoding="utf-8")
    final = folder / f"step-{step}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(beside, final)
    for old in folder.glob("step-*"):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    whole = [path for path in folder.glob("step-*") if (path / "state.json").is_file()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def restore(path: Path, draft: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Put weights and optimiser state back to the bit; return the rest.

    Raises:
        CheckpointError: it does not fit this run.
    """
    try:
        numbers: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "optimizer.safetensors")
        draft.load_state_dict(load_file(path / "draft.safetensors"))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be resumed from: {str(error).splitlines()[0]}") from error
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in numbers["optimizers"][i].items()}
        for name, tensor in tensors.items():
            owner, index, key = name.split(".", 2)
            if int(owner) == i:
                state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return numbers
