"""How fast a draft is trained here, how much of the machine that is, and where the time goes.

    python benchmarks/train_throughput.py --data answers.jsonl --cache features --compile

Times steps of the shipped draft's recipe, then profiles some more. The peak is what this machine's matrix products
reach at their best here and now; the arithmetic of a step is counted by torch's own counter.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import dflash
from dflash.train.data import read_corpus
from dflash.train.features import Features
from dflash.train.loop import Trainer
from dflash.train.output import versions
from dflash.train.recipe import Recipe
from dflash.train.run import Shape, make_draft

KINDS = {
    "matrix products": ("::mm", "::bmm", "::addmm", "_mkl", "mkldnn", "extern_kernels"),
    "optimiser": ("fused_adamw", "norm", "foreach", "Optimizer"),
    "copies and casts": ("::copy_", "::cat", "::index", "::gather", "::fill_", "::zero_", "::embedding"),
}
"""Kernels by parts of their names; all else is element by element: norms, rotary positions, activations, softmax."""


def peak(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """The best rate of square matrix products, in floating-point operations a second."""
    best = 0.0
    for size in (512, 1024, 2048):
        a, b = torch.randn(2, size, size).to(dtype)
        a @ b
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            a @ b
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def share_of_kinds(recorded: profile) -> dict[str, float]:
    """Share of the profiled time in each kind of kernel."""
    spent = dict.fromkeys((*KINDS, "element by element"), 0.0)
    for event in recorded.key_averages():
        kind = next((k for k, parts in KINDS.items() if any(part in event.key for part in parts)), "element by element")
        spent[kind] += event.self_cpu_time_total
    return {kind: round(t / sum(spent.values()), 3) for kind, t in spent.items()}


def trainer(options: argparse.Namespace, folder: Path, compile_layers: bool) -> Trainer:
    """A run at its first step."""
    target = dflash.load(options.model, "torch", "bfloat16")
    corpus = read_corpus([options.data], 0, 1024)
    corpus.train[:] = corpus.train[: options.answers]
    recipe = Recipe(
        10**6, options.sequences, options.anchors, weights="dpace", schedule="constant", compile=compile_layers
    )
    draft = make_draft(target, Shape(), 0)
    features = Features(target, draft.config.target_layer_ids, False, options.cache)
    features.prepare(corpus.train)
    return Trainer(draft, target, corpus, features, recipe, folder)


def measure(run: Trainer, steps: int) -> dict[str, Any]:
    """Blocks a second over ``steps`` steps, and the seconds of a step by what was done."""
    totals = dict.fromkeys(("loss", "slots", "accepted", "blocks"), 0.0)
    parts = dict.fromkeys(("data", "compute", "update"), 0.0)
    began = time.perf_counter()
    for _ in range(steps):
        run.take_step(totals, parts)
    spent = time.perf_counter() - began
    return {
        "blocks_per_second": round(totals["blocks"] / spent, 1),
        "seconds_per_step": round(spent / steps, 4),
        "share": {name: round(seconds / spent, 3) for name, seconds in parts.items()},
    }


def operations(run: Trainer) -> float:
    """Floating-point operations of a step's matrix products, forward and back."""
    counter = FlopCounterMode(display=False)
    with counter:
        measure(run, 1)
    return float(counter.get_total_flops())


def main() -> None:
    """Measure and print; the record is written where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="answers of dflash regenerate")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--answers", type=int, default=512, help="of the data, how many to use")
    parser.add_argument("--cache", type=Path, help="for the target's hidden states")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    record: dict[str, Any] = {"threads": torch.get_num_threads(), "cpus": os.cpu_count(), "versions": versions()}
    with tempfile.TemporaryDirectory() as folder:
        # Counted without torch.compile, whose kernels the counter does not see; the arithmetic is the same.
        record["operations_per_step"] = operations(trainer(options, Path(folder) / "counted", False))
        run = trainer(options, Path(folder) / "timed", options.compile)
        measure(run, 20)
        record["peak_bfloat16"] = peak(torch.bfloat16)
        record |= measure(run, options.steps)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            measure(run, 10)
        record["kernels"] = share_of_kinds(recorded)
    achieved = record["operations_per_step"] / record["seconds_per_step"]
    record["share_of_peak"] = round(achieved / record["peak_bfloat16"], 3)
    record["compiled"], record["blocks_per_step"] = options.compile, options.sequences * options.anchors
    print(json.dumps(record, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
