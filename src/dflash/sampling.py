"""How one request is sampled. Pure data: every backend applies it in its verifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypeGuard

from dflash.errors import RequestError

_LARGEST = 3.4e38
_SMALLEST = 2.0**-126
"""Of float32's normal numbers: below it devices differ, and many have zeros."""


@dataclass(frozen=True)
class SamplingParams:
    """The processors of one request, applied in this order, as transformers applies them.

    logit_bias (added) -> repetition_penalty -> temperature -> top_k -> top_p -> min_p.
    Each is applied at every position of a block with the prefix that position would have,
    so verification stays exact under all of them.

    Backends compute in float32. So a temperature too small for it (below 1.2e-38) is 0, which is greedy, and a
    repetition penalty too small for it is the smallest it has. Numbers of any kind are taken (numpy's too) and kept as
    Python's own.

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
        temperature = _in_range("temperature", self.temperature, 0.0, 100.0, "0 is greedy")
        penalty = _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 is none", open_low=True)
        kept = {
            "temperature": temperature if temperature >= _SMALLEST else 0.0,
            "top_p": _in_range("top_p", self.top_p, 0.0, 1.0, "1 keeps all", open_low=True),
            "top_k": _whole("top_k", self.top_k, "of at least 0 (0 keeps all)"),
            "min_p": _in_range("min_p", self.min_p, 0.0, 1.0, "0 keeps all"),
            "repetition_penalty": max(penalty, _SMALLEST),
            "logit_bias": _biases(self.logit_bias),
            "seed": None if self.seed is None else _whole("seed", self.seed, "from 0 to 2**63 - 1, or None", 2**63 - 1),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)  # the way to set a field of a frozen dataclass

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether the raw scores decide: greedy, with nothing that changes the order of tokens."""
        return self.greedy and self.repetition_penalty == 1.0 and not self.logit_bias


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, Python's own or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _in_range(name: str, value: Any, low: float, high: float, hint: str, open_low: bool = False) -> float:
    number = _number(value)
    if number is None or not low <= number <= high or (open_low and number == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be a number in {bracket}{low:g}, {high:g}] ({hint}), not {value!r}")
    return number


def _whole(name: str, value: Any, range_: str, high: float = math.inf) -> int:
    if not is_whole(value) or not 0 <= value <= high:
        raise RequestError(f"{name} must be a whole number {range_}, not {value!r}")
    return int(value)


def _biases(given: Any) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not be {given!r}")
    biases = {}
    for token, bias in given.items():
        if not is_whole(token) or token < 0:
            raise RequestError(f"logit_bias maps token ids (whole numbers) to numbers; {token!r} is no token id")
        number = -math.inf if isinstance(bias, Real) and bias == -math.inf else _number(bias)
        if number is None:
            raise RequestError(f"logit_bias of token {token} must be finite or -inf (ban), not {bias!r}")
        biases[int(token)] = number
    return biases


def _number(value: Any) -> float | None:
    """As Python's own; None if it is none, or not finite as the float32 it becomes."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if -_LARGEST <= number <= _LARGEST else None
