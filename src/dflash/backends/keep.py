"""What may be asked of a round, and what must come of it, on every backend.

Raised, not asserted: drafters, loops and models of others meet it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash.errors import RequestError, UnsupportedTarget
from dflash.sampling import is_whole


def checked_counts(counts: Sequence[int], rows: int, width: int) -> list[int]:
    """How many positions of a block each row keeps, as Python's own numbers.

    Raises:
        RequestError: a row too few or too many, or a number of positions that the block does not have.
    """
    if len(counts) != rows or not all(is_whole(count) and 0 <= count <= width for count in counts):
        raise RequestError(
            f"keep takes the number of positions to keep of each of the {rows} rows, from 0 to {width} as there are in "
            f"the block, not {list(counts)}"
        )
    return [int(count) for count in counts]


def check_first(kept: bool) -> None:
    """Whether a round was not kept before.

    Raises:
        RequestError: it was; the caches have moved on.
    """
    if kept:
        raise RequestError("this round was kept already: keep takes all rows at once, once a round")


def check_tap(target: str, shape: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    """Whether a layer gave what a draft reads.

    Args:
        expected: rows, positions and width.

    Raises:
        UnsupportedTarget: it did not: the layers of some models pass on several streams, or other widths (Gemma 3n).
    """
    if shape != expected:
        raise UnsupportedTarget(
            f"a draft cannot read the layers of {target}, whose outputs have the shape {list(shape)} and not rows, "
            f"positions and width {list(expected)}: use it without a draft, with n-grams or plain decoding"
        )
