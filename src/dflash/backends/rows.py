"""Single rows behind the calls of a batch: for targets whose recurrent states cannot be padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dflash.backends.keep import check_counts
from dflash.protocols import Array, Features, Proposal, Round, Session

Join = Callable[[list[Array]], Array]
"""Arrays one behind the other, along their first axis: ``torch.cat``, ``mx.concatenate``."""


class RowByRow:
    """Sessions of one row each behind the calls of one session."""

    def __init__(self, sessions: Sequence[Session], join: Join) -> None:
        self.sessions = list(sessions)
        self.join = join

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        return [session.lengths[0] for session in self.sessions]

    def prefill(self, prompts: Sequence[Sequence[int]], absorb: Callable[[list[list[int]], Features], None]) -> Array:
        """One prompt after the other."""
        return self.join([self._prefill_row(i, prompt, absorb) for i, prompt in enumerate(prompts)])

    def _prefill_row(
        self, row: int, prompt: Sequence[int], absorb: Callable[[list[list[int]], Features], None]
    ) -> Array:
        def absorb_row(tokens: list[list[int]], features: Features) -> None:
            """Present the row as one of all, the others having nothing new: what stands in their place is padding."""
            everyone: list[list[int]] = [[] for _ in self.sessions]
            everyone[row] = tokens[0]
            values = None if features.values is None else self.join([features.values] * len(everyone))
            absorb(everyone, Features(values, [len(new) for new in everyone]))

        return self.sessions[row].prefill([prompt], absorb_row)

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
        check_counts(counts, len(self.rounds), self.scores.shape[1])  # before the first row is kept
        kept = [one.keep([count]) for one, count in zip(self.rounds, counts, strict=True)]
        values = [features.values for features in kept if features.values is not None]
        return Features(self.join(values) if values else None, counts)
