"""The frameworks' own generation, on the same model object, prompts, stop ids and sampling."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from dflash.benchmark.answers import Answer, Round, cut, digest
from dflash.benchmark.clock import Clock, device_wait, wall
from dflash.benchmark.systems import Asking, Here, Messages, encode
from dflash.errors import PromptTooLong, RequestError
from dflash.protocols import Target
from dflash.text import text_of

PROMPT_LOOKUP_TOKENS = 10
"""Proposals of transformers' prompt lookup, the number its author used."""


class TransformersGenerate(Here):
    """transformers' ``generate``: plain, with prompt lookup, or with an assistant model."""

    def __init__(
        self,
        name: str,
        target: Target,
        asking: Asking,
        lookup: int | None = None,
        assistant: Any = None,
        at_once: int = 1,
        clock: Clock = wall,
    ) -> None:
        """
        Args:
            target: of the torch backend.
            lookup: ``prompt_lookup_num_tokens``.
            assistant: a smaller module of transformers with the same vocabulary.
        """
        super().__init__(name, target, asking, at_once, clock)
        self._lookup = lookup
        self._assistant = assistant
        self._wait = device_wait(target.backend, target.device)

    def _answer(self, asked: list[Messages], seeds: list[int], asking: Asking) -> list[Answer]:
        target = self._target
        read = text_of(target.tokenizer)
        self._wait()
        self._memory.reset()
        processor = time.process_time()
        began = self._clock()
        ids = [encode(target.tokenizer, messages, asking) for messages in asked]
        arrivals = self._generate(ids, seeds[0], asking, began)
        rows = [cut(arrivals.of_row(row), target.eos_ids, asking.max_new_tokens) for row in range(len(ids))]
        texts = [read([token for step in steps for token in step]) for steps, _ in rows]
        after = self._clock() - began - (arrivals.at[-1] if arrivals.at else 0.0)
        processor = time.process_time() - processor
        peak = self._memory.peak()
        return [
            replace(self._measured(began, arrivals.at, after, prompt, steps, finish, text, peak), cpu_seconds=processor)
            for prompt, (steps, finish), text in zip(ids, rows, texts, strict=True)
        ]

    def _generate(self, ids: list[list[int]], seed: int, asking: Asking, began: float) -> Any:
        """Run it; return when which tokens came."""
        import torch

        target = self._target
        width = max(map(len, ids))
        room = _room(target, asking, width)
        pad = min(target.eos_ids, default=0)
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in ids], device=target.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=target.device)
        arrivals = _arrivals(self._clock, began)
        options: dict[str, Any] = {"do_sample": False}
        if asking.temperature > 0:
            torch.manual_seed(seed)  # its own generator: sampled answers differ from ours
            options = {
                "do_sample": True, "temperature": asking.temperature, "top_p": asking.top_p, "top_k": asking.top_k,
            }  # fmt: skip
        if self._lookup is not None:
            options["prompt_lookup_num_tokens"] = self._lookup
        if self._assistant is not None:
            options["assistant_model"] = self._assistant
        try:
            target.model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=room,
                eos_token_id=sorted(target.eos_ids) or None,
                pad_token_id=pad,
                repetition_penalty=1.0,  # what a model's own generation config says is not what the others are asked
                streamer=arrivals,
                **options,
            )
        except (ValueError, NotImplementedError) as error:  # a model it cannot assist, a vocabulary that differs ...
            raise RequestError(f"transformers refuses: {' '.join(str(error).split())}") from error
        return arrivals

    def _measured(
        self,
        began: float,
        at: list[float],
        after: float,
        prompt: list[int],
        steps: list[list[int]],
        finish: str | None,
        text: str,
        peak: float,
    ) -> Answer:
        """One row: it ends with its last step; the work after the last of all is everybody's."""
        tokens = tuple(token for step in steps for token in step)
        # What it proposes it does not say; the tokens of a step but the last were drafted.
        rounds = tuple(Round(len(step), len(step) - 1, None) for step in steps[1:])
        return Answer(
            began=began,
            first=at[0],
            seconds=at[len(steps) - 1] + after,
            count=len(tokens),
            finish=finish or "length",
            text=text,
            prompt_tokens=len(prompt),
            prompt_digest=digest(prompt),
            tokens=tokens,
            rounds=rounds,
            peak_memory=peak,
        )


def _room(target: Target, asking: Asking, prompt: int) -> int:
    """The cap, within the target's context: as our loop has it.

    Raises:
        PromptTooLong: there is no room at all.
    """
    if target.context_length is None:
        return asking.max_new_tokens
    if prompt > target.context_length:
        raise PromptTooLong(f"the prompt has {prompt} tokens, the context of {target.name} {target.context_length}")
    return min(asking.max_new_tokens, target.context_length - prompt + 1)


def _arrivals(clock: Clock, began: float) -> Any:
    """A streamer of transformers that notes when which tokens came. (A function, for it imports transformers.)"""
    from transformers.generation.streamers import BaseStreamer

    class Arrivals(BaseStreamer):  # type: ignore[misc]
        """First it is handed the prompt, then the tokens of each step: [rows], or [1, n] of assisted generation."""

        def __init__(self) -> None:
            self.at: list[float] = []
            self.steps: list[Any] = []
            self._prompt = True

        def put(self, value: Any) -> None:
            """Take a step's tokens."""
            if self._prompt:
                self._prompt = False
                return
            self.at.append(clock() - began)
            self.steps.append(value)

        def end(self) -> None:
            """Nothing is left to do."""

        def of_row(self, row: int) -> list[list[int]]:
            """A row's tokens, step by step."""
            return [step[row].reshape(-1).tolist() for step in self.steps]

    return Arrivals()


class MlxGenerate(Here):
    """mlx-lm's ``stream_generate``."""

    def __init__(self, name: str, target: Target, asking: Asking, clock: Clock = wall) -> None:
        """``target``: of the mlx backend."""
        super().__init__(name, target, asking, 1, clock)

    def _answer(self, asked: list[Messages], seeds: list[int], asking: Asking) -> list[Answer]:
        import mlx.core as mx
        from mlx_lm import stream_generate
        from mlx_lm.sample_utils import make_sampler

        target = self._target
        self._memory.reset()
        mx.random.seed(seeds[0])
        began = self._clock()
        ids = encode(target.tokenizer, asked[0], asking)
        sampler = make_sampler(temp=asking.temperature, top_p=asking.top_p, top_k=asking.top_k)
        at: list[float] = []
        steps: list[list[int]] = []
        text = ""
        for response in stream_generate(
            target.model, target.tokenizer, ids, max_tokens=_room(target, asking, len(ids)), sampler=sampler
        ):
            at.append(self._clock() - began)
            steps.append([int(response.token)])
            text += response.text
        steps, finish = cut(steps, target.eos_ids, asking.max_new_tokens)
        seconds = self._clock() - began
        tokens = tuple(token for step in steps for token in step)
        return [
            Answer(
                began=began,
                first=at[0],
                seconds=seconds,
                count=len(tokens),
                finish=finish or "length",
                text=text,
                prompt_tokens=len(ids),
                prompt_digest=digest(ids),
                tokens=tokens,
                rounds=tuple(Round(1, 0, 0) for _ in steps[1:]),
                peak_memory=self._memory.peak(),
            )
        ]
