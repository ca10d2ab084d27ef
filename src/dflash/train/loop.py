"""The training loop: one process, or several that share each step's sequences."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash import jsontext
from dflash.backends.torch.draft import DFlashDraftModel
from dflash.backends.torch.head import rows_of
from dflash.backends.torch.target import TorchTarget
from dflash.errors import DFlashError, ProcessLost, RequestError
from dflash.train import checkpoint
from dflash.train.begun import RUN, check_output, check_same, latest, step_of
from dflash.train.blocks import Batch, block_states, layer_over_context, recomputed
from dflash.train.data import Corpus, Plan, Sequence
from dflash.train.evaluate import Acceptance, measure
from dflash.train.features import Features, padded
from dflash.train.files import write
from dflash.train.loss import dpace_weights, exponential_weights, slot_losses
from dflash.train.mix import LossMix
from dflash.train.processes import Processes
from dflash.train.recipe import Recipe
from dflash.train.scalars import scalars
from dflash.train.schedule import rate
from dflash.train.teacher import check_teacher
from dflash.train.whole import whole

PATIENCE = 10
"""Steps in a row whose loss or gradient is not finite before the run is ended."""


@dataclass
class Progress:
    """How far a run is; the figures are means since the last report."""

    step: int
    steps: int
    loss: float = 0.0
    acceptance: float = 0.0
    blocks_per_second: float = 0.0
    rate: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    measured: Acceptance | None = None


class Learner(nn.Module):
    """The draft with its loss: what several processes share."""

    def __init__(self, draft: DFlashDraftModel, target: TorchTarget, recipe: Recipe, vocabulary: Tensor | None) -> None:
        super().__init__()
        self.draft = draft
        self.recipe = recipe
        self.mix = LossMix.parse(recipe.loss)
        self.block_size = draft.config.block_size
        # Kept out of the module tree: the target is not trained, and not copied to other processes.
        self._target = [target]
        device = target.device
        size = target.vocab_size
        rows = torch.arange(size) if vocabulary is None else vocabulary
        index = torch.zeros(size, dtype=torch.long)
        index[rows] = torch.arange(len(rows))
        self.index: Tensor = index.to(device)
        self.rows = None if vocabulary is None else rows.to(device)
        slots = self.block_size - 1
        decay = recipe.decay_of(self.block_size)
        self.slot_weights = exponential_weights(slots, decay).to(device)
        if recipe.weights == "uniform":
            self.slot_weights = torch.ones(slots, device=device)
        self._run_layer: Callable[..., Tensor] = recomputed if recipe.recompute else layer_over_context
        self._slot_losses: Callable[..., tuple[Tensor, Tensor, Tensor]] = slot_losses
        if recipe.compile:
            # Lengths differ from step to step: sizes are kept symbolic, so that nothing is compiled twice.
            self._run_layer = torch.compile(layer_over_context, dynamic=True)
            self._slot_losses = torch.compile(slot_losses, dynamic=True)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the weighted losses of a batch, and the sum of its blocks' accepted slots plus one (detached)."""
        embedding = self._target[0].anatomy.embedding.weight
        states = block_states(self.draft, embedding, batch, self.block_size, self._run_layer)
        there = (batch.weights > 0).float()
        labels = self.index[batch.labels(self.block_size)]
        teacher, head = None, self._head(batch.others)
        if self.mix.needs_teacher:
            with torch.no_grad():
                teacher = self._target[0].logits(batch.teachers(self.block_size), head)
        scores = self.draft.logits(states, head)
        loss, probability, right = self._slot_losses(scores, labels, teacher, self.mix, self._shift(batch.others))
        weights = dpace_weights(probability * there) if self.recipe.weights == "dpace" else self.slot_weights
        accepted = 1 + (right * there).cumprod(-1).sum(-1)
        return (loss * weights * there).sum(), (accepted * there[..., 0]).sum()

    def _shift(self, others: Tensor | None) -> Tensor | None:
        """Each of the others stands for as many as it was drawn from: sampled softmax (Jean et al. 2015)."""
        if others is None or self.rows is None:
            return None
        shift = torch.zeros(len(self.rows) + len(others), device=others.device)
        shift[len(self.rows) :] = math.log((self._target[0].vocab_size - len(self.rows)) / len(others))
        return shift

    def _head(self, others: Tensor | None) -> nn.Module:
        """The target's head, for the rows of the vocabulary and the others."""
        head = self._target[0].anatomy.head
        if self.rows is None:
            return head
        return rows_of(head, self.rows if others is None else torch.cat([self.rows, others]))


