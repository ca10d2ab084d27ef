"""From answers to a draft: what ``dflash train`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.backends.torch.draft import DFlashDraftModel
from dflash.backends.torch.load import load_draft
from dflash.backends.torch.target import TorchTarget
from dflash.errors import RequestError
from dflash.only import only_run
from dflash.train import checkpoint
from dflash.train.begun import check_output, check_start, config_of_run, latest
from dflash.train.data import Corpus, read_corpus
from dflash.train.evaluate import Acceptance
from dflash.train.features import Features, compute
from dflash.train.files import write
from dflash.train.loop import Progress, Trainer
from dflash.train.mix import LossMix
from dflash.train.output import Made, card, save_draft
from dflash.train.plot import plot_run
from dflash.train.processes import Processes
from dflash.train.recipe import Recipe
from dflash.train.regenerate import settings_of
from dflash.train.start import STARTS, check_mask_token, default_mask_token, default_taps, draft_config, initialise


@dataclass(frozen=True)
class Shape:
    """What the draft is to be.

    None is the default of each; a draft that is gone on from has its own.

    Attributes:
        block_size: 8 by default.
        layers: 3 by default.
        taps: ids of the target's layers, or how many, at the published default places: 5 by default.
        mask_token: by default a row that text does not use.
        start: "target", "random", or the folder of a draft, or of a run that was stopped, to go on from.
    """

    block_size: int | None = None
    layers: int | None = None
    taps: int | tuple[int, ...] | None = None
    mask_token: int | None = None
    sliding_layers: int = 0
    sliding_window: int | None = None
    start: str = "target"


@dataclass(frozen=True)
class Job:
    """A run of ``dflash train``.

    Attributes:
        cache: folder for the target's hidden states; None computes them in every pass.
        cache_limit: bytes it may take.
        licence: of the draft, for its card.
        command: as typed, for its card.
        target_id: of the target on the hub, for its card; None where it lies in a local folder.
    """

    data: tuple[Path, ...]
    output: Path
    shape: Shape
    recipe: Recipe
    held_out: int = 40
    max_length: int = 1024
    cache: Path | None = None
    cache_limit: float = 2e10
    resume: bool = False
    log_every: int = 50
    measure_every: int = 500
    save_every: int = 500
    licence: str | None = None
    command: str = ""
    target_id: str | None = None


def train(
    target: TorchTarget,
    job: Job,
    say: Callable[[str], None] = lambda line: None,
    caching: Callable[[int, int], None] = lambda done, of: None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Acceptance | None:
    """Train a draft and write it to ``job.output``.

    Several processes (torchrun) share the work, each with a target on a device of its own; the first one writes, and
    returns what it measured.

    Raises:
        DFlashError: as ``Trainer``, ``read_corpus``, ``make_draft`` and ``Target.start``; or another run is writing the
            output.
    """
    with contextlib.closing(Processes.join(target.device)) as processes:
        measured = _train(target, job, processes, say, caching, report)
        processes.leave()
        return measured


def _train(
    target: TorchTarget,
    job: Job,
    processes: Processes,
    say: Callable[[str], None],
    caching: Callable[[int, int], None],
    report: Callable[[Progress], None],
) -> Acceptance | None:
    """This process's share of ``train``."""
    check_output(job.output, job.resume)
    settings = settings_of(job.data[0])
    corpus = read_corpus(job.data, job.held_out, job.max_length)
    corpus.check(target.vocab_size)
    learned, read = corpus.supervised
    say(
        f"{len(corpus.train)} answers to learn from ({learned} answer tokens, {learned / read:.0%} of all), "
        f"{len(corpus.held_out)} kept apart"
        + "".join(f"; skipped {count}: {reason}" for reason, count in corpus.skipped.items())
    )
    draft = make_draft(target, job.shape, job.recipe.seed)
    # Any token will do: a target that cannot be tapped is refused before anything is written.
    compute(target, draft.taps, False, [draft.config.mask_token_id])
    features = Features(
        target, draft.config.target_layer_ids, LossMix.parse(job.recipe.loss).needs_teacher, job.cache, job.cache_limit
    )
    with only_run(job.output) if processes.first else contextlib.nullcontext():
        run = Trainer(draft, target, corpus, features, job.recipe, job.output, job.resume)
        features.prepare([*corpus.train, *corpus.held_out], caching, processes)
        every = {"log_every": job.log_every, "measure_every": job.measure_every, "save_every": job.save_every}
        measured = run.run(**every, report=report).measured
        if processes.first:
            if measured is None and corpus.held_out:  # there was no step left to take
                measured = run.measure()
            finish(target, job, corpus, draft, measured, run.spent, settings)
    return measured


