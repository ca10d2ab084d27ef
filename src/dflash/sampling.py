"""How one request is sampled. Pure data: every backend applies it in its verifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash.errors import RequestError

_LARGEST = 3.4e38


@dataclass(frozen=True)
class SamplingParams:
    """The processors of one request, applied in this order, as transformers applies them.

    logit_bias (added) -> repetition_penalty -> temperature -> top_k -> top_p -> min_p.
    Each is applied at every position of a block with the prefix that position would have,
    so verification stays exact under all of them.

    Attributes:
        temperature: 0 is greedy; above, the divisor of the logits.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the most likely one; 0 keeps all.
        repetition_penalty: over prompt and answer, as in CTRL (arXiv 1909.05858); 1 is none.
        logit_bias: token id -> number added to its logit; ``-inf`` bans the token.
        seed: of this request's own generator; None takes a fresh one.

    Raises:
        RequestError: a value outside its range, or not a finite number.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0, "0 is greedy")
        _in_range("top_p", self.top_p, 0.0, 1.0, "1 keeps all", open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0, "0 keeps all")
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 is none", open_low=True)
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise RequestError(f"top_k must be a whole number of at least 0 (0 keeps all), not {self.top_k!r}")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63
        ):
            raise RequestError(f"seed must be a whole number from 0 to 2**63 - 1, or None, not {self.seed!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError(f"logit_bias maps token ids (whole numbers) to numbers; {token!r} is no token id")
            if not _is_number(bias) and bias != -math.inf:
                raise RequestError(f"logit_bias of token {token} must be finite or -inf (ban), not {bias!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether the raw scores decide: greedy, with nothing that changes the order of tokens."""
        return self.greedy and self.repetition_penalty == 1.0 and not self.logit_bias


def _in_range(name: str, value: float, low: float, high: float, hint: str, open_low: bool = False) -> None:
    if not _is_number(value) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be a number in {bracket}{low:g}, {high:g}] ({hint}), not {value!r}")


def _is_number(value: Any) -> bool:
    """Finite, as the float32 it becomes. NaN is in no range."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -_LARGEST <= value <= _LARGEST
