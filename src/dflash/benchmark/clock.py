"""Where a round's time goes, measured from outside the loop: stand-ins for target and drafter that time each call.

The loop runs as it is. On a GPU calls only queue work, so a split needs the device to be waited for around every
call, which slows the loop down: there it is measured only on request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from dflash.protocols import Array, Drafter, Drafting, Features, Proposal, Round, Session, Target, Verdict, Verifier
from dflash.sampling import SamplingParams

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment."""

Wait: TypeAlias = Callable[[], None]
"""Returns when the device has done all work queued so far."""

wall: Clock = time.perf_counter


def on_host() -> None:
    """A CPU has done its work when a call returns."""


def device_wait(backend: str, device: Any) -> Wait:
    """How to wait for a device of a backend. (mlx computes what is read, when it is read: there is nothing queued.)"""
    if backend != "torch":
        return on_host
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return torch.mps.synchronize if kind == "mps" else on_host


class Stopwatch:
    """Seconds spent drafting and verifying so far, and forwards of the target."""

    def __init__(self, clock: Clock, wait: Wait = on_host) -> None:
        self._clock = clock
        self._wait = wait
        self.draft = self.verify = 0.0
        self.passes = 0

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """What happens meanwhile is the drafter's work."""
        before = self._now()
        try:
            yield
        finally:
            self.draft += self._now() - before

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """What happens meanwhile is verification."""
        before = self._now()
        try:
            yield
        finally:
            self.verify += self._now() - before

    def reset(self) -> None:
        """Begin again at zero."""
        self.draft = self.verify = 0.0
        self.passes = 0

    def _now(self) -> float:
        self._wait()
        return self._clock()


class TimedTarget:
    """A target whose sessions and verifiers are timed."""

    def __init__(self, target: Target, watch: Stopwatch) -> None:
        self.target = target
        self._watch = watch
        self.name = target.name
        self.backend = target.backend
        self.device = target.device
        self.model = target.model
        self.tokenizer = target.tokenizer
        self.vocab_size = target.vocab_size
        self.num_layers = target.num_layers
        self.hidden_size = target.hidden_size
        self.context_length = target.context_length
        self.eos_ids = target.eos_ids

    def start(self, rows: int, taps: Sequence[int], step: int, chunk: int) -> Session:
        """See ``protocols.Target``."""
        return _Session(self.target.start(rows, taps, step, chunk), self._watch)

    def verifier(
        self, sampling: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], verification: str
    ) -> Verifier:
        """See ``protocols.Target``."""
        return _Verifier(self.target.verifier(sampling, prompts, verification), self._watch)

    def peak_memory(self) -> float:
        """See ``protocols.Target``."""
        return self.target.peak_memory()


class _Session:
    def __init__(self, session: Session, watch: Stopwatch) -> None:
        self._session = session
        self._watch = watch

    @property
    def lengths(self) -> list[int]:
        return self._session.lengths

    def prefill(self, prompts: Sequence[Sequence[int]], absorb: Callable[[list[list[int]], Features], None]) -> Array:
        """Not timed: a split is of the decode rounds."""
        return self._session.prefill(prompts, absorb)

    @contextmanager
    def verify(self, pending: list[int], proposal: Proposal) -> Iterator[Round]:
        """The forward on entering, and what is left to do on leaving."""
        self._watch.passes += 1
        with self._watch.verifying():
            block = self._session.verify(pending, proposal)
            ahead = block.__enter__()
        try:
            yield _Round(ahead, self._watch)
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        with self._watch.verifying():
            block.__exit__(None, None, None)

    def select(self, rows: list[int]) -> None:
        self._session.select(rows)


class _Round:
    def __init__(self, ahead: Round, watch: Stopwatch) -> None:
        self._ahead = ahead
        self._watch = watch
        self.scores = ahead.scores

    def keep(self, counts: list[int]) -> Features:
        with self._watch.verifying():
            return self._ahead.keep(counts)


class _Verifier:
    def __init__(self, verifier: Verifier, watch: Stopwatch) -> None:
        self._verifier = verifier
        self._watch = watch

    def __call__(self, proposal: Proposal, scores: Array) -> Verdict:
        with self._watch.verifying():
            return self._verifier(proposal, scores)

    def select(self, rows: list[int]) -> None:
        self._verifier.select(rows)


class TimedDrafter:
    """A drafter whose work is timed. It is started on the target itself, not on its stand-in."""

    def __init__(self, drafter: Drafter, watch: Stopwatch) -> None:
        self._drafter = drafter
        self._watch = watch
        self.block_size = drafter.block_size
        self.taps = drafter.taps

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> Drafting:
        """See ``protocols.Drafter``."""
        own = target.target if isinstance(target, TimedTarget) else target
        return _Drafting(self._drafter.start(own, sampling, verification, step), self._watch)


class _Drafting:
    def __init__(self, drafting: Drafting, watch: Stopwatch) -> None:
        self._drafting = drafting
        self._watch = watch

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        with self._watch.drafting():
            self._drafting.extend(tokens, features)

    def propose(self, pending: list[int], room: int) -> Proposal:
        with self._watch.drafting():
            return self._drafting.propose(pending, room)

    def select(self, rows: list[int]) -> None:
        self._drafting.select(rows)
