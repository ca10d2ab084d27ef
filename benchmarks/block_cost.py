"""What a block costs to check: the target's forward by the number of its tokens, and the head's share of it.

    python benchmarks/block_cost.py --dtype float32 --output block_cost.json

The widths take turns, so that what else the machine does hits all alike; medians, and their ratio to one token.
Where 8 tokens cost what one does, whole blocks are worth checking; where they cost more, a smaller ``--block-size`` or
a larger ``--draft-min-confidence`` may pay. On a CPU in float32 the head is also timed as torch has it and as it is
arranged here (``backends/torch/head.py``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

import dflash
from dflash.backends.torch.head import PackedHead, arranged
from dflash.checkpoint import DEFAULT_MODEL
from dflash.protocols import Proposal


def main() -> None:
    """Run, print, record."""
    options = _options()
    transformers.utils.logging.disable_progress_bar()
    target: Any = dflash.load(options.model, backend="torch", dtype=options.dtype)
    tokens = torch.randint(target.vocab_size, (options.context,), generator=torch.Generator().manual_seed(0)).tolist()
    session = target.start(1, (), max(options.widths), 512)
    session.prefill([tokens], lambda tokens, features: None)

    def check(width: int) -> Callable[[], Any]:
        proposal = Proposal([tokens[: width - 1]], width - 1)

        def run() -> None:
            with session.verify(tokens[-1:], proposal) as ahead:
                ahead.scores.amax().item()  # waits for the device

        return run

    times = _medians({f"forward {width}": check(width) for width in options.widths}, options.repeats)
    head = target.anatomy.head
    if isinstance(head, PackedHead):
        states = {width: torch.randn(1, width, target.hidden_size) for width in options.widths}
        for width, x in states.items():
            runs = {
                f"head {width}": lambda x=x: head(x),
                f"plain head {width}": lambda x=x: F.linear(x, head.weight, head.bias),
            }
            times |= _medians(runs, options.repeats)
    record = {
        "model": target.name, "dtype": target.dtype, "device": str(target.device), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__, "dflash": dflash.__version__,
        "context": options.context, "repeats": options.repeats, "milliseconds": times,
    }  # fmt: skip
    _show(times, options.widths)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


def _medians(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each, taken in turns; the first turn warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for turn in range(-1, repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                with arranged():
                    run()
                if turn >= 0:
                    taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(times), 2) for name, times in taken.items()}


def _show(times: dict[str, float], widths: list[int]) -> None:
    heads = [name for name in ("head", "plain head") if f"{name} {widths[0]}" in times]
    first = f"{widths[0]} token" + "s" * (widths[0] > 1)
    print("tokens  forward ms", f" of {first}", *(f" {name} ms" for name in heads))
    for width in widths:
        forward = times[f"forward {width}"]
        shares = "".join(f"{times[f'{name} {width}']:{len(name) + 5}.1f}" for name in heads)
        print(f"{width:6d}  {forward:10.1f}  {forward / times[f'forward {widths[0]}']:{len(first) + 3}.2f}x{shares}")


if __name__ == "__main__":
    main()
