"""``dflash train``: from answers to a draft in the published format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.checkpoint import DEFAULT_MODEL, locate
from dflash.cli import console, options, stopping
from dflash.cli.pair import Wanted, check_installed, load_pair
from dflash.cli.progress import meter
from dflash.errors import RequestError
from dflash.launcher import is_first, own_device
from dflash.train.begun import check_folder, check_start, latest, step_of
from dflash.train.recipe import Recipe

if TYPE_CHECKING:
    from dflash.train.evaluate import Acceptance
    from dflash.train.loop import Progress
    from dflash.train.run import Job

_DRAFT, _RECIPE, _RUN = "The draft", "The recipe", "The run"


def train(
    data: Annotated[
        list[Path],
        typer.Option(metavar="FILE", parser=options.path, help="Answers of dflash regenerate. May be repeated."),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", parser=options.path, help="Becomes the folder of the draft.")],
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Of the optimiser.", rich_help_panel=_RECIPE)],
    model: options.Model = DEFAULT_MODEL,
    block_size: Annotated[
        int | None, typer.Option(min=2, metavar="B", help="By default 8.", rich_help_panel=_DRAFT)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="By default 3.", rich_help_panel=_DRAFT)
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(
            metavar="IDS", help="Layers of the target, as 1,8,14; or how many. By default 5.", rich_help_panel=_DRAFT
        ),
    ] = None,
    mask_token: Annotated[
        int | None,
        typer.Option(metavar="ID", help="By default a row that text does not use.", rich_help_panel=_DRAFT),
    ] = None,
    sliding_layers: Annotated[int, typer.Option(min=0, metavar="N", rich_help_panel=_DRAFT)] = 0,
    sliding_window: Annotated[int | None, typer.Option(min=1, metavar="W", rich_help_panel=_DRAFT)] = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="FROM",
            help="target, random, or the folder of a draft or of a stopped run, which keeps its shape.",
            rich_help_panel=_DRAFT,
        ),
    ] = "target",
    sequences: Annotated[int, typer.Option(min=1, help="Answers a step.", rich_help_panel=_RECIPE)] = 8,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks an answer.", rich_help_panel=_RECIPE)] = 16,
    loss: Annotated[str, typer.Option(help="ce, kl, l1 or a mix: 0.5*ce+0.5*kl.", rich_help_panel=_RECIPE)] = "ce",
    weights: Annotated[
        str, typer.Option(help="Of the slots: exponential, dpace or uniform.", rich_help_panel=_RECIPE)
    ] = "exponential",
    gamma: Annotated[float | None, typer.Option(help="Of exponential weights.", rich_help_panel=_RECIPE)] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak, of AdamW.", rich_help_panel=_RECIPE)] = 1e-3,
    muon_rate: Annotated[float, typer.Option(help="Peak, of Muon.", rich_help_panel=_RECIPE)] = 0.02,
    weight_decay: Annotated[float, typer.Option(rich_help_panel=_RECIPE)] = 0.0,
    warmup: Annotated[float, typer.Option(help="Share of the steps.", rich_help_panel=_RECIPE)] = 0.04,
    decay: Annotated[float, typer.Option(help="Share of the steps, of wsd.", rich_help_panel=_RECIPE)] = 0.2,
    schedule: Annotated[str, typer.Option(help="wsd, cosine or constant.", rich_help_panel=_RECIPE)] = "wsd",
    optimizer: Annotated[str, typer.Option(help="adamw or muon.", rich_help_panel=_RECIPE)] = "adamw",
    precision: Annotated[str, typer.Option(help="bf16 or fp32.", rich_help_panel=_RECIPE)] = "bf16",
    accumulate: Annotated[int, typer.Option(min=1, help="Parts a step.", rich_help_panel=_RECIPE)] = 1,
    recompute: Annotated[bool, typer.Option("--recompute", help="Save memory.", rich_help_panel=_RECIPE)] = False,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Fuse the layers with torch.compile: for long runs.", rich_help_panel=_RECIPE),
    ] = False,
    vocabulary: Annotated[str, typer.Option(help="reduced or full.", rich_help_panel=_RECIPE)] = "reduced",
    others: Annotated[
        int, typer.Option(min=0, help="Tokens that stand for those outside it, a step.", rich_help_panel=_RECIPE)
    ] = 2048,
    seed: Annotated[int, typer.Option(rich_help_panel=_RECIPE)] = 0,
    held_out: Annotated[int, typer.Option(min=0, help="Answers kept apart to measure.", rich_help_panel=_RUN)] = 40,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens a sequence.", rich_help_panel=_RUN)] = 1024,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=options.path, help="For the target's hidden states.", rich_help_panel=_RUN),
    ] = None,
    cache_limit: Annotated[float, typer.Option(min=0.0, metavar="GB", rich_help_panel=_RUN)] = 20.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.", rich_help_panel=_RUN)
    ] = False,
    measure_every: Annotated[int, typer.Option(min=1, metavar="STEPS", rich_help_panel=_RUN)] = 500,
    save_every: Annotated[int, typer.Option(min=1, metavar="STEPS", rich_help_panel=_RUN)] = 500,
    licence: Annotated[str | None, typer.Option(help="For the card.", rich_help_panel=_RUN)] = None,
    dtype: options.DtypeOption = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train a draft for a target on the target's own answers. Interrupted, go on with --resume."""
    wanted = Wanted(model, None, "none", None, "torch", dtype, device, revision, trust_remote_code=trust_remote_code)
    check_installed(wanted)
    recipe = Recipe(
        steps, sequences, anchors, loss, weights, gamma, learning_rate, muon_rate, weight_decay, warmup, decay,
        schedule, optimizer, 1.0, precision, accumulate, recompute, compile, vocabulary, others, seed,
    )  # fmt: skip
    # All that needs neither PyTorch nor the target is told before they are loaded.
    check_folder(output, resume, recipe)
    check_start(start)
    for file in data:
        if not file.exists():
            raise RequestError(f"{file} does not exist: make it with dflash regenerate")
    target_id = locate(model).hub
    wanted = replace(wanted, device=own_device(device))
    ids = None if taps is None else _taps(taps)
    try:
        with console.waiting("importing PyTorch", aloud=is_first()), stopping.importing():
            from dflash.train.run import Job, Shape
        job = Job(
            tuple(data), output, Shape(block_size, layers, ids, mask_token, sliding_layers, sliding_window, start),
            recipe, held_out, max_length, cache, cache_limit * 1e9, resume, measure_every=measure_every,
            save_every=save_every, licence=licence, command=stopping.command(), target_id=target_id,
        )  # fmt: skip
        measured = _run(wanted, job)
    except KeyboardInterrupt as interrupt:
        if not is_first():
            raise stopping.stopped(None) from interrupt  # the first process speaks for all
        raise stopping.stopped(_kept(output, cache, steps, resume)) from interrupt
    if measured is not None:
        console.say("held out", f"{measured.length:.2f} tokens a round", "bold green")
    if is_first():
        console.say("done", f"the draft is in {output}", "bold green")


