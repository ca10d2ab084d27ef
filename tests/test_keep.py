"""``keep`` refuses what no block can keep, before any cache has moved, and under ``python -O`` too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from dflash.errors import RequestError
from dflash.protocols import Features, Proposal
from dflash.sampling import SamplingParams

PROMPTS = [[11, 3, 60, 7, 22], [5, 9]]


def target_of(backend: str, architecture: str) -> Any:
    if backend == "torch":
        return tiny.target(architecture)
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("mlx-lm is not installed")
    import tiny_mlx

    return tiny_mlx.target(architecture)


def ignore(tokens: list[list[int]], features: Features) -> None:
    """Nobody drafts."""


def next_scores(session: Any) -> list[Any]:
    with session.verify([1, 2], Proposal([[3, 4], [5, 6]], 2)) as ahead:
        scores: list[Any] = ahead.scores.tolist()
    return scores


@pytest.mark.parametrize("counts", [[4, 1], [1, -1], [1], [1, 1.0], [True, 1]], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3-next"])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_numbers_that_the_block_does_not_have(backend: str, architecture: str, counts: list[Any]) -> None:
    session = target_of(backend, architecture).start(2, (), 8, 64)
    session.prefill(PROMPTS, ignore)
    before = next_scores(session)
    with (
        pytest.raises(RequestError, match="keep takes the number of positions to keep of each of the 2 rows"),
        session.verify([1, 2], Proposal([[3, 4], [5, 6]], 2)) as ahead,
    ):
        ahead.keep(counts)
    assert list(session.lengths) == [5, 2] and next_scores(session) == before


@pytest.mark.parametrize("architecture", ["llama", "qwen3-next"])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_round_is_kept_once(backend: str, architecture: str) -> None:
    session = target_of(backend, architecture).start(2, (), 8, 64)
    session.prefill(PROMPTS, ignore)
    with session.verify([1, 2], Proposal([[3, 4], [5, 6]], 2)) as ahead:
        ahead.keep([2, 1])
        with pytest.raises(RequestError, match="kept already"):
            ahead.keep([1, 1])
    assert list(session.lengths) == [7, 3]


@pytest.mark.parametrize("architecture", ["llama", "qwen3-next"])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_numpys_whole_numbers_count_too(backend: str, architecture: str) -> None:
    session = target_of(backend, architecture).start(2, (0,), 8, 64)
    session.prefill(PROMPTS, ignore)
    with session.verify([1, 2], Proposal([[3, 4], [5, 6]], 2)) as ahead:
        kept = ahead.keep(list(np.array([2, 1])))
    assert list(session.lengths) == [7, 3]
    assert {type(count) for count in [*kept.counts, *session.lengths]} == {int}


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_draft_without_hidden_states_is_told_so(backend: str, tmp_path: Path) -> None:
    target = target_of(backend, "llama")
    draft = tiny.draft(tiny.target("llama"))
    if backend == "mlx":
        import tiny_mlx

        draft = tiny_mlx.draft(tiny.target("llama"), tmp_path)
    drafting = draft.start(target, [SamplingParams()], "match", 8)
    with pytest.raises(RequestError, match="handed no hidden states"):
        drafting.extend([[1]], Features(None, [1]))


UNOPTIMIZED = """
import tiny
from dflash.errors import RequestError
from dflash.protocols import Proposal
assert False, "only without -O"
session = tiny.target("llama").start(1, (), 8, 64)
session.prefill([[1, 2, 3]], lambda tokens, features: None)
with session.verify([4], Proposal([[5]], 1)) as ahead:
    for counts in ([9], [-1], [1], [1]):
        try:
            ahead.keep(counts)
            print("kept")
        except RequestError:
            print("refused")
"""


def test_without_asserts_too() -> None:
    paths = [str(Path(tiny.__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-O", "-c", UNOPTIMIZED], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert done.stdout.split() == ["refused", "refused", "kept", "refused"], done.stderr
