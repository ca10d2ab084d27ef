"""Prompt lookup and a draft in one: who is asked when, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

import fakes
import tiny
from dflash.decode import Request, decode
from dflash.drafters import BothDrafters, NGramDrafter, NoDrafter
from dflash.drafters.ngram import Lookup
from dflash.errors import RequestError
from dflash.limits import Output
from dflash.protocols import Features, Proposal
from dflash.sampling import SamplingParams

NEW = list(range(1000, 2000))
"""Tokens that were never seen, one after the other."""


class Draft:
    """Proposes zeros, and remembers what it was told and how often it was asked."""

    block_size = 8
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.asked = 0
        self.known: list[list[int]] = []

    def start(self, *of: Any) -> Draft:
        return self

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        self.known = [known + new for known, new in zip(self.known or [[] for _ in tokens], tokens, strict=True)]

    def propose(self, pending: list[int], room: int) -> Proposal:
        self.asked += 1
        return Proposal([[0] * room] * len(pending), room)

    def select(self, rows: list[int]) -> None:
        self.known = [self.known[row] for row in rows]


def at_work(draft: Draft, *histories: list[int], **options: Any) -> Any:
    drafter = BothDrafters(draft, NGramDrafter(**options) if options else None)
    drafting = drafter.start(None, [SamplingParams()] * len(histories), "match", 8)  # type: ignore[arg-type]
    drafting.extend([list(history) for history in histories], Features(None, [len(h) for h in histories]))
    return drafting


def commit(drafting: Any, *rows: list[int]) -> None:
    drafting.extend([list(row) for row in rows], Features(None, [len(row) for row in rows]))


def test_the_draft_is_asked_only_where_nothing_is_found() -> None:
    draft = Draft()
    drafting = at_work(draft, [1, 2, 3, 4, 5, 1])
    assert drafting.propose([2], 3).tokens == [[3, 4, 5]]
    assert draft.asked == 0
    commit(drafting, [2, 3, 4, 5])
    assert drafting.propose([9], 3).tokens == [[0, 0, 0]]
    assert draft.asked == 1


def test_the_draft_is_told_of_everything() -> None:
    draft = Draft()
    drafting = at_work(draft, [1, 2, 3, 4, 5, 1], [7, 8])
    drafting.propose([2, 9], 3)
    commit(drafting, [2, 3, 4, 5], [9])
    assert draft.known == [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5], [7, 8, 9]]
    drafting.select([1])
    commit(drafting, [6])
    assert draft.known == [[7, 8, 9, 6]]


def test_a_good_draft_is_asked_where_the_lookup_promises_less() -> None:
    draft = Draft()
    drafting = at_work(draft, list(range(500)), min_ngram=1)
    assert drafting.propose([5], 7).tokens != [[0] * 7], "nothing is known of the draft yet, and seven are promised"
    pending = iter(NEW)
    commit(drafting, [5])
    for _ in range(20):  # the draft has five right, every time
        drafting.propose([next(pending)], 7)
        commit(drafting, [next(pending) for _ in range(6)])
    asked = draft.asked
    assert asked == 20
    drafting.propose([30], 7)  # the first guess fell, so one token is promised
    assert draft.asked == asked + 1
    commit(drafting, [30, 31, 32, 33, 34])  # the draft gave what the lookup had guessed: it deserves more again
    drafting.propose([35], 7)
    commit(drafting, [35, 36, 37, 38, 39, 40])
    drafting.propose([41], 7)
    assert draft.asked == asked + 2, "three were too few; seven are enough"


def test_rows_go_with_what_promises_more_to_all_of_them() -> None:
    draft = Draft()
    drafting = at_work(draft, list(range(500)), list(range(500, 900)), min_ngram=1)
    new = iter(NEW)
    for _ in range(30):  # two right a row
        drafting.propose([next(new), next(new)], 7)
        commit(drafting, [next(new) for _ in range(3)], [next(new) for _ in range(3)])
    asked = draft.asked
    assert drafting.propose([5, next(new)], 7).tokens[0] == [6, 7, 8, 9, 10, 11, 12], "seven and none: 3.5 each"
    assert draft.asked == asked


def misleading(right: int) -> list[int]:
    """A history in which ``right`` tokens of every continuation of 0, 1, 2 ... are true, and the next is a trap."""
    return [token for p in range(2000) for token in (*range(p, p + right + 1), -1)]


def run(drafting: Any, draft: Draft, rounds: int, drafted: int, looked_up: int, begin: int = 0) -> list[bool]:
    """Rounds of the text 0, 1, 2 ... from ``begin`` on; whether the draft was asked in each.

    Args:
        drafted, looked_up: tokens that stand where the draft is asked, and where it is not.
    """
    asked, pending = [], begin
    for _ in range(rounds):
        before = draft.asked
        proposal = drafting.propose([pending], 7)
        asked.append(draft.asked > before)
        if not asked[-1]:
            true = [*range(pending + 1, pending + looked_up + 1), -1]
            assert all(one == other for one, other in zip(proposal.tokens[0], true, strict=False))
        stood = drafted if asked[-1] else looked_up
        commit(drafting, [pending + i for i in range(stood + 1)])
        pending += stood + 1
    return asked


def test_a_lookup_that_is_always_found_and_always_wrong_is_used_once() -> None:
    draft = Draft()
    drafting = at_work(draft, misleading(0), min_ngram=1, max_ngram=1)
    assert run(drafting, draft, 40, drafted=2, looked_up=0) == [False] + [True] * 39


def test_a_lookup_that_brings_little_does_not_keep_a_draft_from_its_turn() -> None:
    draft = Draft()
    drafting = at_work(draft, misleading(1), min_ngram=1, max_ngram=1)
    assert run(drafting, draft, 40, drafted=5, looked_up=1) == [False] + [True] * 39


def test_a_draft_that_became_good_is_found_out() -> None:
    draft = Draft()
    drafting = at_work(draft, misleading(1), min_ngram=1, max_ngram=1)
    bad = run(drafting, draft, 100, drafted=0, looked_up=1)
    assert sum(bad[1:18]) == 1 and 4 <= sum(bad) <= 7, "it is asked now and then"
    good = run(drafting, draft, 40, drafted=6, looked_up=1, begin=1000)
    assert all(good[17:])


def test_text_that_repeats_whole_asks_no_draft() -> None:
    draft = Draft()
    drafting = at_work(draft, list(range(5000)), min_ngram=1)
    assert not any(run(drafting, draft, 100, drafted=7, looked_up=7))


class Wrong(NGramDrafter):
    """Always finds something, and is always wrong."""

    def start(self, *of: Any) -> Lookup:
        lookup = super().start(*of)
        for row in lookup._rows:
            row.continuation = lambda pending, room: [TRAP] * room  # type: ignore[method-assign]
        return lookup


TRAP = 63


def test_a_good_draft_is_hardly_slowed_down_by_a_lookup_that_is_always_wrong() -> None:
    target = tiny.target("qwen3")
    prompt = [5, 9, 2, 40]
    plain = Output(lambda ids: "", 61)
    list(decode(target, NoDrafter(), [Request(prompt, SamplingParams(), plain)], block_size=1))
    assert TRAP not in plain.tokens
    done = Output(lambda ids: "", 61)
    both = BothDrafters(fakes.OracleDrafter(6, [[*prompt, *plain.tokens]], fakes.perfect), Wrong(6))
    rounds = list(decode(target, both, [Request(prompt, SamplingParams(), done)], block_size=6))
    assert done.tokens == plain.tokens
    assert len(rounds) <= 1 + 2 + 60 // 6


@pytest.mark.parametrize("given", [("ngram",), (None,), (Draft(), "ngram"), (Draft(), NoDrafter())], ids=repr)
def test_what_is_no_drafter_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="BothDrafters takes a loaded draft"):
        BothDrafters(*given)


def test_a_name_is_no_draft_and_the_message_says_how_to_load_it() -> None:
    with pytest.raises(RequestError, match=r"load the draft with load_draft\('smollm2-135m'\)") as told:
        BothDrafters("smollm2-135m")  # type: ignore[arg-type]
    assert "NoneType" not in str(told.value)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3-next"])
def test_it_changes_nothing(architecture: str) -> None:
    target = tiny.target(architecture)
    prompts = [[(7 * i + 3) % 64 for i in range(9)] * 3, [5, 9, 2] * 7, [11, 50, 8]]

    def answers(drafter: Any) -> tuple[list[list[int]], int]:
        done = [Output(lambda ids: "", 30) for _ in prompts]
        requests = [Request(p, SamplingParams(), o) for p, o in zip(prompts, done, strict=True)]
        accepted = sum(e.accepted for emitted in decode(target, drafter, requests, block_size=8) for e in emitted)
        return [output.tokens for output in done], accepted

    plain, _ = answers(NoDrafter())
    both = BothDrafters(tiny.draft(target), NGramDrafter(min_ngram=1))
    found, accepted = answers(both)
    assert found == plain
    assert accepted > 0
