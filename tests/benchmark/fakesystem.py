"""Systems and clocks that do exactly as they are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash.benchmark.answers import Answer, Round, Split, failed
from dflash.benchmark.systems import Talk
from dflash.protocols import Target
from fakes import Choose, OracleDrafter


class FakeClock:
    """Stands still until told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


class FakeSystem:
    """Each answer follows a script: (accepted of proposed) per round; the clock goes on as told.

    Attributes:
        asked: what it was asked, in order.
    """

    def __init__(
        self,
        name: str,
        clock: FakeClock,
        script: Sequence[tuple[int, int]],
        prefill: float,
        draft: float,
        verify: float,
        host: float,
        at_once: int = 1,
        fail_on: str = "\0",
    ) -> None:
        self.name = name
        self.at_once = at_once
        self.asked: list[str] = []
        self.warmed = 0
        self._clock = clock
        self._script = script
        self._prefill = prefill
        self._times = (draft, verify, host)
        self._fail_on = fail_on

    def warm_up(self, turn: str) -> None:
        self.warmed += 1
        self._clock.tick(1000)

    def converse(self, talks: Sequence[Talk]) -> Iterator[tuple[int, list[Answer]]]:
        for index, talk in enumerate(talks):
            answers = []
            for turn in talk.turns:
                answers.append(self._answer(turn))
                if answers[-1].error:
                    break
            yield index, answers

    def _answer(self, turn: str) -> Answer:
        self.asked.append(turn)
        began = self._clock()
        self._clock.tick(self._prefill)
        if self._fail_on in turn:
            return failed(began, self._prefill, "it broke")
        for _ in self._script:
            self._clock.tick(sum(self._times))
        draft, verify, host = (len(self._script) * time for time in self._times)
        rounds = tuple(Round(accepted + 1, accepted, proposed) for accepted, proposed in self._script)
        count = 1 + sum(one.tokens for one in rounds)
        return Answer(
            began=began, first=self._prefill, seconds=self._clock() - began, count=count, finish="length",
            text=f"answer to {turn}", prompt_tokens=len(turn), prompt_digest=turn, tokens=tuple(range(count)),
            pieces=tuple(f" {i}" for i in range(count)), rounds=rounds,
            split=Split(draft, verify, host, len(rounds)), peak_memory=1.5,
        )  # fmt: skip


class TickingTarget:
    """A target whose every step takes a known time: prefill 10, forward 4, verdict 0.5, rollback 1."""

    def __init__(self, target: Target, clock: FakeClock) -> None:
        self._target = target
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def start(self, *args: Any) -> Any:
        return _TickingSession(self._target.start(*args), self._clock)

    def verifier(self, *args: Any) -> Any:
        verifier = self._target.verifier(*args)
        clock = self._clock

        class Ticking:
            select = staticmethod(verifier.select)

            def __call__(self, proposal: Any, scores: Any) -> Any:
                clock.tick(0.5)
                return verifier(proposal, scores)

        return Ticking()


class _TickingSession:
    def __init__(self, session: Any, clock: FakeClock) -> None:
        self._session = session
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def prefill(self, prompts: Any, absorb: Any) -> Any:
        self._clock.tick(10)
        return self._session.prefill(prompts, absorb)

    def verify(self, pending: Any, proposal: Any) -> Any:
        self._clock.tick(4)
        block = self._session.verify(pending, proposal)
        clock = self._clock

        class Ahead:
            def __enter__(self) -> Any:
                self._ahead = block.__enter__()
                self.scores = self._ahead.scores
                return self

            def keep(self, counts: list[int]) -> Any:
                clock.tick(1)
                return self._ahead.keep(counts)

            def __exit__(self, *error: Any) -> Any:
                return block.__exit__(*error)

        return Ahead()


class TickingDrafter(OracleDrafter):
    """Proposing takes 2, taking in what was committed 0.25."""

    def __init__(self, clock: FakeClock, block_size: int, texts: Sequence[list[int]], choose: Choose) -> None:
        super().__init__(block_size, texts, choose)
        self._clock = clock

    def extend(self, tokens: Any, features: Any) -> None:
        self._clock.tick(0.25)
        super().extend(tokens, features)

    def propose(self, pending: Any, room: int) -> Any:
        self._clock.tick(2)
        return super().propose(pending, room)
