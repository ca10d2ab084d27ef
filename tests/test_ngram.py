"""Prompt lookup: what followed the same n-gram earlier."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash.drafters import NGramDrafter
from dflash.drafters.ngram import Lookup
from dflash.errors import RequestError
from dflash.protocols import NOTHING, Features
from dflash.sampling import SamplingParams

A, B, C, D, E, X, Y, Z = range(8)


def lookup(*histories: list[int], **options: Any) -> Lookup:
    """At work on rows whose targets hold these tokens."""
    drafter = NGramDrafter(**options)
    drafting = drafter.start(None, [SamplingParams()] * len(histories), "match", 8)  # type: ignore[arg-type]
    drafting.extend([list(history) for history in histories], Features(None, [len(h) for h in histories]))
    return drafting


def proposed(history: list[int], pending: int, room: int = 4, **options: Any) -> list[int]:
    proposal = lookup(history, **options).propose([pending], room)
    assert all(len(row) == proposal.width <= room for row in proposal.tokens)
    return list(proposal.tokens[0]) if proposal.width else []


def test_what_followed_the_same_words_is_proposed() -> None:
    assert proposed([A, B, C, D, E, X, A], B) == [C, D, E, X]


def test_nothing_is_proposed_for_what_was_never_seen() -> None:
    assert lookup([A, B, C, D]).propose([X], 4) == NOTHING
    assert lookup([A, B, C]).propose([B], 4) == NOTHING  # B was seen, but not after C
    assert lookup([]).propose([A], 4) == NOTHING
    assert lookup([A]).propose([A], 4) == NOTHING


def test_longest_match_wins_over_a_later_shorter_one() -> None:
    history = [X, A, B, C, Y, Y, A, B, D, Y, X, A]
    assert proposed(history, B, 1, max_ngram=3) == [C]
    assert proposed(history, B, 1, max_ngram=2) == [D]


def test_latest_of_equal_matches_wins() -> None:
    assert proposed([A, B, C, A, B, D, A], B, 1) == [D]


def test_matches_shorter_than_the_shortest_are_not_believed() -> None:
    assert proposed([A, B, C, D], B, 2, min_ngram=1) == [C, D]
    assert proposed([A, B, C, D], B, 2, min_ngram=2) == []


def test_repetition_goes_on_past_the_newest_token() -> None:
    assert proposed([A, B, A], B, 6) == [A, B, A, B, A, B]
    assert proposed([A, A], A, 5) == [A] * 5
    assert proposed([A, B, C, A, B], C, 7) == [A, B, C, A, B, C, A]


@pytest.mark.parametrize("room", range(1, 9))
def test_room_is_respected_and_filled(room: int) -> None:
    assert proposed([A, B, C, D, E, X, A], B, room) == [C, D, E, X, A, B, C, D][:room]


def test_no_room_is_no_proposal() -> None:
    assert lookup([A, B, C, A]).propose([B], 0) == NOTHING


def test_rows_that_found_less_are_padded_to_the_widest() -> None:
    drafting = lookup([A, B, C, D, A], [X, Y, Z])
    proposal = drafting.propose([B, A], 3)
    assert proposal.tokens == [[C, D, A], [A, A, A]]
    assert (proposal.width, proposal.q) == (3, None)


def test_rows_are_kept_in_the_order_asked_for() -> None:
    drafting = lookup([A, B, C, A], [X, Y, Z, X], [D, E, Y, D])
    drafting.select([2, 0])
    assert drafting.propose([E, B], 1).tokens == [[Y], [C]]
    drafting.extend([[E], [B]], Features(None, [1, 1]))
    drafting.select([1])
    assert drafting.propose([C], 2).tokens == [[A, B]]  # two tokens: that row's guess of one came true


def test_history_grows_in_pieces_as_in_one() -> None:
    rng = random.Random(0)
    history = [rng.randrange(4) for _ in range(200)]
    pieces = lookup([])
    while history:
        size = rng.randrange(1, 5)
        pieces.extend([history[:size]], Features(None, [size]))
        history = history[size:]
        whole = lookup(list(pieces._rows[0].tokens))
        for pending in range(4):
            own, want = pieces._rows[0], whole._rows[0]
            assert own.continuation(pending, 6) == want.continuation(pending, 6)


def test_proposals_are_what_a_search_of_the_whole_history_finds() -> None:
    rng = random.Random(1)
    for _ in range(300):
        history = [rng.randrange(3) for _ in range(rng.randrange(25))]
        pending, room = rng.randrange(3), rng.randrange(1, 7)
        assert proposed(history, pending, room) == searched([*history, pending], room)


def searched(text: list[int], room: int, longest: int = 4, shortest: int = 2) -> list[int]:
    """By definition: the latest earlier occurrence of the longest ending, read on as a repetition."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if len(text) >= n and text[start : start + n] == text[-n:]:
                period = len(text) - n - start
                return [text[len(text) - period + i % period] for i in range(room)]
    return []


