"""Verification on MLX with a sampler and processors of mlx-lm's own kind, by match."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.verify import agreeing, before_faults, drafted_tokens, evaluated, verdict_of
from dflash.protocols import Proposal, Verdict

Sampler = Callable[[mx.array], mx.array]
"""mlx-lm's: log-probabilities [1, vocab] -> token [1]."""
Processor = Callable[[mx.array, mx.array], mx.array]
"""mlx-lm's: (tokens so far [n], scores [1, vocab]) -> scores [1, vocab]."""


class SamplerVerifier:
    """Verifies one row with a sampler and processors of mlx-lm's, called as mlx-lm calls them, token by token.

    The target's own token is drawn at each position with the drafted prefix; drafts stand while they are what was
    drawn. mlx's global random state is put back to where it was after the last token that counts, so a seeded
    answer is the one mlx-lm itself gives. Every thread has a random state of its own: an answer that goes on in
    another than it began in takes its state along, and leaves the other's as it was.
    """

    def __init__(self, sampler: Sampler, processors: Sequence[Processor], prompt: Sequence[int]) -> None:
        self.sampler = sampler
        self.processors = processors
        self.history = list(prompt)
        self._seed = _current_seed()
        self._home = threading.current_thread()
        self._away = False

    def __call__(self, proposal: Proposal, scores: mx.array) -> Verdict:
        """See ``protocols.Verifier``.

        Raises:
            NonFiniteScores: the scores of the first position hold NaN.
        """
        with self._random_state():
            lines, self._seed = self._draw(drafted_tokens(proposal, 1), scores)
            mx.random.seed(self._seed)
        verdict = verdict_of(lines)
        self.history += verdict.tokens[0]
        return verdict

    @contextmanager
    def _random_state(self) -> Iterator[None]:
        """mlx's global random state, set to this answer's own where it is not at home."""
        if not self._away and threading.current_thread() is self._home:
            yield
            return
        if not self._away:
            self._away, self._seed = True, _leaving.seed(self._seed)
        outer = _current_seed()
        mx.random.seed(self._seed)
        try:
            yield
        finally:
            mx.random.seed(outer)

    def _draw(self, drafted: mx.array, scores: mx.array) -> tuple[list[list[int]], int]:
        """See ``read_lines_and_seed``."""
        tokens = mx.concatenate([mx.array(self.history), drafted[0]])
        random_state: Any = mx.random.state
        own, states = [], [random_state[0]]
        for i in range(scores.shape[1]):
            logits = scores[:, i]
            for processor in self.processors:
                logits = processor(tokens[: len(self.history) + i], logits)
            own.append(self.sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
            states.append(random_state[0])
        chosen = mx.stack(own, axis=1).astype(mx.int32)
        nan = mx.isnan(scores).any(axis=-1)
        return read_lines_and_seed(chosen, agreeing(chosen, drafted), nan, mx.stack(states))

    def select(self, rows: list[int]) -> None:
        """There is only one row."""


class _Leaving:
    """Seeds of answers that leave the thread they were made in before it drew anything: no two may be the same."""

    REMEMBERED = 10_000
    """Seeds. Threads that come and go have each their own, for as long as the process lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[int, int] = {}

    def seed(self, seed: int) -> int:
        """The thread's own for the first that leaves with it, another for each after it."""
        with self._lock:
            before = self._times.pop(seed, 0)
            self._times[seed] = before + 1  # now the last
            if len(self._times) > self.REMEMBERED:
                del self._times[next(iter(self._times))]
            return (seed + before * 0x9E3779B97F4A7C15) % 2**64


_leaving = _Leaving()


def read_lines_and_seed(
    chosen: mx.array, accepted: mx.array, nan: mx.array, states: mx.array
) -> tuple[list[list[int]], int]:
    """What ``verdict_of`` reads of one row, and the seed of the random state behind the last token that counts.

    Args:
        states: [K + 2, 2], the random state before the first position and behind each. Where the first is NaN nothing
            was drawn: the same position may be asked about again.
    """
    accepted = before_faults(accepted, nan)
    state = mx.take(states, mx.where(nan[:, 0], 0, accepted + 1), axis=0).view(mx.int32)
    columns = [chosen, accepted[:, None], nan[:, :1], mx.zeros_like(accepted)[:, None], state]
    line = evaluated(mx.concatenate([column.astype(mx.int32) for column in columns], axis=1))[0]
    return [line[:-2]], _seed(*line[-2:])


def _current_seed() -> int:
    """Of this thread's random state."""
    random_state: Any = mx.random.state
    return _seed(*random_state[0].tolist())


def _seed(high: int, low: int) -> int:
    """The number whose random state these two halves are."""
    return high % 2**32 << 32 | low % 2**32
