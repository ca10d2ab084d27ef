"""Sampling parameters at the ends of float32 and of kinds that are not Python's own, on every backend."""

from __future__ import annotations

import fractions
import functools
import importlib.util
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dflash.decode import Request, decode
from dflash.drafters import NGramDrafter, NoDrafter
from dflash.errors import RequestError
from dflash.generate import generate
from dflash.limits import Output
from dflash.sampling import SamplingParams

BACKENDS = ["torch", *(["mlx"] if importlib.util.find_spec("mlx_lm") else [])]
PROMPT = [11, 3, 60, 7, 22, 11, 3, 60]
seeded = settings(derandomize=True, deadline=None, max_examples=40)


def target(backend: str) -> Any:
    if backend == "torch":
        return tiny.target("qwen3")
    import tiny_mlx

    return tiny_mlx.target("qwen3")


def answer(backend: str, drafter: Any, params: SamplingParams, verification: str = "match") -> list[int]:
    done = Output(lambda ids: "", 10)
    requests = [Request(PROMPT, params, done)]
    for _ in decode(target(backend), drafter, requests, block_size=4, verification=verification):
        pass
    return done.tokens


@functools.cache
def greedy(backend: str) -> list[int]:
    return answer(backend, NoDrafter(), SamplingParams())


LOOKUP = NGramDrafter(4, 2, 1)
VANISHING = [5e-324, 1e-320, 1e-46, 1e-45, 1e-40, 1e-38]
"""Below float32's normal numbers: 0 on some devices, and a divisor of 0 gives NaN."""


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("temperature", VANISHING)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vanishing_temperature_is_greedy(backend: str, temperature: float, verification: str) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    assert params.greedy and params.plain
    for drafter in (NoDrafter(), LOOKUP):
        assert answer(backend, drafter, params, verification) == greedy(backend)


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-10])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_that_overflows_every_quotient_takes_the_best(
    backend: str, temperature: float, verification: str
) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    for drafter in (NoDrafter(), LOOKUP):
        assert answer(backend, drafter, params, verification) == greedy(backend)


EXTREMES = {
    "temperature": [0, 5e-324, 1e-46, 1e-38, 1.2e-38, 1e-30, 1e-3, 0.7, 1, 100],
    "top_p": [5e-324, 1e-46, 1e-38, 1e-12, 0.5, 1 - 1e-12, 1],
    "top_k": [0, 1, 63, 64, 65, 2**31, 2**63, 10**30],
    "min_p": [0, 5e-324, 1e-46, 1e-12, 0.5, 1],
    "repetition_penalty": [5e-324, 1e-46, 1e-38, 1e-3, 1, 1.3, 100],
    "logit_bias": [{}, {5: 3.4e38}, {5: -3.4e38, 7: 3.4e38}, {5: 1e-46}, dict.fromkeys(range(63), -math.inf), {3: -50}],
    "seed": [0, 1, 2**63 - 1],
}


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("backend", BACKENDS)
@given(options=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in EXTREMES.items()}))
@seeded
def test_extremes_of_all_parameters_together(backend: str, verification: str, options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    tokens = answer(backend, LOOKUP, params, verification)
    assert len(tokens) == 10 and all(0 <= token < 64 for token in tokens)
    assert answer(backend, LOOKUP, params, verification) == tokens
    if verification == "match" or params.greedy:
        assert answer(backend, NoDrafter(), params) == tokens
    banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    assert not banned & set(tokens)


NUMPYS: dict[str, Any] = {
    "float64": {"temperature": np.float64(0.5), "top_p": np.float64(0.5), "min_p": np.float64(0.25)},
    "float32": {"temperature": np.float32(0.5), "top_p": np.float32(0.5), "repetition_penalty": np.float32(1.5)},
    "float16": {"temperature": np.float16(0.5), "min_p": np.float16(0.25)},
    "whole": {"temperature": np.int64(1), "top_k": np.int64(3), "seed": np.int64(7), "top_p": np.int32(1)},
    "biases": {"temperature": 1.0, "logit_bias": {np.int64(5): np.float32(2.0), np.uint8(7): np.float64(-np.inf)}},
    "fraction": {"temperature": fractions.Fraction(1, 2)},
}


@pytest.mark.parametrize("kind", NUMPYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_other_kinds_are_taken_as_pythons_own(backend: str, kind: str) -> None:
    params = SamplingParams(**{"seed": 3, **NUMPYS[kind]})
    for name, value in vars(params).items():
        parts = [*value, *value.values()] if name == "logit_bias" else [value]
        assert all(type(part) in (int, float) for part in parts)
    for verification in ("match", "rejection"):
        own = SamplingParams(**vars(params))
        assert answer(backend, LOOKUP, params, verification) == answer(backend, LOOKUP, own, verification)


def test_counts_of_numpy_are_taken_too() -> None:
    of = tiny.target("qwen3")
    options = {"max_tokens": np.int64(5), "block_size": np.int32(4), "prefill_chunk": np.int64(2)}
    lookup = NGramDrafter(np.int64(4), np.int64(3), np.int64(1))
    assert len(generate(of, lookup, tiny.tokenizer(), PROMPT, **options).tokens) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": np.float32(np.nan)},
        {"temperature": np.float64(np.inf)},
        {"temperature": np.bool_(True)},
        {"temperature": np.array([0.5])},
        {"top_p": fractions.Fraction(10**400)},
        {"top_k": np.float64(3)},
        {"top_k": np.int64(-1)},
        {"seed": np.uint64(2**63)},
        {"logit_bias": {5: np.float32(np.nan)}},
        {"logit_bias": {5: np.inf}},
        {"logit_bias": {np.float64(5): 1.0}},
    ],
    ids=str,
)
def test_numbers_of_other_kinds_are_checked_alike(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)
