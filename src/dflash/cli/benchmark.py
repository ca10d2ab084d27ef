"""``dflash benchmark``: measure a target and its draft against their peers on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dflash import default_backend, packages
from dflash.checkpoint import DEFAULT_MODEL, find_weights, locate_draft, packages_of, shipped_draft
from dflash.cli import console, options, stopping
from dflash.cli.pair import Wanted, draft_options, load_pair
from dflash.cli.progress import meter
from dflash.errors import RequestError
from dflash.launcher import own_device
from dflash.only import only_run

if TYPE_CHECKING:
    from dflash.benchmark.answers import Record
    from dflash.benchmark.assemble import Line
    from dflash.benchmark.datasets import Dataset
    from dflash.benchmark.parallel import Share
    from dflash.benchmark.results import Results
    from dflash.benchmark.run import Journal, Run
    from dflash.benchmark.systems import Asking
    from dflash.protocols import Target

_WHAT = "What is measured"
_HOW = "How they are asked"
_MODELS = "Models"
_SERVERS = "Servers (--backend openai)"

FAILED = 1
"""Exit status when an answer failed; of --compare, when one in either of the results did."""

A_FEW = 5
"""Prompts of each shipped sample where nothing is said: minutes on a CPU, not hours."""

EPILOG = (
    "Exit status: 0 if every answer came, 1 if one failed, 2 for an error, 130 when stopped.\n\n"
    "Every figure is defined in docs/benchmark.md. With --output the run can be stopped and continued: repeat the "
    "command. Several processes share the prompts: torchrun --nproc-per-node 2 -m dflash.benchmark ..."
)


def benchmark(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="M",
            help="The target: a hub id, a folder, a .gguf file or the alias smollm2-135m, the default. Of a server: "
            "its name for the model, by default the first it lists.",
            rich_help_panel=_MODELS,
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            "--draft",
            metavar="D",
            help="A DFlash draft made for the target: a hub id, a folder, or smollm2-135m, which is shipped and the "
            "default for that target.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option(
            "--assistant-model",
            metavar="A",
            help="A smaller model with the same vocabulary, for transformers' assisted generation.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="One question instead of a data set.", rich_help_panel=_WHAT)
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="gsm8k, math500, humaneval, mbpp, mt-bench or alpaca (from the hub, else the sample that ships; "
            "gsm8k-sample, humaneval-sample, mt-bench-sample: always the sample), or a file of prompts (JSON with "
            "turns, messages, conversations or prompt, text lines, csv, parquet). May be repeated. By default five "
            "prompts of each sample.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    max_samples: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Prompts of each data set, spread evenly over it.", rich_help_panel=_WHAT
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Answer each prompt so often.", rich_help_panel=_WHAT)
    ] = 1,
    systems: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of draft, both, ngram, plain, transformers, transformers-lookup, transformers-assisted, mlx-lm, "
            "separated by commas. By default all that can run.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=options.path,
            help="For results.json, report.html and its pictures.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json",
            parser=options.path,
            help="Compare two results instead of measuring.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="The longest answer.", rich_help_panel=_HOW)
    ] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_HOW)] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.", rich_help_panel=_HOW)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.", rich_help_panel=_HOW)] = 0,
    seed: Annotated[int, typer.Option(help="Of sampling.", rich_help_panel=_HOW)] = 0,
    enable_thinking: options.EnableThinking = None,
    at_once: Annotated[
        int,
        typer.Option(
            "--batch-size",
            "--concurrency",
            min=1,
            metavar="N",
            help="Prompts decoded together; of a server, requests in flight.",
            rich_help_panel=_HOW,
        ),
    ] = 1,
    block_size: options.BlockSize = None,
    split: Annotated[
        bool | None,
        typer.Option(
            "--split/--no-split",
            help="Measure where a round's time goes. By default on CPU only: a GPU has to be waited for around every "
            "step, which slows it down.",
            show_default=False,
            rich_help_panel=_HOW,
        ),
    ] = None,
    backend: Annotated[
        Literal["torch", "mlx", "openai"] | None,
        typer.Option(
            metavar="NAME",
            help="torch or mlx, by default mlx on Apple silicon, where it is installed, else torch; "
            "or openai for servers.",
            rich_help_panel=_MODELS,
            show_default=False,
        ),
    ] = None,
    dtype: options.DtypeOption = None,
    device: options.Device = None,
    revision: options.Revision = None,
    draft_revision: options.DraftRevision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    draft_sliding_window_size: options.DraftWindow = None,
    draft_bits: options.DraftBits = None,
    draft_min_confidence: options.DraftConfidence = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Where the server is, as http://localhost:8000/v1. NAME=URL names it. May be repeated: the first is "
            "then the baseline. OPENAI_API_KEY is sent where it is set.",
            rich_help_panel=_SERVERS,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="For one request.", rich_help_panel=_SERVERS)
    ] = 600.0,
) -> None:
    """Measure speed, acceptance and identity of a target and its draft, side by side with their peers."""
    if compare is not None:
        _compare(*compare)
        return
    from dflash.benchmark import datasets
    from dflash.benchmark.parallel import Share
    from dflash.benchmark.systems import Asking

    asking = Asking(max_new_tokens, temperature, top_p, top_k, enable_thinking)
    asking.sampling(0)  # refuses what is out of range before anything is loaded
    if prompt is not None and dataset:
        raise RequestError("--prompt and --dataset both say what to ask: leave one of them out")
    names = dataset or [name + datasets.SAMPLE for name in ("gsm8k", "humaneval", "mt-bench")]
    if not dataset and max_samples is None:
        max_samples = A_FEW
    asked = [datasets.one_prompt(prompt)] if prompt is not None else [datasets.read(n, max_samples) for n in names]
    for one in asked:
        if one.note is not None:
            console.say("note", one.note, "bold yellow")
    wanted = None if systems is None else [name.strip() for name in systems.split(",")]
    if draft is None and backend != "openai" and (wanted is None or {"draft", "both"} & {*wanted}):
        draft = shipped_draft(model or DEFAULT_MODEL)
    share = Share.of_environment()
    share.check()
    settings: dict[str, Any] = {
        "model": model, "draft_model": draft, "assistant_model": assistant,
        "datasets": {one.name: one.describe() for one in asked}, "repeats": repeats, "seed": seed,
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "enable_thinking": enable_thinking, "at_once": at_once, "block_size": block_size,
        "draft_sliding_window_size": draft_sliding_window_size, "draft_bits": draft_bits,
    }  # fmt: skip
    if len({one.name for one in asked}) < len(asked):
        raise RequestError("two data sets have the same name: give one of the files another")
    if output is not None:
        _check_drawing(backend, model or DEFAULT_MODEL)
    of_draft = draft_options(draft_sliding_window_size, draft_revision, draft_bits, draft_min_confidence)
    if of_draft and backend == "openai":
        raise RequestError(
            f"options of a draft do not go with --backend openai: a server has its own, leave {of_draft[0]} out"
        )
    if of_draft and draft is None:
        raise RequestError(
            f"{of_draft[0]} needs a draft: give --draft-model, and with --systems one that drafts (draft, both)"
        )
    if backend == "openai":
        bench = _of_servers(base_url or [], model, asking, at_once, timeout, draft, wanted)
    else:
        own = own_device(device) if (backend or default_backend()) == "torch" else device
        pair = Wanted(
            model or DEFAULT_MODEL, draft, "none" if draft is None else "dflash", block_size, backend, dtype, own,
            revision, draft_revision, trust_remote_code, draft_sliding_window_size, draft_bits, draft_min_confidence,
        )  # fmt: skip
        bench = _of_pair(pair, assistant, asking, at_once, split, wanted)
    with contextlib.nullcontext() if output is None or share.rank else only_run(output):
        _measure(bench, settings, asked, asking, repeats, seed, output, share)


@dataclass(frozen=True)
class _Bench:
    """What is compared, and what of it is loaded here.

    Attributes:
        settings: those the loading decided.
    """

    line: Line
    settings: dict[str, Any]
    target: Target | None = None
    dtype: str | None = None


def _of_servers(
    base_urls: Sequence[str],
    model: str | None,
    asking: Asking,
    concurrency: int,
    timeout: float,
    draft: str | None,
    wanted: Sequence[str] | None,
) -> _Bench:
    from dflash.benchmark import assemble

    for option, value in (("--draft-model", draft), ("--systems", wanted)):
        if value is not None:
            raise RequestError(f"{option} does not go with --backend openai: a server has its own")
    api_key = os.environ.get("OPENAI_API_KEY")  # not an option: the command is recorded
    line = assemble.servers(base_urls, model, asking, concurrency, timeout, api_key)
    named = model or ", ".join(line.descriptions.values())
    return _Bench(line, {"backend": "openai", "model": named, "timeout": timeout, "systems": line.descriptions})


def _of_pair(
    wanted: Wanted,
    assistant: str | None,
    asking: Asking,
    at_once: int,
    split: bool | None,
    systems: Sequence[str] | None,
) -> _Bench:
    """Load everything.

    Raises:
        DFlashError: as ``load_pair``.
    """
    from dflash.benchmark import assemble
    from dflash.benchmark.results import fingerprint

    pair = load_pair(wanted)
    helper = None
    if assistant is not None:
        helper = load_pair(
            Wanted(assistant, None, "none", None, wanted.backend, wanted.dtype, wanted.device)
        ).target.model
    on_cpu = str(pair.target.device) == "cpu" and pair.target.backend == "torch"
    if split and pair.target.backend != "torch":
        raise RequestError("--split needs --backend torch: mlx computes when a result is read, not when asked for")
    splits = on_cpu if split is None else split
    loaded = assemble.Loaded(
        pair.target,
        asking,
        pair.drafter if wanted.kind == "dflash" else None,
        wanted.draft,
        helper,
        wanted.block_size,
        at_once,
        splits,
    )
    line = assemble.local(loaded, systems)
    weights = None
    if wanted.draft is not None:
        weights = fingerprint(find_weights(locate_draft(wanted.draft, wanted.draft_revision)).files)
    kind = str(pair.target.device).partition(":")[0]  # processes with a GPU each do the same work
    settings: dict[str, Any] = {
        "backend": pair.target.backend, "model": pair.target.name, "device": kind, "dtype": pair.dtype, "split": splits,
        "revision": wanted.revision, "draft_revision": wanted.draft_revision, "draft_sha256": weights,
        "draft_min_confidence": pair.min_confidence, "systems": line.descriptions,
    }  # fmt: skip
    return _Bench(line, settings, pair.target, pair.dtype)


def _measure(
    bench: _Bench,
    settings: dict[str, Any],
    asked: list[Dataset],
    asking: Asking,
    repeats: int,
    seed: int,
    output: Path | None,
    share: Share,
) -> None:
    from dflash.benchmark.results import environment
    from dflash.benchmark.run import Journal, Run

    device = None if bench.target is None else str(bench.target.device)
    settings = {**settings, **bench.settings}
    where = environment(device, bench.dtype, settings["backend"])
    settings["threads"] = where.get("threads")
    journal = Journal.open(output, settings, share)
    run = Run(asked, bench.line.systems, repeats, seed)
    complete = _run(run, journal)
    keys = set(run.keys(share))
    records = [record for record in journal.records if record.talk in keys]
    if complete:
        records = share.gather(records)
    if share.rank == 0:
        _finish(_results(bench, settings, where, records, complete, asked, asking), output)
    if not complete:
        if share.rank:
            raise stopping.stopped(None)  # the first process speaks for all
        kept = "the figures are of the answers so far" if records else "before the first answer"
        how = "a run with --output can be continued"
        if output is not None:
            how = f"go on with the same command: {stopping.command()}"
        raise stopping.stopped(f"interrupted, {kept}; {how}")
    if share.rank == 0:
        _exit_of(records)


def _exit_of(records: Sequence[Record]) -> None:
    """Say at the end how many answers failed and why, and end with that status."""
    from dflash.benchmark.table import failures

    if (failed := failures(records)) is not None:
        console.say("failed", failed, "bold red")
        raise typer.Exit(FAILED)


def _run(run: Run, journal: Journal) -> bool:
    """Run to the end, or until Ctrl-C; tell which."""
    try:
        if journal.share.rank == 0:
            with meter("conversations") as show:
                run(journal, show)
        else:
            run(journal, lambda done, total, figures: None)
    except KeyboardInterrupt:
        return False
    return True


def _results(
    bench: _Bench,
    settings: dict[str, Any],
    where: dict[str, Any],
    records: list[Any],
    complete: bool,
    asked: list[Dataset],
    asking: Asking,
) -> Results:
    from dflash.benchmark.identity import partings
    from dflash.benchmark.results import Results

    line = bench.line
    order = {name: i for i, name in enumerate(line.descriptions)}
    records = sorted(records, key=lambda r: (list(settings["datasets"]).index(r.dataset), *r.key[1:], order[r.system]))
    found = []
    if line.baseline is not None and bench.target is not None and bench.dtype is not None:
        found = partings(records, line.baseline, line.comparable, asked, bench.target, bench.dtype, asking)
    return Results(
        stopping.command(), complete, settings, where, line.descriptions, line.baseline, line.comparable, records, found
    )


def _finish(results: Results, output: Path | None) -> None:
    """The table on screen, the files where they are wanted."""
    from dflash.benchmark.report import write_report
    from dflash.benchmark.results import headline, save
    from dflash.benchmark.table import tables

    out = console.stdout()
    if not results.records:
        return
    for line in headline(results):
        out.print(line, style="dim", soft_wrap=True)
    out.print()
    out.print(tables(results, out.width))
    if output is not None:
        save(results, output / "results.json")
        write_report(results, output)
        console.say("written", f"{output}{os.sep}results.json and report.html", "bold green")


def _check_drawing(backend: str | None, model: str) -> None:
    """Whether plots can be drawn. If not, what else is missing is told too."""
    also = ["httpx2"]
    if backend != "openai":
        also = [*packages.BACKENDS[backend or default_backend()], *packages_of(model)]
    packages.need(("matplotlib",), "to draw the plots of --output", also)


def _compare(*places: Path) -> None:
    from dflash.benchmark.compare import comparison
    from dflash.benchmark.results import load

    # A folder stands for the results in it.
    a, b = (place / "results.json" if place.is_dir() else place for place in places)
    one, other = load(a), load(b)
    console.stdout().print(comparison(one, other, str(a), str(b)))
    _exit_of([*one.records, *other.records])
