"""``dflash verify``: is the answer with a drafter, token for token, the target's own?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from dflash.checkpoint import DEFAULT_MODEL
from dflash.cli import console, options, prompts, stopping
from dflash.cli.pair import Pair, Wanted, load_pair
from dflash.cli.prompts import BUILT_IN, Question
from dflash.difference import ULPS, Difference, first_difference
from dflash.errors import NonFiniteScores, RequestError
from dflash.generate import Generation, collect, stream_generate
from dflash.text import encode_prompt

FAILED = 1
"""Exit status when an answer is not the target's own."""

EPILOG = (
    "Exit status: 0 if all answers are the same, 1 if one is not or could not be made, 2 for an error, 130 if it was "
    "interrupted: then the prompts compared so far are shown.\n\n"
    "In float32 every difference counts. In bfloat16 and float16 a block and a single token are rounded differently, "
    "and where the target's best two scores are that close, either is its own choice: such a difference is a tie, and "
    f"fails only with --strict. Up to {ULPS} units in the last place of the best score are a tie (typically 0.5 in "
    "bfloat16, 0.06 in float16): two scores, in two runs, each a unit off."
)


@dataclass(frozen=True)
class Check:
    """One prompt answered twice."""

    question: Question
    plain: Generation
    drafted: Generation
    difference: Difference | None

    @property
    def verdict(self) -> str:
        """ "identical", "tie" or "different"."""
        if self.difference is None:
            return "identical"
        return "tie" if self.difference.tie else "different"


@dataclass(frozen=True)
class Unanswered:
    """One prompt that could not be answered, and why."""

    question: Question
    error: str


def verify(
    model: options.Model = DEFAULT_MODEL,
    draft: options.Draft = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            parser=options.path,
            help="JSON lines (turns, messages, conversations or prompt), text lines, csv or parquet; the first turns "
            "are used.",
        ),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="P", help="A question. May be repeated.")] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use the first N prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The longest answer.")] = 64,
    enable_thinking: options.EnableThinking = None,
    strict: Annotated[bool, typer.Option("--strict", help="Ties fail too.")] = False,
    as_json: options.Json = False,
    drafter: options.Drafter = None,
    block_size: options.BlockSize = None,
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
    """Prove losslessness on your own pair: answer prompts with and without the drafter, compare the tokens."""
    wanted = Wanted(
        model, draft, drafter, block_size, backend, dtype, device, revision, draft_revision, trust_remote_code,
        draft_sliding_window_size, draft_bits, draft_min_confidence,
    )  # fmt: skip
    if wanted.kind == "none":
        raise RequestError(
            "verify compares a drafter with plain decoding: give --drafter both, dflash or ngram, and --block-size 2 "
            "or more"
        )
    questions = _questions(file, prompt or [], max_samples)
    pair = load_pair(wanted)
    if enable_thinking is not None and not pair.target.tokenizer.chat_template:
        prompts.refuse_chat_options("which this tokenizer does not have", None, enable_thinking)
    checks: list[Check] = []
    unanswered: list[Unanswered] = []
    complete = True
    try:
        for number, question in enumerate(questions, start=1):
            try:
                with console.waiting(f"prompt {number} of {len(questions)}"):
                    checks.append(_check(pair, question, max_new_tokens, enable_thinking))
            except (RequestError, NonFiniteScores) as error:  # the others are compared all the same
                if len(questions) == 1:
                    raise
                unanswered.append(Unanswered(question, str(error)))
    except KeyboardInterrupt:
        complete = False
    failed = bool(unanswered) or any(c.verdict == "different" or (strict and c.verdict == "tie") for c in checks)
    if as_json:
        console.print_json(_record(checks, unanswered, pair, failed, complete))
    elif checks:
        _show(checks, pair)
    for one in unanswered:
        console.say("failed", f"{' '.join(one.question.text.split())[:60]!r}: {one.error}", "bold red")
    if not complete:
        raise stopping.stopped(f"interrupted after {len(checks) + len(unanswered)} of {len(questions)} prompts")
    raise typer.Exit(FAILED if failed else 0)


def _questions(file: Path | None, prompt: list[str], limit: int | None) -> list[Question]:
    if file is not None and prompt:
        raise RequestError("--prompts and --prompt both say what to ask: leave one of them out")
    if file is not None:
        return prompts.read_file(file, limit)
    return ([Question("", text) for text in prompt] or list(BUILT_IN))[:limit]


