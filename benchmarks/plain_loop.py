"""Plain decoding: our loop against transformers' own ``generate``, side by side in one process.

    python benchmarks/plain_loop.py --max-new-tokens 64 --repeats 5 --output plain_loop.json

Same model object, dtype and prompts, greedy, both stop at EOS. The runs alternate, so that what else the
machine does hits both, and the ratio ours / theirs is taken pair by pair; times alone mean nothing
elsewhere. In float32 the tokens must be identical, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import dflash
from dflash.checkpoint import DEFAULT_MODEL
from dflash.text import encode_prompt

PROMPTS = (
    "Why is the sky blue?",
    "A book costs 4 dollars. How much do 12 books cost?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
)


@dataclass(frozen=True)
class Pair:
    """One prompt run both ways, one right after the other.

    Attributes:
        ours, theirs: tokens per second of the whole call, prefill included.
    """

    prompt: str
    repeat: int
    tokens: int
    ours: float
    theirs: float
    identical: bool

    @property
    def ratio(self) -> float:
        """Above 1 ours is faster."""
        return self.ours / self.theirs


def main() -> int:
    """Run, print, record. 1 if the tokens differ in float32."""
    options = _options()
    transformers.utils.logging.disable_progress_bar()
    target = dflash.load(options.model, dtype=options.dtype)
    pairs: list[Pair] = []
    for repeat in range(-1, options.repeats):  # the first time around warms up
        for i, prompt in enumerate(PROMPTS):
            pair = _measure(target, prompt, options.max_new_tokens, repeat, ours_first=(repeat + i) % 2 == 0)
            if repeat >= 0:
                pairs.append(pair)
                print(_line(pair), flush=True)
    ratios = sorted(pair.ratio for pair in pairs)
    best = statistics.median(_best_ratio([pair for pair in pairs if pair.prompt == prompt]) for prompt in PROMPTS)
    record = {
        "model": target.name,
        "dtype": str(target.model.dtype),
        "device": str(target.model.device),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dflash": dflash.__version__,
        "max_new_tokens": options.max_new_tokens,
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "ratio_of_best": best,
        "identical": all(pair.identical for pair in pairs),
        "pairs": [asdict(pair) for pair in pairs],
    }
    print(
        f"our loop / transformers' generate, tok/s: median {record['ratio_median']:.3f} "
        f"(min {ratios[0]:.3f}, max {ratios[-1]:.3f}, {len(ratios)} pairs), of the best runs {best:.3f}; "
        f"tokens identical: {'yes' if record['identical'] else 'NO'}"
    )
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if target.model.dtype == torch.float32 and not record["identical"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


def _measure(target: Any, prompt: str, max_new_tokens: int, repeat: int, ours_first: bool) -> Pair:
    ids = encode_prompt(target.tokenizer, [{"role": "user", "content": prompt}])

    def ours() -> list[int]:
        return dflash.generate(target, None, target.tokenizer, ids, max_tokens=max_new_tokens).tokens

    def theirs() -> list[int]:
        prompt_ids = torch.tensor([ids], device=target.model.device)
        out = target.model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(target.eos_ids),
            pad_token_id=min(target.eos_ids, default=0),
        )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    runs = {"ours": ours, "theirs": theirs}
    order = ("ours", "theirs") if ours_first else ("theirs", "ours")
    timed = {name: _timed(runs[name]) for name in order}
    (one, one_seconds), (other, other_seconds) = timed["ours"], timed["theirs"]
    return Pair(prompt, repeat, len(one), len(one) / one_seconds, len(other) / other_seconds, one == other)


def _best_ratio(pairs: list[Pair]) -> float:
    """Of each one's fastest run of a prompt: what a busy machine disturbs least."""
    return max(pair.ours for pair in pairs) / max(pair.theirs for pair in pairs)


def _timed(run: Callable[[], list[int]]) -> tuple[list[int], float]:
    start = time.perf_counter()
    tokens = run()
    return tokens, time.perf_counter() - start


def _line(pair: Pair) -> str:
    same = "identical" if pair.identical else "DIFFERENT"
    return (
        f"{pair.repeat}  {pair.prompt[:40]:<40}  {pair.tokens:4d} tokens  ours {pair.ours:6.1f}  "
        f"transformers {pair.theirs:6.1f} tok/s  ratio {pair.ratio:.3f}  {same}"
    )


if __name__ == "__main__":
    sys.exit(main())
