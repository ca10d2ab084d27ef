"""Whether a tensor that a draft's files hold is the target's."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

ROWS = 4096
"""Compared at a time: the file's tensor is never whole in memory."""


def is_copy(name: str, file: Path, own: Tensor) -> bool:
    """Whether a table [tokens, hidden] of a file has the values of the target's ``own``.

    They are equal where the coarser of the two dtypes cannot tell them apart: one was cast from the other. Rows that
    only one of them has are padding.
    """
    with safe_open(file, framework="pt") as tensors:
        stored = tensors.get_slice(name)
        rows = min(stored.get_shape()[0], len(own))
        for start in range(0, rows, ROWS):
            theirs, mine = stored[start : min(start + ROWS, rows)], own[start : min(start + ROWS, rows)]
            if not theirs.is_floating_point() or not mine.is_floating_point():
                return False
            apart = max(torch.finfo(theirs.dtype).eps, torch.finfo(mine.dtype).eps)
            theirs, mine = theirs.to(mine.device).float(), mine.float()
            if not torch.allclose(theirs, mine, rtol=apart, atol=1e-7, equal_nan=True):
                return False
    return True