def _check(pair: Pair, question: Question, max_new_tokens: int, enable_thinking: bool | None) -> Check:
    target = pair.target
    asked = prompts.as_asked(target.tokenizer, question)
    ids = encode_prompt(target.tokenizer, asked, enable_thinking=enable_thinking)

    def answer(drafter: Any, block_size: int | None) -> Generation:
        return collect(stream_generate(target, drafter, target.tokenizer, ids, block_size, max_new_tokens))

    plain, drafted = answer(None, None), answer(pair.drafter, pair.wanted.block_size)
    difference = first_difference(target, pair.dtype, ids, plain.tokens, drafted.tokens)
    return Check(question, plain, drafted, difference)


def _record(
    checks: Sequence[Check], unanswered: Sequence[Unanswered], pair: Pair, failed: bool, complete: bool
) -> dict[str, Any]:
    verdicts = [check.verdict for check in checks]
    return {
        "passed": complete and not failed,
        "complete": complete,
        **{verdict: verdicts.count(verdict) for verdict in ("identical", "tie", "different")},
        "unanswered": [{"prompt": one.question.text, "error": one.error} for one in unanswered],
        "settings": pair.settings(),
        "prompts": [
            {
                "source": check.question.source,
                "opening": list(check.question.opening),
                "prompt": check.question.text,
                "verdict": check.verdict,
                "tokens": len(check.plain.tokens),
                "acceptance_length": check.drafted.acceptance_length,
                "difference": None if check.difference is None else asdict(check.difference),
            }
            for check in checks
        ],
    }


def _show(checks: Sequence[Check], pair: Pair) -> None:
    out = console.stdout()
    pairing = f"{pair.target.name}, {pair.dtype}, {pair.drafter_label}, block {pair.block_size}"
    out.print(Text(f"{pairing}: with the drafter and without"), soft_wrap=True)
    if pair.threads:
        out.print(Text(pair.threads, style="dim"), soft_wrap=True)
    out.print(_table(checks, out.width))
    for number, check in enumerate(checks, start=1):
        if check.difference is not None:
            out.print(Text(f"prompt {number}: {_explained(check.difference, pair)}"), soft_wrap=True)
    counts = {verdict: sum(c.verdict == verdict for c in checks) for verdict in ("identical", "tie", "different")}
    rounds = [n for check in checks for n in check.drafted.rounds]
    mean = sum(rounds) / len(rounds) if rounds else 1.0
    parts = [f"{counts['identical']} of {len(checks)} answers identical"]
    parts += [f"{counts['tie']} parted at a tie"] * (counts["tie"] > 0)
    parts += [f"{counts['different']} DIFFERENT"] * (counts["different"] > 0)
    out.print(Text(f"{', '.join(parts)}; {mean:.2f} tokens a round"), soft_wrap=True)


def _table(checks: Sequence[Check], width: int) -> Table:
    table = Table("", "prompt", "tokens", "identical", "tokens a round", box=box.SIMPLE_HEAD)
    for column in (0, 2, 4):
        table.columns[column].justify = "right"
    room = max(width - 50, 10)  # for the prompt; the other columns keep their widths
    shown = {"identical": Text("yes", "green"), "tie": Text("tie", "yellow"), "different": Text("NO", "bold red")}
    for number, check in enumerate(checks, start=1):
        prompt = Text(" ".join(check.question.text.split()))
        prompt.truncate(room, overflow="ellipsis")
        acceptance = f"{check.drafted.acceptance_length:.2f}"
        table.add_row(str(number), prompt, str(len(check.plain.tokens)), shown[check.verdict], acceptance)
    return table


def _explained(difference: Difference, pair: Pair) -> str:
    """Where, what, and how sure the target was."""

    def shown(token: int | None) -> str:
        return "the end" if token is None else f"{pair.target.tokenizer.decode([token])!r} ({token})"

    text = (
        f"first difference at token {difference.position}: {shown(difference.plain)} without the drafter, "
        f"{shown(difference.drafted)} with it; margin of the target's best two there {difference.margin:.4g}"
    )
    if difference.gap not in (None, difference.margin):
        text += f", and its best is {difference.gap:.4g} above the worse of these"
    if difference.tie:
        return f"{text}: a tie, within the rounding of {pair.dtype} (up to {difference.bound:.4g})"
    if difference.bound:
        return f"{text}: beyond the rounding of {pair.dtype} (up to {difference.bound:.4g})"
    return f"{text}; in {pair.dtype} any difference counts"
