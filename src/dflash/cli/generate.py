"""``dflash generate``: answer one prompt, as text comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from dflash.checkpoint import DEFAULT_MODEL
from dflash.cli import console, figures, options, prompts, stopping
from dflash.cli.accepted import Painter, Splitter
from dflash.cli.pair import Pair, Wanted, load_pair
from dflash.errors import RequestError
from dflash.generate import Generation, Response, collect, stream_generate
from dflash.sampling import SamplingParams
from dflash.text import StopScanner

_SAMPLING = "Sampling"

CUT_SHORT = "interrupted"
"""Finish reason of an answer that Ctrl-C ended."""


@dataclass(frozen=True)
class Request:
    """What is asked of the pair. Checked at once, before anything is loaded.

    Raises:
        RequestError: options out of range, or that contradict each other.
    """

    prompt: str
    system: str | None
    raw: bool
    enable_thinking: bool | None
    max_new_tokens: int
    stop: tuple[str, ...]
    verification: options.Verification
    sampling: SamplingParams

    def __post_init__(self) -> None:
        StopScanner(self.stop)  # refuses an empty stop string
        if self.raw:
            prompts.refuse_chat_options("which --raw leaves out", self.system, self.enable_thinking)

    def stream(self, pair: Pair) -> Iterator[Response]:
        """The answer, round by round."""
        tokenizer, sampling = pair.target.tokenizer, self.sampling
        return stream_generate(
            pair.target,
            pair.drafter,
            tokenizer,
            prompts.as_messages(tokenizer, self.prompt, self.system, self.raw, self.enable_thinking),
            pair.wanted.block_size,
            self.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.repetition_penalty,
            seed=sampling.seed,
            stop=self.stop,
            enable_thinking=self.enable_thinking,
            verification=self.verification,
        )

    def settings(self) -> dict[str, Any]:
        """For records."""
        plain = asdict(self)
        sampling = plain.pop("sampling")
        del plain["prompt"], sampling["logit_bias"]
        return {**plain, **sampling}


def generate(
    model: options.Model = DEFAULT_MODEL,
    draft: options.Draft = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="P", help="The question. - reads standard input, and so does no --prompt where text is piped in."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="S", help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not wrap the prompt in the chat template.")] = False,
    enable_thinking: options.EnableThinking = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The longest answer.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text that ends the answer. May be repeated.")
    ] = None,
    show_accepted: Annotated[
        bool,
        typer.Option(
            "--show-accepted",
            help="Mark what was drafted and accepted: in green, or in ⟦brackets⟧ where there are no colours.",
        ),
    ] = False,
    as_json: options.Json = False,
    drafter: options.Drafter = None,
    block_size: options.BlockSize = None,
    verification: options.VerificationOption = "match",
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.", rich_help_panel=_SAMPLING)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.", rich_help_panel=_SAMPLING)] = 0,
    min_p: Annotated[float, typer.Option(help="0 keeps all.", rich_help_panel=_SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.", rich_help_panel=_SAMPLING)] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.", rich_help_panel=_SAMPLING)] = None,
    backend: options.BackendOption = None,
    dtype: options.DtypeOption = None,
    device: options.Device = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    draft_sliding_window_size: options.DraftWindow = None,
    draft_bits: options.DraftBits = None,
    draft_min_confidence: options.DraftConfidence = None,
) -> None:
    """Answer a prompt. The answer goes to stdout as it comes, figures about it to stderr."""
    wanted = Wanted(
        model, draft, drafter, block_size, backend, dtype, device, revision, draft_revision, trust_remote_code,
        draft_sliding_window_size, draft_bits, draft_min_confidence,
    )  # fmt: skip
    if as_json and show_accepted:
        raise RequestError("--show-accepted marks the text, --json gives it plain: leave one of them out")
    sampling = SamplingParams(temperature, top_p, top_k, min_p, repetition_penalty, seed=seed)
    asked = prompts.given(prompt)
    request = Request(asked, system, raw, enable_thinking, max_new_tokens, tuple(stop or ()), verification, sampling)
    pair = load_pair(wanted)
    stream = request.stream(pair)
    if as_json:
        answer = gather(stream)
        if answer is not None:
            console.print_json(_record(answer, pair, request))
    else:
        answer = _show(stream, pair, show_accepted)
    if answer is None:
        raise stopping.stopped("interrupted before the first token")
    if answer.finish_reason == CUT_SHORT:
        what = "the object holds" if as_json else "this is"
        raise stopping.stopped(f"interrupted, {what} the answer so far ({answer.generation_tokens} tokens)")


def _record(answer: Generation, pair: Pair, request: Request) -> dict[str, Any]:
    return {
        **asdict(answer),
        "acceptance_length": answer.acceptance_length,
        "settings": {**pair.settings(), **request.settings()},
    }


def _show(stream: Iterator[Response], pair: Pair, show_accepted: bool) -> Generation | None:
    """The text on stdout, the figures on stderr. Returns what ``gather`` does."""
    painter = Painter(console.stdout()) if show_accepted else None
    answer = print_stream(stream, pair.target.tokenizer, painter)
    if answer is None:
        return None
    aside = console.stderr()
    if painter is not None:
        typer.echo(painter.legend(answer.accepted, answer.generation_tokens), err=True)
    aside.print(figures.summary(answer, pair.drafter_label, pair.block_size), style="dim", soft_wrap=True)
    if pair.threads:
        aside.print(pair.threads, style="dim", soft_wrap=True)
    if pair.block_size > 1 and answer.rounds:
        aside.print("rounds by the tokens they gave:", style="dim")
        for line in figures.histogram(answer.rounds, pair.block_size, console.prints_unicode(aside)):
            aside.print(line, style="dim", soft_wrap=True)
    return answer


def gather(stream: Iterator[Response], show: Callable[[Response], None] = lambda response: None) -> Generation | None:
    """The whole answer, each response shown as it comes.

    Returns:
        Interrupted, the answer so far, with finish reason ``CUT_SHORT``; None before the first token.
    """
    responses: list[Response] = []
    try:
        for response in stream:
            responses.append(response)
            show(response)
    except KeyboardInterrupt:
        if not responses:
            return None
        responses[-1] = replace(responses[-1], finish_reason=CUT_SHORT)
    return collect(iter(responses))


def print_stream(stream: Iterator[Response], tokenizer: Any, painter: Painter | None) -> Generation | None:
    """``gather``, with the text written to stdout exactly as it is or painted, and a newline at its end."""
    splitter = Splitter(tokenizer)
    last = "\n"

    def show(response: Response) -> None:
        nonlocal last
        sys.stdout.write(response.text if painter is None else painter.paint(splitter.split(response)))
        sys.stdout.flush()
        last = response.text[-1:] or last

    try:
        return gather(stream, show)
    finally:  # whatever ended it, what comes next begins on a line of its own
        if last != "\n":
            sys.stdout.write("\n")
