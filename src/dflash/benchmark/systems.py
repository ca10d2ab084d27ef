"""The systems that are compared: what one is, and our loop with any drafter.

A system is handed conversations and gives back what it measured. Further ones: a class with the four
members of ``System``, or a ``Here``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from dflash.benchmark.answers import Answer, Round, Split, digest, failed
from dflash.benchmark.clock import Clock, Stopwatch, TimedDrafter, TimedTarget, device_wait, wall
from dflash.benchmark.memory import PeakMemory
from dflash.decode import PREFILL_CHUNK, Emission, check_prompts
from dflash.errors import DFlashError
from dflash.generate import start
from dflash.prompts import Opening
from dflash.protocols import Drafter, Target
from dflash.sampling import SamplingParams
from dflash.text import Detokenizer, Prompt, encode_prompt, text_of

Messages: TypeAlias = list[dict[str, str]]

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Talk:
    """One conversation to be had.

    Attributes:
        turns: the user's messages. The system's own answers are fed back between them.
        seed: of the sampling of its answers.
        opening: system and developer messages ahead of the turns.
    """

    turns: tuple[str, ...]
    seed: int = 0
    opening: Opening = ()


@dataclass(frozen=True)
class Asking:
    """How every system is asked.

    Attributes:
        temperature: 0 is greedy. The others as in ``SamplingParams``.
        enable_thinking: handed to the chat template where given.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    enable_thinking: bool | None = None

    def sampling(self, seed: int) -> SamplingParams:
        """Of one request."""
        return SamplingParams(self.temperature, self.top_p, self.top_k, seed=seed)


class System(Protocol):
    """Something that answers.

    Attributes:
        name: in tables and records.
        at_once: conversations it is handed together.
    """

    name: str
    at_once: int

    def warm_up(self, turn: str) -> None:
        """A short answer that nobody measures."""
        ...

    def converse(self, talks: Sequence[Talk]) -> Iterator[tuple[int, list[Answer]]]:
        """Have conversations, and give each one's index and answers when it is over.

        An answer that failed is the last of its conversation.
        """
        ...


class Here(ABC):
    """A system around a target of this process."""

    def __init__(self, name: str, target: Target, asking: Asking, at_once: int, clock: Clock) -> None:
        self.name = name
        self.at_once = at_once
        self._target = target
        self._asking = asking
        self._clock = clock
        self._memory = PeakMemory(target)

    def warm_up(self, turn: str) -> None:
        """A short answer through the same path."""
        self._answer([_ask(turn)], [0], replace(self._asking, max_new_tokens=WARM_UP_TOKENS))

    def converse(self, talks: Sequence[Talk]) -> Iterator[tuple[int, list[Answer]]]:
        """See ``System``."""
        return turn_by_turn(
            talks,
            lambda messages: check(self._target, messages, self._asking),
            lambda asked, seeds: self._answer(asked, seeds, self._asking),
            self._clock,
        )

    @abstractmethod
    def _answer(self, asked: list[Messages], seeds: list[int], asking: Asking) -> list[Answer]:
        """Answer prompts together, at most ``at_once``."""


class Loop(Here):
    """Our decode loop on one target with one drafter; several rows at once where asked."""

    def __init__(
        self,
        name: str,
        target: Target,
        drafter: Drafter,
        asking: Asking,
        block_size: int | None = None,
        at_once: int = 1,
        split: bool = True,
        clock: Clock = wall,
    ) -> None:
        """
        Args:
            block_size: the drafter's own by default.
            split: measure where the time of a round goes; on a GPU the waiting this needs slows the loop down.
        """
        super().__init__(name, target, asking, at_once, clock)
        self._drafter = drafter
        self._block_size = block_size
        self._split = split
        self._wait = device_wait(target.backend, target.device)

    def _answer(self, asked: list[Messages], seeds: list[int], asking: Asking) -> list[Answer]:
        """One batch. The clock runs while the loop works: not between its rounds."""
        watch = Stopwatch(self._clock, self._wait)
        target: Any = TimedTarget(self._target, watch) if self._split else self._target
        drafter = TimedDrafter(self._drafter, watch) if self._split else self._drafter
        tokenizer = target.tokenizer
        self._wait()
        self._memory.reset()

        processor = time.process_time()
        began = self._clock()
        ids = [encode(tokenizer, messages, asking) for messages in asked]
        sampling = [asking.sampling(seed) for seed in seeds]
        batch = start(
            target, drafter, tokenizer, ids, sampling, self._block_size, asking.max_new_tokens, (), "match",
            PREFILL_CHUNK,
        )  # fmt: skip
        seconds = self._clock() - began

        rows = [_Row() for _ in asked]
        while True:
            before = self._clock()
            emitted = next(batch.rounds, None)
            if emitted is None or all(output.finish_reason for output in batch.outputs):
                self._wait()  # the last round's work, where it is only queued
            seconds += self._clock() - before
            if emitted is None:
                break
            if rows[0].first is None:
                watch.reset()  # a split is of the decode rounds
            for emission in emitted:
                rows[emission.row].take(emission, seconds)
        processor = time.process_time() - processor
        first = rows[0].first
        split = self._share(watch, seconds - (first or 0.0), len(rows)) if self._split else None
        peak = self._memory.peak()
        return [
            replace(
                row.answer(began, prompt, tuple(output.tokens), output.finish_reason, split, peak, tokenizer),
                cpu_seconds=processor,
            )
            for row, prompt, output in zip(rows, ids, batch.outputs, strict=True)
        ]

    @staticmethod
    def _share(watch: Stopwatch, decoding: float, rows: int) -> Split:
        """A row's share of the time of the decode rounds."""
        host = decoding - watch.draft - watch.verify
        return Split(watch.draft / rows, watch.verify / rows, host / rows, watch.passes / rows)