class Trainer:
    """A run. Files of ``output``: ``checkpoints/``, ``log.jsonl``, ``run.json``, and ``tensorboard/`` if installed."""

    def __init__(
        self,
        draft: DFlashDraftModel,
        target: TorchTarget,
        corpus: Corpus,
        features: Features,
        recipe: Recipe,
        output: Path,
        resume: bool = False,
    ) -> None:
        """
        Raises:
            RequestError: ``output`` already holds a run and ``resume`` is not set, or holds another one; or a step has
                fewer sequences than there are processes.
            UnsupportedTarget: a loss needs the target's scores, and they cannot be computed from its hidden states.
        """
        self.draft, self.target, self.corpus, self.features = draft, target, corpus, features
        self.recipe, self.output = recipe, output
        self.processes = Processes.join(target.device)
        share = min(recipe.sequences, len(corpus.train))
        if share < self.processes.world:  # one without a sequence would keep the others waiting for its gradients
            raise RequestError(
                f"a step of {share} answers cannot be shared by {self.processes.world} processes: start fewer, "
                "or give more --data and --sequences"
            )
        vocabulary = corpus.vocabulary() if recipe.vocabulary == "reduced" else None
        if LossMix.parse(recipe.loss).needs_teacher:
            answer = corpus.train[0]
            check_teacher(target, answer.ids[answer.prompt :], vocabulary)
        draft.train().requires_grad_(True)
        target.model.requires_grad_(False)
        self.learner = Learner(draft, target, recipe, vocabulary)
        self.parallel: nn.Module = self.learner
        if self.processes.world > 1:
            with self.processes.exchanging():
                self.parallel = nn.parallel.DistributedDataParallel(self.learner)
        self._outside = torch.empty(0, dtype=torch.long)
        if vocabulary is not None:
            outside = torch.ones(target.vocab_size, dtype=torch.bool)
            outside[vocabulary] = False
            self._outside = outside.nonzero()[:, 0]
        self.optimizers = make_optimizers(draft, recipe)
        self.plan = Plan([len(s.ids) for s in corpus.train], recipe.sequences, recipe.anchors, recipe.seed)
        self.step = 0
        self.spent = {"seconds": 0.0, "blocks": 0.0}
        self._skipped = 0
        self._clock = time.perf_counter()
        self._begin(resume)
        self._scalars = scalars(self.output / "tensorboard", self.step) if self.processes.first else None

    def _begin(self, resume: bool) -> None:
        run = {
            "recipe": asdict(self.recipe),
            "draft": self.draft.config.to_published(),
            "answers": self.corpus.digest,
            "target": self.features.identity,
        }
        check_output(self.output, resume)
        last = latest(self.output / "checkpoints")
        if resume and last is not None:
            check_same(self.output, json.loads(json.dumps(run)))
            restored = checkpoint.restore(last, self.draft, self.optimizers)
            self.step, self.spent = restored["step"], restored["spent"]
        # Nothing is written before every process has looked.
        if self.processes.total(self.step) != self.step * self.processes.world:
            raise RequestError(
                f"{self.output} must be one folder to all processes: they found different checkpoints there"
            )
        if self.step:
            self._cut_log()
        elif self.processes.first:
            self.output.mkdir(parents=True, exist_ok=True)
            write(self.output / RUN, json.dumps(run, indent=2) + "\n")
            (self.output / "log.jsonl").write_text("", encoding="utf-8")

    def _cut_log(self) -> None:
        """Drop what was logged after the checkpoint: those steps are taken again."""
        file = self.output / "log.jsonl"
        if self.processes.first and file.is_file():
            kept = [record for record in read_log(file) if record["step"] <= self.step]
            write(file, "".join(json.dumps(record) + "\n" for record in kept))

    def run(
        self,
        *,
        log_every: int = 50,
        measure_every: int = 500,
        save_every: int = 500,
        until: int | None = None,
        report: Callable[[Progress], None] = lambda progress: None,
    ) -> Progress:
        """Train to the last step (or to ``until``), measuring and saving at intervals.

        Interrupted (KeyboardInterrupt), or left by another process, the last whole step is saved.

        Args:
            report: called at the start and after every step.

        Raises:
            ProcessLost: of several processes, another one has ended.
        """
        try:
            with self.processes.exchanging():
                return self._run(log_every, measure_every, save_every, until, report)
        except (KeyboardInterrupt, ProcessLost) as end:
            with whole():  # a second signal waits until what was done is kept
                self._count_time()
                if self.step:
                    self.save()
            if isinstance(end, ProcessLost):
                raise ProcessLost(self._left()) from end
            raise

    def _left(self) -> str:
        """What a run is left with where another process has ended, and how to go on."""
        last = latest(self.output / "checkpoints")
        told = "another process of this run has ended (see why it did)"
        if last is None:
            return f"{told} before the end of the first step: begin again with the same command"
        return f"{told}; step {step_of(last)} is saved in {last}: go on with the same command and --resume"

    def _run(
        self,
        log_every: int,
        measure_every: int,
        save_every: int,
        until: int | None,
        report: Callable[[Progress], None],
    ) -> Progress:
        progress = Progress(self.step, self.recipe.steps)
        end = min(self.recipe.steps, until or self.recipe.steps)
        totals = {"loss": 0.0, "slots": 0.0, "accepted": 0.0, "blocks": 0.0}
        seconds = dict.fromkeys(("data", "compute", "update"), 0.0)
        report(progress)
        self._clock = time.perf_counter()
        while self.step < end:
            self.take_step(totals, seconds)
            logs, measures = self._due(log_every), self._due(measure_every)
            if logs:
                progress = self._progress(totals, dict(seconds), self._count_time())
                totals, seconds = dict.fromkeys(totals, 0.0), dict.fromkeys(seconds, 0.0)
                self._log({k: v for k, v in asdict(progress).items() if k not in ("steps", "measured")})
            if measures and self.corpus.held_out and self.processes.first:
                progress.measured = self.measure()
                self._log({"step": self.step, "measured": asdict(progress.measured)})
            if self._due(save_every):
                self.save()
            if logs:
                self._clock = time.perf_counter()
            progress.step = self.step
            report(progress)
        return progress

    def _count_time(self) -> float:
        """Add the seconds since the last call to those spent, and return them."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.spent["seconds"] += seconds
        return seconds

    def save(self) -> None:
        """Write a checkpoint of the last whole step, unless it is there, or that step and those before it failed."""
        folder = self.output / "checkpoints"
        if self.processes.first and not self._skipped and step_of(latest(folder)) != self.step:
            with whole():
                checkpoint.save(folder, self.step, self.draft, self.optimizers, self.spent)

    def measure(self) -> Acceptance:
        """Acceptance on the held-out answers."""
        with self._autocast():
            return measure(self.draft, self.target, self.corpus.held_out, self.features, self.learner.block_size)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.recipe.steps

    def take_step(self, totals: dict[str, float], seconds: dict[str, float]) -> None:
        """Forward and back over this process's share of the step's sequences, then one update.

        Args:
            totals: to add to: "loss", "slots", "accepted" (summed over blocks), "blocks".
            seconds: to add to: "data", "compute", "update".
        """
        clock = time.perf_counter()
        chosen = self.plan.sequences(self.step)
        drawn = {i: self.plan.draw(self.step, i, self.corpus.train[i].anchors) for i in chosen}
        mine = chosen[self.processes.rank :: self.processes.world]
        parts = [part for part in (mine[i :: self.recipe.accumulate] for i in range(self.recipe.accumulate)) if part]
        slots = sum(self._slots(self.corpus.train[i], anchors) for i, anchors in drawn.items())
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for n, part in enumerate(parts):
            batch = self._batch(part, drawn)
            seconds["data"] += time.perf_counter() - clock
            clock = time.perf_counter()
            last = n == len(parts) - 1
            together = self.parallel.no_sync() if not last and self.processes.world > 1 else contextlib.nullcontext()  # type: ignore[operator]
            with together:
                with self._autocast():
                    loss, accepted = self.parallel(batch)
                # DDP takes the mean over processes; the loss is the mean over all slots of the step.
                (loss * self.processes.world / slots).backward()
            loss_sum += loss.item()
            totals["accepted"] += accepted.item()
            seconds["compute"] += time.perf_counter() - clock
            clock = time.perf_counter()
        norm = float(nn.utils.clip_grad_norm_(self.draft.parameters(), self.recipe.clip))
        sound = math.isfinite(norm) and math.isfinite(loss_sum)
        sound = self.processes.total(float(not sound)) == 0  # asked here: a signal must end a wait for other processes
        with whole():  # weights, optimisers and the number of the step belong together
            self._update(sound)
            if not self._skipped:
                totals["loss"] += loss_sum
                totals["slots"] += slots / self.processes.world
            totals["blocks"] += sum(len(drawn[i]) for i in mine)
            self.spent["blocks"] += sum(map(len, drawn.values()))
            seconds["update"] += time.perf_counter() - clock
            self.step += 1

    def _update(self, finite: bool) -> None:
        """One step of the optimisers; a step that is not finite is left out, several in a row end the run.

        Args:
            finite: whether loss and gradient are, in every process.
        """
        if not finite:
            self._skipped += 1
            self._log({"step": self.step, "skipped": "loss or gradient is not finite"})
            if self._skipped >= PATIENCE:
                raise DFlashError(
                    f"loss or gradient was not finite in {PATIENCE} steps in a row; the last good checkpoint is kept "
                    f"in {self.output / 'checkpoints'}: lower the learning rate"
                )
            return
        self._skipped = 0
        share = rate(self.recipe.schedule, self.step, self.recipe.steps, self.recipe.warmup, self.recipe.decay)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["peak"]
            optimizer.step()

    def _slots(self, sequence: Sequence, anchors: list[int]) -> int:
        return sum(min(self.learner.block_size - 1, len(sequence.ids) - 1 - anchor) for anchor in anchors)

    def _batch(self, part: list[int], drawn: dict[int, list[int]]) -> Batch:
        """Sequences padded to the longest and a little more, blocks to the most; what is padded has weight 0."""
        sequences = [self.corpus.train[i] for i in part]
        length, blocks = padded(max(len(s.ids) for s in sequences)), max(len(drawn[i]) for i in part)
        loaded = [self.features.of(s) for s in sequences]
        device, slots = self.target.device, torch.arange(1, self.learner.block_size)
        width = loaded[0][0].shape[1]
        tokens = torch.zeros(len(part), length, dtype=torch.long)
        taps = loaded[0][0].new_zeros(len(part), length, width)
        final = None if loaded[0][1] is None else loaded[0][1].new_zeros(len(part), length, self.target.hidden_size)
        anchors = torch.zeros(len(part), blocks, dtype=torch.long)
        weights = torch.zeros(len(part), blocks, self.learner.block_size - 1)
        for row, (i, sequence) in enumerate(zip(part, sequences, strict=True)):
            n, count = len(sequence.ids), len(drawn[i])
            tokens[row, :n] = torch.tensor(sequence.ids)
            taps[row, :n] = loaded[row][0]
            own = loaded[row][1]
            if final is not None and own is not None:
                final[row, :n] = own
            anchors[row, :count] = torch.tensor(drawn[i])
            anchors[row, count:] = sequence.prompt
            weights[row, :count] = (anchors[row, :count, None] + slots < n).float()
        final = None if final is None else final.to(device)
        others = None
        if self.recipe.others and len(self._outside):
            others = self.plan.others(self.step, self._outside, self.recipe.others).to(device)
        return Batch(tokens.to(device), taps.to(device), anchors.to(device), weights.to(device), final, others)

    def _autocast(self) -> Any:
        enabled = self.recipe.precision == "bf16"
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=enabled)

    def _progress(self, totals: dict[str, float], seconds: dict[str, float], spent: float) -> Progress:
        blocks = max(totals["blocks"], 1.0)
        return Progress(
            step=self.step,
            steps=self.recipe.steps,
            loss=totals["loss"] / max(totals["slots"], 1.0),
            acceptance=totals["accepted"] / blocks,
            blocks_per_second=blocks * self.processes.world / spent,
            rate=rate(self.recipe.schedule, self.step - 1, self.recipe.steps, self.recipe.warmup, self.recipe.decay),
            seconds=seconds,
        )

    def _log(self, record: dict[str, Any]) -> None:
        if self.processes.first:
            with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            if self._scalars is not None:
                self._scalars.write(record)


def read_log(file: Path) -> list[dict[str, Any]]:
    """The records of a ``log.jsonl``; what a kill left of a line is left out."""
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = jsontext.parse(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def make_optimizers(draft: DFlashDraftModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for all; or Muon for the layers' matrices and AdamW for the rest."""
    matrices = [p for n, p in draft.named_parameters() if p.ndim == 2 and n != "fc.weight"]
    rest = [p for n, p in draft.named_parameters() if p.ndim != 2 or n == "fc.weight"]
    made: list[torch.optim.Optimizer] = []
    if recipe.optimizer == "muon":
        muon = getattr(torch.optim, "Muon", None)
        if muon is None:
            raise RequestError(f"torch {torch.__version__} has no Muon: use --optimizer adamw, or torch 2.9 or later")
        made.append(muon(matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay))
        matrices = []
    made.append(
        torch.optim.AdamW(
            [*matrices, *rest],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=True,  # one pass over the weights instead of ten
        )
    )
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made
