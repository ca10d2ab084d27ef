"""Checkpoints of a run: weights and optimiser state as safetensors, the rest as JSON; written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dflash import jsontext
from dflash.errors import CheckpointError
from dflash.train.files import write_tensors


def save(
    folder: Path, step: int, draft: nn.Module, optimizers: list[torch.optim.Optimizer], spent: dict[str, float]
) -> None:
    """Write ``step-N`` beside its place, move it there, then remove the older ones.

    Args:
        spent: seconds and blocks of the run so far.

    Raises:
        CheckpointError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".step-{step}.part"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    weights = {k: v.detach().cpu().contiguous() for k, v in draft.state_dict().items()}
    write_tensors(beside / "draft.safetensors", weights)
    numbers: dict[str, Any] = {"step": step, "spent": spent, "optimizers": []}
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
    write_tensors(beside / "optimizer.safetensors", tensors)
    (beside / "state.json").write_text(json.dumps(numbers), encoding="utf-8")
    final = folder / f"step-{step}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(beside, final)
    for old in folder.glob("step-*"):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def restore(path: Path, draft: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Put weights and optimiser state back to the bit; return the rest.

    Raises:
        CheckpointError: it does not fit this run.
    """
    try:
        numbers: dict[str, Any] = jsontext.parse((path / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "optimizer.safetensors")
        draft.load_state_dict(load_file(path / "draft.safetensors"))
        for i, optimizer in enumerate(optimizers):
            _restore(optimizer, i, numbers["optimizers"][i], tensors)
        return {"step": int(numbers["step"]), "spent": dict(numbers["spent"])}
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} cannot be resumed from ({why}): remove it to go on from an earlier one, or begin anew"
        ) from error


def _restore(
    optimizer: torch.optim.Optimizer, i: int, numbers: dict[str, dict[str, Any]], tensors: dict[str, Tensor]
) -> None:
    state: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in numbers.items()}
    for name, tensor in tensors.items():
        owner, index, key = name.split(".", 2)
        if int(owner) == i:
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
