"""Single rows behind the calls of a batch: for targets that cannot read rows of different lengths together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dflash.backends.keep import checked_counts
from dflash.protocols import Array, Features, Proposal, Round, Session

Join = Callable[[list[Array]], Array]
"""Arrays one behind the other, along their first axis: ``torch.cat``, ``mx.concatenate``."""

Pad = Callable[[Array, int], Array]
"""An array [rows, T, width] with so many positions of zeros behind the T."""


class RowByRow:
    """Sessions of one row each behind the calls of one session.

    Attributes:
        chunk: how many prompt tokens one forward of them reads.
    """

    def __init__(self, sessions: Sequence[Session], chunk: int, join: Join, pad: Pad) -> None:
        self.sessions = list(sessions)
        self.chunk = chunk
        self.join = join
        self.pad = pad

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        return [session.lengths[0] for session in self.sessions]

    def prefill(self, prompts: Sequence[Sequence[int]], absorb: Callable[[list[list[int]], Features], None]) -> Array:
        """Chunk by chunk, in each of them one row after the other: a drafter absorbs all rows at once."""
        last: list[Array] = [None] * len(prompts)
        for start in range(0, max(map(len, prompts)), self.chunk):
            parts = [list(prompt[start : start + self.chunk]) for prompt in prompts]
            read: list[Array | None] = [None] * len(prompts)
            for row, part in enumerate(parts):
                if part:
                    last[row], read[row] = self._read(row, part)
            absorb(parts, Features(self._joined(read, parts), [len(part) for part in parts]))
        return self.join(last)

    def _read(self, row: int, part: list[int]) -> tuple[Array, Array | None]:
        """The scores after a part of a row's prompt, and what it taps."""
        found: list[Features] = []
        scores = self.sessions[row].prefill([part], lambda tokens, features: found.append(features))
        return scores, found[0].values

    def _joined(self, read: list[Array | None], parts: list[list[int]]) -> Array | None:
        """What all rows tap [rows, T, width], padded behind the shorter parts; None where nothing is tapped."""
        longest = max(range(len(parts)), key=lambda row: len(parts[row]))
        if (some := read[longest]) is None:
            return None
        values = [some[:, :0] if one is None else one for one in read]  # a row whose prompt is through has no part
        missing = [len(parts[longest]) - len(part) for part in parts]
        return self.join([self.pad(one, more) for one, more in zip(values, missing, strict=True)])

    @contextmanager
    def verify(self, pending: list[int], proposal: Proposal) -> Iterator[AheadRowByRow]:
        """One row after the other; all are restored unless kept."""
        with ExitStack() as stack:
            rounds = []
            for i, session in enumerate(self.sessions):
                own = Proposal(proposal.tokens[i : i + 1], proposal.width)
                rounds.append(stack.enter_context(session.verify([pending[i]], own)))
            yield AheadRowByRow(rounds, self.join)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.sessions = [self.sessions[row] for row in rows]


class AheadRowByRow:
    """The rounds of single rows as one."""

    def __init__(self, rounds: list[Round], join: Join) -> None:
        self.rounds = rounds
        self.join = join
        self.scores = join([one.scores for one in rounds])

    def keep(self, counts: list[int]) -> Features:
        """See ``protocols.Round``."""
        counts = checked_counts(counts, len(self.rounds), self.scores.shape[1])  # before the first row is kept
        kept = [one.keep([count]) for one, count in zip(self.rounds, counts, strict=True)]
        values = [features.values for features in kept if features.values is not None]
        return Features(self.join(values) if values else None, counts)
