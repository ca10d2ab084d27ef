"""A draft of which nothing is ever accepted is told of: once for a pair, and never of one that helps."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

import dflash
import fakes
import tiny
from dflash.backends.draft import FRUITLESS, Record
from dflash.drafters import BothDrafters
from dflash.protocols import Target

PROMPT = [11, 3, 60, 7, 22]
NEVER = "had a token that .* accepted, so it only costs time: check that it was made for this target"


def pair(backend: str, folder: Path) -> tuple[Target, Any]:
    """A tiny target, and a draft with random weights."""
    one = tiny.target("llama")
    if backend == "torch":
        return one, tiny.draft(one)
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    import tiny_mlx

    return tiny_mlx.target("llama"), tiny_mlx.draft(one, folder)


def answer(target: Target, drafter: Any, forced: int | None, count: int = 52) -> dflash.Generation:
    """With a token forced, the target says nothing else, and a draft that does not know it is always wrong."""
    bias = None if forced is None else {forced: 1e5}
    return dflash.generate(target, drafter, None, PROMPT, max_tokens=count, logit_bias=bias)


def never_guessed(target: Target, draft: Any) -> int:
    """A token that this draft does not once propose after itself."""
    return next(token for token in range(64) if answer(target, draft, token, 30).accepted == 0)


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with n-grams"])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_draft_that_is_always_wrong_is_told_of_once(backend: str, both: bool, tmp_path: Path) -> None:
    target, scout = pair(backend, tmp_path / "scout")
    forced = never_guessed(target, scout)
    target, draft = pair(backend, tmp_path / "draft")
    if both:  # the lookup is always right here: the draft is asked too seldom to be told of
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert answer(target, BothDrafters(draft), forced, 250).accepted > 0
        return
    with pytest.warns(UserWarning, match=NEVER) as told:
        answers = [answer(target, draft, forced) for _ in range(10)]  # 51 rounds each
    assert sum(one.accepted for one in answers) == 0 and len(told) == 1
    assert "none of the last 200 blocks" in str(told[0].message) and target.name in str(told[0].message)


def test_one_accepted_token_begins_the_count_anew() -> None:
    record = Record("draft", "target")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            for _ in range(FRUITLESS // 2 - 1):
                record.came([[1], [2]])
            record.came([[1, 2], [3]])
    for _ in range(FRUITLESS // 2 - 1):
        record.came([[1], [2]])
    with pytest.warns(UserWarning, match=NEVER):
        record.came([[1], [2]])


def test_nothing_is_said_of_other_drafters() -> None:
    """Those that cost no pass of a model."""
    target = tiny.target("llama")
    own = dflash.generate(target, None, None, PROMPT, max_tokens=260).tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hostile = fakes.OracleDrafter(4, [[*PROMPT, *own]], fakes.hostile)
        got = dflash.generate(target, hostile, None, PROMPT, max_tokens=250)
        assert got.accepted == 0 and len(got.rounds) == 249
        assert dflash.generate(target, "ngram", None, PROMPT, max_tokens=250).tokens == got.tokens
