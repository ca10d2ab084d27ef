"""``dflash regenerate``: answers by the target itself, to train a draft on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dflash.checkpoint import DEFAULT_MODEL
from dflash.cli import console, options, stopping
from dflash.cli.pair import Wanted, check_installed, load_pair
from dflash.cli.progress import meter
from dflash.cli.prompts import tell_skipped
from dflash.sampling import SamplingParams

FAILED = 1
"""Exit status when a prompt was not answered."""


def regenerate(
    output: Annotated[
        Path,
        typer.Option(metavar="FILE", parser=options.path, help="JSONL to append to. A run that stopped goes on."),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="Prompts: JSON lines (turns, messages, conversations or prompt), text lines, csv, parquet, or a data "
            "set of the hub.",
        ),
    ],
    model: options.Model = DEFAULT_MODEL,
    split: Annotated[str, typer.Option(metavar="NAME", help="Of a data set.")] = "train",
    max_samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use N prompts, spread evenly.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The longest answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Rows decoded together.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Every answer has its own from it.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of prompts that have none of their own.")] = None,
    enable_thinking: options.EnableThinking = None,
    draft: options.Draft = None,
    drafter: Annotated[
        options.DrafterKind | None,
        typer.Option(
            metavar="WHO",
            help="Who proposes: dflash (a draft), ngram (text seen before), both or none. By default dflash where "
            "--draft is given, else none. The answers are the same.",
            show_default=False,
            rich_help_panel="Models",
        ),
    ] = None,
    backend: options.BackendOption = None,
    dtype: options.DtypeOption = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Answer prompts with the target, in batches, and keep the tokens of prompts and answers.

    A prompt that fails is counted with its reason, the exit status is then 1; repeat the command to try it again.
    """
    kind = drafter or ("none" if draft is None else "dflash")
    wanted = Wanted(
        model, draft, kind, None, backend, dtype, device, revision, trust_remote_code=trust_remote_code
    )  # fmt: skip
    check_installed(wanted)
    from dflash.prompts import read_prompts, spread
    from dflash.train.regenerate import Progress, Settings, read_answers
    from dflash.train.regenerate import regenerate as run

    prompts = read_prompts(data, split)
    tell_skipped(prompts)
    pair = load_pair(wanted, aloud=True)
    if pair.threads:
        console.say("machine", pair.threads, "dim")
    sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    settings = Settings(pair.target.name, pair.dtype, max_new_tokens, sampling, system, enable_thinking)
    began = time.monotonic()
    chosen = spread(prompts.conversations, max_samples)
    try:
        with meter("answers") as show:

            def report(progress: Progress) -> None:
                rate = progress.tokens / (time.monotonic() - began)
                show(progress.done, progress.total, f"{rate:.0f} tok/s" if progress.tokens else "")

            done = run(pair.target, pair.drafter, chosen, output, settings, batch_size, report)
    except KeyboardInterrupt as interrupt:
        kept = f"interrupted, {len(read_answers(output))} answers are kept in {output}"
        raise stopping.stopped(f"{kept}; go on with the same command: {stopping.command()}") from interrupt
    for reason, count in done.failed.items():
        console.say("failed", f"{count} prompts: {reason}", "bold yellow")
    if not done.done:
        console.say("error", f"no prompt was answered, {output} holds no answers to them", "bold red")
    else:
        console.say("done", f"{done.done} answers in {output}", "bold green")
    if done.failed:
        raise typer.Exit(FAILED)