class Reads(list[int]):
    """Counts the tokens that are read from a history."""

    count = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Reads.count += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        raise AssertionError("a lookup went through the whole history")


@pytest.mark.parametrize("length", [100, 10_000])
def test_cost_of_a_lookup_does_not_grow_with_the_history(length: int) -> None:
    rng = random.Random(0)
    drafting = lookup([rng.randrange(5) for _ in range(length)])
    drafting._rows[0].tokens = Reads(drafting._rows[0].tokens)
    Reads.count = 0
    drafting.propose([A], 7)
    drafting.extend([[A]], Features(None, [1]))
    assert Reads.count < 30


@pytest.mark.parametrize("options", [{"block_size": value} for value in (1, 0, -1, 2.5, "8", True, None)], ids=str)
def test_senseless_block_size_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="block_size"):
        NGramDrafter(**options)


@pytest.mark.parametrize("sizes", [(0, 2), (3, 2), (-1, 2), (2, 2.5), ("2", "4"), (True, True), (None, 4)], ids=str)
def test_senseless_ngram_lengths_are_refused(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(RequestError, match="n-gram"):
        NGramDrafter(min_ngram=sizes[0], max_ngram=sizes[1])


def test_proposals_shrink_where_they_fall_and_grow_where_they_stand() -> None:
    """What an answer that does not repeat would pay for blocks that are always wrong."""
    drafting = NGramDrafter(block_size=8, min_ngram=1).start(None, [SamplingParams()], "match", 8)  # type: ignore[arg-type]
    drafting.extend([list(range(1000))], Features(None, [1000]))
    widths, pending = [], 5
    for stood in (0, 0, 1, 3, 2, 7):  # of 7, 1, 1, 3, 7 and 2 proposed
        [found] = drafting.propose([pending], 7).tokens
        assert found == list(range(pending + 1, pending + 1 + len(found)))
        widths.append(len(found))
        came = found[:stood]
        drafting.extend([[pending, *came]], Features(None, [1 + len(came)]))
        # The target's own token: what goes on, or, where a proposal fell, a leap elsewhere.
        pending = found[-1] + 1 if len(came) == len(found) else pending + 100
    widths.append(drafting.propose([pending], 7).width)
    assert widths == [7, 1, 1, 3, 7, 2, 5]


def test_a_guess_that_was_not_proposed_is_judged_by_what_came() -> None:
    drafting = lookup(list(range(1000)), min_ngram=1, block_size=4)
    assert drafting.continuations([5], 7) == [[6, 7, 8, 9]]
    drafting.extend([[5]], Features(None, [1]))  # another drafter was asked, and fell; the target's own token is 6
    assert drafting.continuations([6], 7) == [[7, 8, 9, 10]], "not known to be wrong"
    drafting.extend([[6, 7, 8, 9, 10]], Features(None, [5]))  # another drafter gave all of it
    assert len(drafting.continuations([11], 20)[0]) == 9
    drafting.extend([[11, 12, 13]], Features(None, [3]))
    assert len(drafting.continuations([500], 20)[0]) == 2
