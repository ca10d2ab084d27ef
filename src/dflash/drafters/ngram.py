"""Prompt lookup: propose what followed the same n-gram earlier in prompt or answer.

Needs no model. Long n-grams are tried first; the latest earlier occurrence is continued.
The idea is public as "prompt lookup decoding" (A. Saxena, 2023); the index makes a lookup
cost the same however long the text has become.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash.errors import RequestError
from dflash.protocols import NOTHING, Features, Proposal, Target
from dflash.sampling import SamplingParams, is_whole


class NGramDrafter:
    """Prompt lookup decoding.

    Args:
        block_size: the pending token and up to ``block_size - 1`` proposals.
        max_ngram: longest n-gram looked for.
        min_ngram: shortest n-gram believed. 1 proposes often and is often wrong.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, block_size: int = 8, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not is_whole(block_size) or block_size < 2:
            raise RequestError(
                f"block_size must be a whole number of at least 2, not {block_size!r}; "
                "for plain decoding pass draft=None"
            )
        if not (is_whole(min_ngram) and is_whole(max_ngram) and 1 <= min_ngram <= max_ngram):
            raise RequestError(f"n-gram lengths must satisfy 1 <= min <= max, not {min_ngram!r} and {max_ngram!r}")
        self.block_size = block_size
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> Lookup:
        """Empty histories for as many rows as there are sampling parameters."""
        return Lookup([_History(self.sizes, self.block_size) for _ in sampling])


class _History:
    """The tokens of one row, and where each n-gram was last seen to end."""

    def __init__(self, sizes: range, trust: int) -> None:
        self.tokens: list[int] = []
        self.sizes = sizes
        self._trust = trust
        self._right = 1.0
        """The share of guesses that began right, as good as only the last few counted."""
        self._guess: list[int] = []
        self._guessed_at = 0
        self._ends: dict[tuple[int, ...], int] = {}

    @property
    def promise(self) -> float:
        """Tokens to be expected of the guess: it is as long as the last ones deserved, where they began right."""
        return self._right * len(self._guess)

    def propose(self, pending: int, room: int) -> list[int]:
        """A continuation as long as the last ones deserve, at most ``room`` tokens."""
        self._judge(pending)
        self._guess = self.continuation(pending, min(room, self._trust))
        self._guessed_at = len(self.tokens) + 1
        self._trust = min(self._trust, max(room, 1))
        return self._guess

    def _judge(self, pending: int) -> None:
        """Propose more after what came true whole, less after what did not: a longer block costs more to check.

        It is judged by what came, so a guess that nobody proposed is judged too.
        """
        came = [*self.tokens[self._guessed_at : self._guessed_at + len(self._guess)], pending]
        known = [one == other for one, other in zip(self._guess, came, strict=False)]
        if known:
            self._right = (self._right + known[0]) / 2
        if False in known:
            self._trust = max(1, known.index(False))
        elif self._guess and len(known) == len(self._guess):
            self._trust = 2 * self._trust + 1

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # An n-gram is indexed once a token follows it: its continuation is never empty.
            for n in self.sizes:
                if len(self.tokens) >= n:
                    self._ends[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)

    def continuation(self, pending: int, room: int) -> list[int]:
        """What followed the latest earlier occurrence of the longest known n-gram, at most ``room`` tokens."""
        recent = [*self.tokens[max(0, len(self.tokens) - self.sizes.start) :], pending]
        for n in self.sizes:
            ending = tuple(recent[-n:])
            end = self._ends.get(ending) if len(recent) >= n else None
            if len(recent) > n and ending == tuple(recent[-n - 1 : -1]):
                end = len(self.tokens)  # a run of one token, which so far only the pending one follows
            if end is not None:
                return self._read_on(end, pending, room)
        return []

    def _read_on(self, end: int, pending: int, room: int) -> list[int]:
        """The tokens from ``end`` on; past the newest one the repetition goes on with what was just read."""
        found = [*self.tokens[end : end + room], pending][:room]
        while len(found) < room:
            found.append(found[len(found) - (len(self.tokens) + 1 - end)])
        return found


def padded(found: list[list[int]], pending: list[int]) -> Proposal:
    """Continuations as one proposal, as wide as the longest.

    A row that found less repeats its last token: a guess as good as any, and verified like any.
    """
    width = max(map(len, found))
    if width == 0:
        return NOTHING
    return Proposal([[*f, *[(f or [p])[-1]] * (width - len(f))] for f, p in zip(found, pending, strict=True)], width)


class Lookup:
    """Prompt lookup at work."""

    def __init__(self, rows: list[_History]) -> None:
        self._rows = rows

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        for row, new in zip(self._rows, tokens, strict=True):
            row.extend(new)

    def propose(self, pending: list[int], room: int) -> Proposal:
        return padded(self.continuations(pending, room), pending)

    def continuations(self, pending: list[int], room: int) -> list[list[int]]:
        """What each row would propose, at most ``room`` tokens; none where it found nothing."""
        return [row.propose(token, room) for row, token in zip(self._rows, pending, strict=True)]

    @property
    def promise(self) -> float:
        """Tokens to be expected of the continuations, a row on average."""
        return sum(row.promise for row in self._rows) / len(self._rows)

    def select(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