def make_draft(target: TorchTarget, shape: Shape, seed: int) -> DFlashDraftModel:
    """The draft to be trained, in float32, on the target's device.

    Raises:
        RequestError: an unsafe mask token, impossible taps, or a start of another shape.
        IncompatibleDraft: a start that was made for another target, or a target that no draft can be made for.
    """
    if shape.start not in STARTS:
        return _gone_on_from(target, shape)
    mask = default_mask_token(target) if shape.mask_token is None else shape.mask_token
    check_mask_token(target, mask)
    wanted = 5 if shape.taps is None else shape.taps
    taps = default_taps(target.num_layers, wanted) if isinstance(wanted, int) else wanted
    config = draft_config(
        target,
        layers=3 if shape.layers is None else shape.layers,
        taps=taps,
        block_size=8 if shape.block_size is None else shape.block_size,
        mask_token=mask,
        sliding_layers=shape.sliding_layers,
        sliding_window=shape.sliding_window,
    )
    draft = DFlashDraftModel(config)
    draft.check_fit(target)
    initialise(draft, target, shape.start, seed)
    return draft.to(target.device)


def _gone_on_from(target: TorchTarget, shape: Shape) -> DFlashDraftModel:
    """The draft of a folder, which has a shape of its own; of a run that was stopped, its last checkpoint."""
    check_start(shape.start)
    last = latest(Path(shape.start) / "checkpoints")
    if last is None or (Path(shape.start) / "config.json").is_file():
        draft = load_draft(shape.start, dtype=torch.float32, device=target.device)
    else:
        draft = DFlashDraftModel(config_of_run(Path(shape.start)), Path(shape.start)).to(target.device)
        checkpoint.restore(last, draft, [])
    own = draft.config
    draft.check_fit(target)
    if own.draft_vocab_size is not None:
        raise RequestError(
            f"{shape.start} proposes only {own.draft_vocab_size} of the target's tokens, by a head that is not "
            "trained here: start from a draft with the whole vocabulary"
        )
    taps = shape.taps if not isinstance(shape.taps, int) else default_taps(target.num_layers, shape.taps)
    for name, given, has in (
        ("block_size", shape.block_size, own.block_size),
        ("layers", shape.layers, own.num_hidden_layers),
        ("taps", taps, own.target_layer_ids),
        ("mask_token", shape.mask_token, own.mask_token_id),
    ):
        if given is not None and given != has:
            raise RequestError(f"{shape.start} has {name} {has}, not {given}: leave it out to go on from that draft")
    if shape.sliding_layers or shape.sliding_window:
        raise RequestError(f"{shape.start} has its own layer types: leave the sliding options out to go on from it")
    return draft


def finish(
    target: TorchTarget,
    job: Job,
    corpus: Corpus,
    draft: DFlashDraftModel,
    measured: Acceptance | None,
    spent: dict[str, float],
    settings: dict[str, Any],
) -> None:
    """Write the draft, its card and its curves."""
    made = Made(
        target=target.name,
        target_id=job.target_id,
        licence=job.licence,
        command=job.command,
        data=_counts(job.data, corpus),
        supervised=corpus.supervised,
        settings=settings,
        recipe=asdict(job.recipe),
        blocks=int(spent["blocks"]),
        seconds=spent["seconds"],
    )
    save_draft(draft, job.output)
    write(job.output / "README.md", card(made, draft, measured))
    with contextlib.suppress(RequestError):  # matplotlib is an extra; the log holds the same numbers
        plot_run(job.output / "log.jsonl", job.output / "training.png")


def _counts(paths: Sequence[Path], corpus: Corpus) -> dict[str, int]:
    everything = [*corpus.train, *corpus.held_out]
    return {
        f"{path.name}{f' ({i + 1})' if [p.name for p in paths].count(path.name) > 1 else ''}": sum(
            s.id.startswith(f"{i}:") for s in everything
        )
        for i, path in enumerate(paths)
    }
