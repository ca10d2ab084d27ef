"""Generation for people: prompts in, text and figures out, on top of the one decode loop."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.backends.draft import PublishedDraft
from dflash.decode import PREFILL_CHUNK, Emission, Request, decode
from dflash.drafters import BothDrafters, NGramDrafter, NoDrafter
from dflash.errors import RequestError
from dflash.limits import Output
from dflash.protocols import Drafter, Target
from dflash.sampling import SamplingParams, is_whole
from dflash.text import Prompt, encode_prompt, text_of

DraftLike = Drafter | str | None
"""A DFlash draft, another drafter, "ngram", "none", or None for plain decoding."""


@dataclass(frozen=True)
class Response:
    """What one round added to an answer. The last one has a finish reason.

    Attributes:
        text: the piece of text that became final; may be empty.
        tokens: the new tokens; the first ``accepted`` of them were drafted.
        accepted: drafted tokens that stood.
        proposed: tokens that were drafted; 0 in the first response, which is the prefill's.
        prompt_tokens: length of the prompt.
        prompt_tps: prompt tokens per second of prefill.
        generation_tokens: tokens so far.
        generation_tps: tokens after the first, per second of decoding. The consumer's time does not count.
        peak_memory: GB (1e9 bytes), of the device or, on CPU, of the process.
        finish_reason: None, "stop" or "length".
    """

    text: str
    tokens: list[int]
    accepted: int
    proposed: int
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None


@dataclass(frozen=True)
class Generation:
    """A whole answer.

    Attributes:
        text, tokens: the answer.
        rounds: tokens each round yielded (drafts accepted plus one, cut at the end), the prefill's not counted.
        accepted, proposed: drafted tokens that stood, and that were drafted, in all.
        The others are those of the last ``Response``.
    """

    text: str
    tokens: list[int]
    rounds: list[int]
    accepted: int
    proposed: int
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str

    @property
    def acceptance_length(self) -> float:
        """Tokens a round; 1 is plain decoding, and what an answer of a single token is given."""
        return sum(self.rounds) / len(self.rounds) if self.rounds else 1.0

    def __str__(self) -> str:
        return self.text


def stream_generate(
    model: Target,
    draft: DraftLike,
    tokenizer: Any,
    prompt: Prompt,
    block_size: int | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    *,
    enable_thinking: bool | None = None,
    verification: str = "match",
    prefill_chunk: int = PREFILL_CHUNK,
) -> Generator[Response, None, None]:
    """Answer one prompt, round by round. Options are checked at the call, not at the first response.

    Args:
        model: from ``load``.
        draft: from ``load_draft``; or ``"ngram"``, another drafter, or None for plain decoding.
        tokenizer: a transformers tokenizer, or None for the target's own.
        prompt: chat messages, which go through the chat template; a string, which does not (raw text, or an
            already rendered template); or token ids.
        block_size: tokens verified at once, the pending one included; the draft's own by default. 1 leaves no room
            for a guess: it is plain decoding, as with ``draft=None``, and the draft does nothing.
        stop: strings that end the answer.
        enable_thinking: handed to the chat template.
        verification: "match" (default), or "rejection", for which a draft samples its proposals.
        prefill_chunk: prompt tokens one forward reads.

    Raises:
        RequestError: a prompt or an option that cannot be served.
        IncompatibleDraft: the draft was made for another target.
    """
    if not isinstance(model, Target):
        raise RequestError(f"model must come from dflash.load, not be a {type(model).__name__}")
    bias = {} if logit_bias is None else logit_bias
    sampling = SamplingParams(temperature, top_p, top_k, min_p, repetition_penalty, bias, seed)
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    ids = encode_prompt(tokenizer, prompt, enable_thinking=enable_thinking)
    rounds = start(
        model, draft, tokenizer, [ids], [sampling], block_size, max_tokens, stop, verification, prefill_chunk
    )
    return _responses(model, rounds, len(ids))


def generate(
    model: Target,
    draft: DraftLike,
    tokenizer: Any,
    prompt: Prompt,
    block_size: int | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    *,
    enable_thinking: bool | None = None,
    verification: str = "match",
    prefill_chunk: int = PREFILL_CHUNK,
) -> Generation:
    """Answer one prompt at once. See ``stream_generate`` for everything."""
    stream = stream_generate(
        model, draft, tokenizer, prompt, block_size, max_tokens, temperature, top_p, top_k, min_p,
        repetition_penalty, logit_bias, seed, stop,
        enable_thinking=enable_thinking, verification=verification, prefill_chunk=prefill_chunk,
    )  # fmt: skip
    return collect(stream)


def collect(stream: Iterator[Response]) -> Generation:
    """The whole answer of a stream, consumed to its end."""
    responses = list(stream)
    last = responses[-1]
    assert last.finish_reason is not None
    return Generation(
        text="".join(r.text for r in responses),
        tokens=[token for r in responses for token in r.tokens],
        rounds=[len(r.tokens) for r in responses[1:]],
        accepted=sum(r.accepted for r in responses),
        proposed=sum(r.proposed for r in responses),
        prompt_tokens=last.prompt_tokens,
        prompt_tps=last.prompt_tps,
        generation_tokens=last.generation_tokens,
        generation_tps=last.generation_tps,
        peak_memory=last.peak_memory,
        finish_reason=last.finish_reason,
    )


@dataclass
class Rounds:
    """A started batch: its outputs, and the rounds that fill them."""

    outputs: list[Output]
    rounds: Iterator[list[Emission]] = field(repr=False)


def start(
    model: Target,
    draft: DraftLike,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    block_size: int | None,
    max_tokens: int,
    stop: str | Sequence[str],
    verification: str,
    prefill_chunk: int,
) -> Rounds:
    """Set up a batch of rows, each with its own prompt and sampling parameters."""
    if not is_whole(prefill_chunk) or prefill_chunk < 1:
        raise RequestError(f"prefill_chunk must be a whole number of at least 1, not {prefill_chunk!r}")
    drafter = as_drafter(draft)
    block_size = choose_block(drafter, block_size)
    if block_size == 1:
        drafter = NoDrafter()
    outputs = [new_output(model, tokenizer, max_tokens, stop) for _ in prompts]
    requests = [Request(*row) for row in zip(prompts, sampling, outputs, strict=True)]
    rounds = decode(
        model,
        drafter,
        requests,
        block_size=block_size,
        verification=verification,
        prefill_chunk=int(prefill_chunk),
    )
    return Rounds(outputs, rounds)


def new_output(model: Target, tokenizer: Any, max_tokens: int, stop: str | Sequence[str] = ()) -> Output:
    """An empty answer of this model, to be read with this tokenizer."""
    own = frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
    return Output(text_of(tokenizer), max_tokens, model.eos_ids | own, stop)


def as_drafter(draft: DraftLike) -> Drafter:
    """The drafter a name or None stands for."""
    if draft is None or draft == "none":
        return NoDrafter()
    if draft == "ngram":
        return NGramDrafter()
    if isinstance(draft, str):
        raise RequestError(
            f"draft {draft!r} is a name: load the draft with load_draft({draft!r}), or pass 'ngram', 'none' or None"
        )
    if not isinstance(draft, Drafter):
        raise RequestError(f"draft must be a drafter, 'ngram', 'none' or None, not {type(draft).__name__}")
    return draft


def choose_block(drafter: Drafter, block_size: int | None) -> int:
    """The block size in force. Above the trained one works, with fewer drafts accepted: a draft says so once.

    Raises:
        RequestError: not a whole number of at least 1.
    """
    if block_size is None:
        return drafter.block_size
    if not is_whole(block_size) or block_size < 1:
        raise RequestError(f"block_size must be a whole number, 1 (plain decoding) or more, not {block_size!r}")
    if drafter.block_size == 1:
        return 1
    block_size = int(block_size)
    draft = drafter.draft if isinstance(drafter, BothDrafters) else drafter
    if isinstance(draft, PublishedDraft) and block_size > draft.block_size:
        draft.say_once(
            f"block_size {block_size}",
            f"block_size {block_size} is above the {draft.block_size} that draft {draft.name} was trained for: its "
            "later guesses will seldom be right",
        )
    return block_size


def _responses(model: Target, batch: Rounds, prompt_tokens: int) -> Generator[Response, None, None]:
    """Time the rounds of a single row: only while the loop works, not while the consumer does."""
    output = batch.outputs[0]
    prefill_seconds = decode_seconds = 0.0
    while True:
        before = time.perf_counter()
        emitted = next(batch.rounds, None)
        spent = time.perf_counter() - before
        if emitted is None:
            return
        if prefill_seconds == 0.0:
            prefill_seconds = spent
        else:
            decode_seconds += spent
        one = emitted[0]
        done = len(output.tokens)
        yield Response(
            text=one.text,
            tokens=one.tokens,
            accepted=one.accepted,
            proposed=one.proposed,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tokens / prefill_seconds,
            generation_tokens=done,
            generation_tps=(done - 1) / decode_seconds if decode_seconds else 0.0,
            peak_memory=model.peak_memory(),
            finish_reason=output.finish_reason,
        )