class _Row:
    """What the rounds gave one row of a batch."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.seconds = 0.0
        self.rounds: list[Round] = []
        self.text: list[str] = []

    def take(self, emission: Emission, seconds: float) -> None:
        """Note a round that ended so many seconds after the beginning."""
        if self.first is None:
            self.first = seconds  # the prefill's round is no decode round
        else:
            self.rounds.append(Round(len(emission.tokens), emission.accepted, emission.proposed))
        self.seconds = seconds
        self.text.append(emission.text)

    def answer(
        self,
        began: float,
        prompt: list[int],
        tokens: tuple[int, ...],
        finish: str | None,
        split: Split | None,
        peak: float,
        tokenizer: Any,
    ) -> Answer:
        """The whole."""
        drafted = any(one.proposed for one in self.rounds)
        return Answer(
            began=began,
            first=self.first or 0.0,
            seconds=self.seconds,
            count=len(tokens),
            finish=finish,
            text="".join(self.text),
            prompt_tokens=len(prompt),
            prompt_digest=digest(prompt),
            tokens=tokens,
            pieces=pieces(tokenizer, tokens) if drafted else None,
            rounds=tuple(self.rounds),
            split=split,
            peak_memory=peak,
        )


Ask: TypeAlias = Callable[[list[Messages], list[int]], list[Answer]]
"""Answers to prompts with these seeds, made together."""


def turn_by_turn(
    talks: Sequence[Talk], check: Callable[[Messages], None], answer: Ask, clock: Clock
) -> Iterator[tuple[int, list[Answer]]]:
    """Have conversations side by side: first turns together, then the second turns of those that have one.

    Args:
        check: raises a ``DFlashError`` for a prompt that cannot be asked: it fails alone, the others go together.
    """
    history: list[Messages] = [list(talk.opening) for talk in talks]
    answers: list[list[Answer]] = [[] for _ in talks]
    alive = list(range(len(talks)))
    for turn in range(max(len(talk.turns) for talk in talks)):
        alive = [i for i in alive if turn < len(talks[i].turns) and not (turn and answers[i][-1].error)]
        if not alive:
            break
        for i in alive:
            history[i] += _ask(talks[i].turns[turn])
        given = dict(_refused(alive, history, check, clock))
        sound = [i for i in alive if i not in given]
        if sound:
            asked, seeds = [history[i] for i in sound], [talks[i].seed + turn for i in sound]
            given.update(zip(sound, _together_or_singly(asked, seeds, answer, clock), strict=True))
        for i in alive:
            answers[i].append(given[i])
            history[i].append({"role": "assistant", "content": final_text(given[i].text)})
    yield from enumerate(answers)


def _refused(
    alive: Sequence[int], history: Sequence[Messages], check: Callable[[Messages], None], clock: Clock
) -> Iterator[tuple[int, Answer]]:
    """Those that cannot be asked: the template refuses the messages, they do not fit the context ..."""
    for i in alive:
        began = clock()
        try:
            check(history[i])
        except DFlashError as error:
            yield i, _failure(began, clock, error)


def _together_or_singly(asked: list[Messages], seeds: list[int], answer: Ask, clock: Clock) -> list[Answer]:
    """The answers to a batch. If it fails as a whole, each row is asked alone, so that only those at fault fail."""
    began = clock()
    try:
        return answer(asked, seeds)
    except DFlashError as error:
        if len(asked) == 1:
            return [_failure(began, clock, error)]
    alone = (_together_or_singly([one], [seed], answer, clock) for one, seed in zip(asked, seeds, strict=True))
    return [only for [only] in alone]


def _failure(began: float, clock: Clock, error: DFlashError) -> Answer:
    return failed(began, clock() - began, f"{type(error).__name__}: {error}")


def check(target: Target, messages: Messages, asking: Asking) -> None:
    """Whether a target can be asked this.

    Raises:
        RequestError: the template refuses the messages, or the prompt does not fit the target's context.
    """
    check_prompts(target, [encode(target.tokenizer, messages, asking)])


def _ask(turn: str) -> Messages:
    return [{"role": "user", "content": turn}]


def encode(tokenizer: Any, messages: Messages, asking: Asking) -> list[int]:
    """The prompt as every system of this process gets it: through the chat template where there is one."""
    prompt: Prompt = messages
    if not tokenizer.chat_template:
        prompt = "\n\n".join(message["content"] for message in messages)
    return encode_prompt(tokenizer, prompt, enable_thinking=asking.enable_thinking)


THOUGHT_ENDS = ("</think>", "<|channel|>final<|message|>")
"""What ends a model's thinking: only what comes after is fed back, as templates demand."""


def final_text(text: str) -> str:
    """An answer without its thinking."""
    for end in THOUGHT_ENDS:
        text = text.rpartition(end)[2]
    return text.strip()


def pieces(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text each token adds. Half a character waits for its other half."""
    detokenizer = Detokenizer(text_of(tokenizer))
    found = [detokenizer.add([token]) for token in tokens]
    if found:
        found[-1] += detokenizer.finish()
    return tuple(found)