def _run(wanted: Wanted, job: Job) -> Acceptance | None:
    """Load the target and train, with progress shown."""
    from dflash.backends.torch.target import TorchTarget
    from dflash.train.run import train as run

    pair = load_pair(wanted, aloud=is_first())
    target = pair.target
    assert isinstance(target, TorchTarget)
    if not is_first():  # what is told once is not told by every process
        return run(target, job)
    if pair.threads:
        console.say("machine", pair.threads, "dim")
    with meter("hidden states") as caching, meter("steps") as show:

        def report(progress: Progress) -> None:
            figures = f"loss {progress.loss:.3f}, {progress.blocks_per_second:.0f} blocks/s"
            if progress.measured is not None:
                figures += f", held out {progress.measured.length:.2f}"
            show(progress.step, progress.steps, figures if progress.blocks_per_second else "")

        return run(target, job, lambda line: console.say("data", line, "bold"), caching, report)


def _kept(output: Path, cache: Path | None, steps: int, resume: bool) -> str:
    """What an interrupted run leaves behind, and how to go on."""
    last = latest(output / "checkpoints")
    if last is not None:
        saved = f"interrupted, step {step_of(last)} of {steps} is saved in {last}; go on with"
        return f"{saved}: {stopping.command()}{'' if resume else ' --resume'}"
    if cache is None or not cache.is_dir():
        return f"interrupted before the first step; nothing to keep; begin again with: {stopping.command()}"
    return (
        f"interrupted before the end of the first step; hidden states computed by now are kept in {cache}; begin again "
        f"with the same command: {stopping.command()}"
    )


def _taps(text: str) -> int | tuple[int, ...]:
    """A count, or ids separated by commas.

    Raises:
        RequestError: neither.
    """
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError(f"--taps must be layer ids as 1,8,14 or a count, not {text!r}") from error
    return ids[0] if len(ids) == 1 and "," not in text else ids
