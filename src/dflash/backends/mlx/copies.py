"""Whether a tensor that a draft's files hold is the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.architectures import Table

ROWS = 4096
"""Compared at a time."""
PRECISION = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}
QUANTIZED = 0.5
"""Relative error of a table that is quantized below another: 4 bits make 0.1, two unrelated tables are 1.4 apart."""


def is_copy(name: str, file: Path, table: Table) -> bool:
    """Whether a tensor [tokens, hidden] of a file has the values of the target's embedding or head, as published.

    They are equal where the coarser of the two dtypes cannot tell them apart: one was cast from the other. Of a
    quantized target as much is asked as its quantization keeps. Rows that only one of them has are padding.
    """
    files: Any = mx.load(str(file))
    stored, own = files[name], table.module
    if stored.dtype not in PRECISION:
        return False
    rows = min(stored.shape[0], (own.scales if "scales" in own else own.weight).shape[0])
    error = length = 0.0
    for start in range(0, rows, ROWS):
        theirs, mine = stored[start : min(start + ROWS, rows)], _rows(own, start, min(start + ROWS, rows))
        apart = max(PRECISION[theirs.dtype], PRECISION[mine.dtype])
        theirs, mine = theirs.astype(mx.float32), mine.astype(mx.float32) / table.factor
        if "scales" in own:
            error += float((theirs - mine).square().sum().item())
            length += float(theirs.square().sum().item())
        elif not mx.allclose(theirs, mine, rtol=apart, atol=1e-7, equal_nan=True).item():
            return False
    return error <= QUANTIZED**2 * length


def _rows(own: Any, start: int, stop: int) -> mx.array:
    """Rows of an embedding or linear layer, quantized or not."""
    if "scales" not in own:
        rows: mx.array = own.weight[start:stop]
        return rows
    biases = own.get("biases")
    return mx.dequantize(
        own.weight[start:stop],
        own.scales[start:stop],
        None if biases is None else biases[start:stop],
        group_size=own.group_size,
        bits=own.bits,
        mode=own.mode,
    )
