"""What is measured of one answer. Every figure is computed from these, by ``figures.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple


class Round(NamedTuple):
    """One decode round of one row: one forward of the target. The prefill's round is not one of them.

    Attributes:
        tokens: that it added to the answer, cut at the answer's end.
        accepted: drafted ones among them.
        proposed: tokens that were drafted; None where the system does not say.
    """

    tokens: int
    accepted: int
    proposed: int | None


@dataclass(frozen=True)
class Split:
    """Where the time of the decode rounds went. Of a batch each row gets its equal share.

    Attributes:
        draft: seconds in the drafter: proposing, and taking in what was committed.
        verify: seconds in the target's forward, the verdict, and the rollback.
        host: all other seconds of the loop: stop rules, text, bookkeeping.
        passes: forwards of the target.
    """

    draft: float
    verify: float
    host: float
    passes: float


@dataclass(frozen=True)
class Counted:
    """What a server itself counted of its speculation while it was asked.

    Attributes:
        rounds, proposed, accepted: increases of its counters.
        by_position: accepted tokens at position 1, 2, ...
        length: tokens a round, where the server publishes only that.
    """

    rounds: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0
    by_position: tuple[float, ...] = ()
    length: float | None = None


@dataclass(frozen=True)
class Answer:
    """One answer as it was measured.

    Attributes:
        began: the clock's reading when work began.
        first: seconds from there to the first token.
        seconds: to the end. Both count the system's work (tokenizing, prefill, decoding, text), not its consumer's.
        count: tokens of the answer, a stop id included.
        prompt_tokens: of the prompt, where known.
        prompt_digest: equal for equal prompts.
        tokens: their ids, where known.
        pieces: the text each token added, of answers with drafted tokens.
        rounds: None where the system does not say.
        split: None where it was not measured.
        peak_memory: GB (1e9 bytes) while it was answered.
        cpu_seconds: of this process meanwhile, all threads; far below ``seconds``, others had the processor.
        error: why there is no answer.
    """

    began: float
    first: float
    seconds: float
    count: int
    finish: str | None = None
    text: str = ""
    prompt_tokens: int | None = None
    prompt_digest: str | None = None
    tokens: tuple[int, ...] | None = None
    pieces: tuple[str, ...] | None = None
    rounds: tuple[Round, ...] | None = None
    split: Split | None = None
    peak_memory: float | None = None
    cpu_seconds: float | None = None
    counted: Counted | None = None
    error: str | None = None

    def with_counted(self, counted: Counted | None) -> Answer:
        """The same answer with what the server counted meanwhile."""
        return replace(self, counted=counted)


def failed(began: float, seconds: float, error: str) -> Answer:
    """There is no answer, for this reason."""
    return Answer(began, seconds, seconds, 0, error=error)


@dataclass(frozen=True)
class Record:
    """An answer and what it answers.

    Attributes:
        prompt: index of the prompt in its data set.
        turn: of the conversation, from 0.
        lane: the process and the start it was measured in: clocks of different lanes do not compare.
    """

    system: str
    dataset: str
    prompt: int
    turn: int
    repeat: int
    lane: str
    answer: Answer

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What it answers: equal for all systems."""
        return (self.dataset, self.prompt, self.turn, self.repeat)

    @property
    def talk(self) -> tuple[str, str, int, int]:
        """The conversation it belongs to: what is measured in one go."""
        return (self.system, self.dataset, self.prompt, self.repeat)

    def to_json(self) -> dict[str, Any]:
        """As one JSON object. What is not known is left out."""
        answer = {name: value for name, value in asdict(self.answer).items() if value is not None}
        return {**asdict(self), "answer": answer}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """What ``to_json`` wrote.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: it is something else.
        """
        answer = dict(value["answer"])
        _check_kinds(value, {"system": str, "dataset": str, "prompt": int, "turn": int, "repeat": int, "lane": str})
        _check_kinds(answer, {"began": (int, float), "first": (int, float), "seconds": (int, float), "count": int})
        for name, build in (("rounds", _rounds), ("split", _split), ("counted", _counted)):
            if name in answer:
                answer[name] = build(answer[name])
        for name in ("tokens", "pieces"):
            if name in answer:
                answer[name] = tuple(answer[name])
        return cls(**{**value, "answer": Answer(**answer)})


def _check_kinds(value: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """What figures and tables are made of must be of its kind.

    Raises:
        KeyError, TypeError: something is not there, or of another kind.
    """
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            raise TypeError(f"{name} is {value[name]!r}")


def _rounds(value: Iterable[Sequence[int]]) -> tuple[Round, ...]:
    return tuple(Round(*one) for one in value)


def _split(value: Mapping[str, float]) -> Split:
    return Split(**value)


def _counted(value: Mapping[str, Any]) -> Counted:
    return Counted(**{**value, "by_position": tuple(value["by_position"])})


def digest(prompt: Any) -> str:
    """A short name for a prompt (token ids, messages): equal for equal ones."""
    return hashlib.sha256(repr(prompt).encode()).hexdigest()[:12]


def cut(
    steps: Iterable[Sequence[int]], stop_ids: frozenset[int], max_tokens: int
) -> tuple[list[list[int]], str | None]:
    """The tokens of each step up to the answer's end, and the finish reason: "stop", "length" or None."""
    kept: list[list[int]] = []
    count = 0
    for step in steps:
        kept.append([])
        for token in step:
            kept[-1].append(token)
            count += 1
            if token in stop_ids:
                return kept, "stop"
            if count == max_tokens:
                return kept, "length"
    return kept, None
