"""The decode loop: the only one. Every job of this package (CLI, server, benchmark, data
regeneration, the plain baseline) runs it, with every drafter and on every backend.

The invariant: between rounds the target's cache holds every committed token except the
pending one, the newest. So a round keeps exactly as many positions as it emits tokens:
the old pending token and all new ones but the last.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from dflash.errors import NonFiniteScores, PromptTooLong, RequestError
from dflash.limits import Output
from dflash.protocols import NOTHING, Drafter, Drafting, Features, Proposal, Session, Target, Verdict, Verifier
from dflash.sampling import SamplingParams

PREFILL_CHUNK = 512
"""Prompt tokens read by one forward: bounds the memory of prefill whatever the prompt's length."""


@dataclass(frozen=True)
class Request:
    """One row's work.

    Attributes:
        prompt: token ids, at least one.
        output: where its tokens end up, and what ends it.
    """

    prompt: list[int]
    sampling: SamplingParams
    output: Output


@dataclass(frozen=True)
class Emission:
    """What one round gave one row.

    Attributes:
        row: index of the request.
        tokens: the new tokens, cut at the row's end. The first ``accepted`` were drafted.
        accepted: drafted tokens among them. 0 for the prefill's round, which drafts nothing.
        proposed: tokens that were drafted.
        text: the text that has become final; may be empty.
    """

    row: int
    tokens: list[int]
    accepted: int
    proposed: int
    text: str


def decode(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    block_size: int,
    verification: str = "match",
    prefill_chunk: int = PREFILL_CHUNK,
) -> Generator[list[Emission], None, None]:
    """Decode all rows to their ends, one list of emissions a round (the first is the prefill's).

    Everything is checked here, before the first round. Closing the generator, or an exception in it,
    leaves nothing behind: its caches are its own.

    Raises:
        PromptTooLong: a prompt leaves no room for a single token.
        RequestError: an empty prompt or a token id outside the vocabulary.
        IncompatibleDraft: the drafter was made for another target.
    """
    prompts = [request.prompt for request in requests]
    sampling = [request.sampling for request in requests]
    check_prompts(target, prompts)
    if target.context_length is not None:
        for request in requests:  # the last token of an answer is never read, so it may lie one past the context
            request.output.limit(target.context_length - len(request.prompt) + 1)
    session = target.start(len(requests), drafter.taps, block_size, prefill_chunk)
    drafting = drafter.start(target, sampling, verification, max(block_size, prefill_chunk))
    verifier = target.verifier(sampling, prompts, verification)
    return _rounds(target, session, drafting, verifier, prompts, [r.output for r in requests], block_size)


def _rounds(
    target: Target,
    session: Session,
    drafting: Drafting,
    verifier: Verifier,
    prompts: list[list[int]],
    outputs: list[Output],
    block_size: int,
) -> Generator[list[Emission], None, None]:
    """The loop itself. The prefill is a round with an empty proposal."""
    rows = list(range(len(outputs)))
    verdict = verifier(NOTHING, session.prefill(prompts, drafting.extend))
    yield [_emit(row, outputs[row], verdict, row, 0) for row in rows]

    while alive := [i for i, row in enumerate(rows) if outputs[row].finish_reason is None]:
        if len(alive) < len(rows):
            rows = [rows[i] for i in alive]
            session.select(alive)
            drafting.select(alive)
            verifier.select(alive)
        pending = [outputs[row].tokens[-1] for row in rows]
        room = _room(target, session.lengths, [outputs[row].remaining for row in rows], block_size)
        proposal = drafting.propose(pending, room) if room else NOTHING
        if proposal.width > room:
            raise RequestError(f"the drafter proposed {proposal.width} tokens where there is room for {room}")
        try:
            emitted, features = _round(session, verifier, pending, proposal, rows, outputs)
        except NonFiniteScores:
            # What was proposed may be what is NaN, and NaN spoils a whole block: attention multiplies what it masks
            # by 0, and 0 * NaN is NaN. The pending token alone tells what plain decoding would give.
            emitted, features = _round(session, verifier, pending, NOTHING, rows, outputs)
        drafting.extend([[p, *e.tokens[:-1]] for p, e in zip(pending, emitted, strict=True)], features)
        yield emitted


def _round(
    session: Session,
    verifier: Verifier,
    pending: list[int],
    proposal: Proposal,
    rows: list[int],
    outputs: list[Output],
) -> tuple[list[Emission], Features]:
    """One forward of the target; what it gave each row, and the features of what is kept."""
    with session.verify(pending, proposal) as ahead:
        verdict = verifier(proposal, ahead.scores)
        emitted = [_emit(row, outputs[row], verdict, i, proposal.width) for i, row in enumerate(rows)]
        return emitted, ahead.keep([len(emission.tokens) for emission in emitted])


def _emit(row: int, output: Output, verdict: Verdict, i: int, proposed: int) -> Emission:
    """Cut row i's verdict at the row's end, before anything is committed."""
    kept, text = output.take(verdict.tokens[i])
    return Emission(row, kept, min(verdict.accepted[i], len(kept)), proposed, text)


def _room(target: Target, lengths: list[int], remaining: list[int], block_size: int) -> int:
    """Proposals worth making: the block, less what no row can still use, within the target's context."""
    room = min(block_size - 1, max(remaining) - 1)
    if target.context_length is not None:
        room = min(room, target.context_length - max(lengths) - 1)
    return max(room, 0)


def check_prompts(target: Target, prompts: Sequence[Sequence[int]]) -> None:
    """Whether the target can take prompts.

    Raises:
        PromptTooLong: one does not fit its context.
        RequestError: one is empty, or has ids that the target does not know.
    """
    for prompt in prompts:
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token")
        if target.context_length is not None and len(prompt) > target.context_length:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but {target.name} has a context of "
                f"{target.context_length}: shorten the prompt"
            )
        bad = next((token for token in prompt if not 0 <= token < target.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"token id {bad} is outside the vocabulary of {target.name} (0 to {target.vocab_size - 1}): "
                "was the prompt tokenized for another model?"
            )
