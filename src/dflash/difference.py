"""Where two answers of one target part, and whether rounding explains it.

In exact arithmetic a drafted answer is the plain one. In floating point a block and a single token go
through matrix products of different shapes, which round differently; where the target's best two
scores are that close, either order is as good an answer of the target's as the other. So a
difference is judged by the target's scores at the first position where the answers part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dflash.decode import PREFILL_CHUNK
from dflash.errors import NonFiniteScores
from dflash.protocols import Features, Target

ULPS = 4
"""Units in the last place that two scores may be apart and still count as equal.

Two scores, in two runs, each a unit off. Measured: with blocks of 8 and 16 tokens of smollm2-135m in
bfloat16, 21 of 1,422 positions had another best token than one by one, all within 3 units; in float16
2, within 1; in float32 none.
"""

_SIGNIFICAND_BITS = {"bfloat16": 8, "float16": 11}
"""Bits of precision, the implicit one included. float32 is not here: it has to agree exactly."""


@dataclass(frozen=True)
class Difference:
    """The first position where two answers part.

    Attributes:
        position: index in the answer.
        plain: the token of plain decoding there; None where that answer has ended.
        drafted: the token of the answer with a drafter; None likewise.
        margin: by how much the target prefers its best token over its second, in logits.
        gap: by how much it prefers its best token over the worse of the two answers' tokens: the margin,
            if these are its best two. None when an answer has ended there.
        bound: the gap rounding may explain; 0 in float32.
    """

    position: int
    plain: int | None
    drafted: int | None
    margin: float
    gap: float | None
    bound: float

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.bound > 0 and self.gap <= self.bound


def first_difference(
    target: Target, dtype: str, prompt: list[int], plain: Sequence[int], drafted: Sequence[int]
) -> Difference | None:
    """Compare two answers to one prompt; None when all tokens are the same.

    Raises:
        NonFiniteScores: they part where the target, read in one forward, gives NaN: nobody can tell.
    """
    pairs = enumerate(zip_longest(plain, drafted))
    found = next(((i, one, other) for i, (one, other) in pairs if one != other), None)
    if found is None:
        return None
    position, one, other = found
    scores = next_scores(target, [*prompt, *plain[:position]])
    if any(map(math.isnan, scores)):  # no order, and no margin
        raise NonFiniteScores(f"{target.name} gives scores that are not numbers (NaN) where the two answers part")
    best, second = heapq.nlargest(2, scores)
    gap = None if one is None or other is None else best - min(scores[one], scores[other])
    return Difference(position, one, other, best - second, gap, rounding_bound(best, dtype))


def next_scores(target: Target, tokens: list[int]) -> list[float]:
    """The target's scores of every token to come next, by one plain forward over ``tokens``."""

    def absorb(tokens: list[list[int]], features: Features) -> None:
        """Nothing is tapped."""

    session = target.start(1, (), 1, PREFILL_CHUNK)
    scores: list[float] = session.prefill([tokens], absorb).tolist()[0][0]
    return scores


def rounding_bound(score: float, dtype: str) -> float:
    """``ULPS`` units in the last place of a score of this size."""
    bits = _SIGNIFICAND_BITS.get(dtype)
    if bits is None or score == 0:
        return 0.0
    return ULPS * 2.0 ** (math.floor(math.log2(abs(score))) - bits + 1)
