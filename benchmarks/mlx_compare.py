"""Ours against mlx-lm's own ``stream_generate``, side by side in one process: speed-up, acceptance, same tokens.

    python benchmarks/mlx_compare.py --model mlx-community/Qwen3-8B-4bit --draft z-lab/Qwen3-8B-DFlash-b16

Same weights, dtype and prompts; both stop at the end of the answer. The runs alternate, so that what else the
machine does hits both, and the ratio is taken pair by pair; times alone mean nothing elsewhere. In float32 greedy
tokens must be identical, or the exit status is 1. In bfloat16 and float16, and in quantized models, a block and a
single token are rounded differently, and near-ties can fall the other way: `dflash verify --backend mlx` judges them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

import dflash
from dflash.checkpoint import DEFAULT_MODEL, shipped_draft
from dflash.generate import DraftLike
from dflash.model_mlx import load, load_draft, stream_generate
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
        ours, theirs: tokens a second of decoding, after the first token.
        acceptance: our tokens a round.
    """

    prompt: str
    repeat: int
    tokens: int
    ours: float
    theirs: float
    acceptance: float
    identical: bool

    @property
    def ratio(self) -> float:
        """Above 1 ours is faster."""
        return self.ours / self.theirs


def main() -> int:
    """Run, print, record. 1 if the tokens differ in float32."""
    options = _options()
    model = load(options.model, options.dtype)
    draft = _draft(options)
    prompts = options.prompt or list(PROMPTS)
    _pair(model, draft, prompts[0], 0, 4, options.block_size)  # warm both up
    pairs = []
    for repeat in range(options.repeats):
        for prompt in prompts:
            pairs.append(_pair(model, draft, prompt, repeat, options.max_new_tokens, options.block_size))
            print(_line(pairs[-1]))
    ratios = sorted(pair.ratio for pair in pairs)
    same = sum(pair.identical for pair in pairs)
    print(
        f"speed-up {statistics.median(ratios):.2f} (median of {len(pairs)}, {ratios[0]:.2f} to {ratios[-1]:.2f}), "
        f"{statistics.mean(pair.acceptance for pair in pairs):.2f} tokens a round, "
        f"identical tokens in {same} of {len(pairs)}, {model.dtype}"
    )
    if options.output is not None:
        options.output.write_text(json.dumps(_record(options, model, pairs), indent=1) + "\n")
    return 1 if model.dtype == "float32" and same < len(pairs) else 0


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft", help="a DFlash draft for the model")
    parser.add_argument("--draft-bits", type=int, help="quantize the draft to 4 or 8 bits")
    parser.add_argument(
        "--drafter",
        choices=["ngram", "none"],
        help="who drafts without --draft; by default the draft that ships for the model, else ngram",
    )
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; by default the checkpoint's, float32 on CPU")
    parser.add_argument("--prompt", action="append")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a json file for the record")
    return parser.parse_args()


def _draft(options: Any) -> DraftLike:
    """The draft that was named, or the drafter; said neither, the draft that ships for the model, else n-grams."""
    named = options.draft
    if named is None and options.drafter is None:
        named = shipped_draft(options.model)
    if named is None:
        drafter: str = options.drafter or "ngram"
        return drafter
    return load_draft(named, dtype=options.dtype, bits=options.draft_bits)


def _pair(model: Any, draft: DraftLike, prompt: str, repeat: int, most: int, block_size: int | None) -> Pair:
    ids = encode_prompt(model.tokenizer, [{"role": "user", "content": prompt}])
    theirs, their_tps = _theirs(model, ids, most)
    responses = list(stream_generate(model, draft, None, ids, block_size, most))
    ours = [token for response in responses for token in response.tokens]
    rounds = len(responses) - 1
    return Pair(
        prompt=prompt,
        repeat=repeat,
        tokens=len(ours),
        ours=responses[-1].generation_tps,
        theirs=their_tps,
        acceptance=(len(ours) - 1) / rounds if rounds else 1.0,
        # mlx-lm stops before the token that ends the answer, and does not give it.
        identical=[token for token in ours if token not in model.eos_ids] == theirs,
    )


def _theirs(model: Any, ids: list[int], most: int) -> tuple[list[int], float]:
    """mlx-lm's tokens without the one that ends the answer, and its tokens a second after the first."""
    tokenizer = mlx_lm.tokenizer_utils.TokenizerWrapper(model.tokenizer, eos_token_ids=sorted(model.eos_ids))
    tokens, first = [], time.perf_counter()
    for number, response in enumerate(mlx_lm.stream_generate(model.model, tokenizer, ids, max_tokens=most)):
        first = time.perf_counter() if number == 0 else first
        if response.token not in model.eos_ids:
            tokens.append(response.token)
    spent = time.perf_counter() - first
    return tokens, max(len(tokens) - 1, 1) / spent


def _line(pair: Pair) -> str:
    verdict = "same tokens" if pair.identical else "DIFFERENT tokens"
    return (
        f"{pair.ratio:5.2f}x  {pair.ours:6.1f} against {pair.theirs:6.1f} tok/s, {pair.acceptance:.2f} a round, "
        f"{pair.tokens} tokens, {verdict}: {pair.prompt[:40]}"
    )


def _record(options: Any, model: Any, pairs: list[Pair]) -> dict[str, Any]:
    return {
        "options": {name: str(value) for name, value in vars(options).items() if value is not None},
        "machine": {"system": platform.platform(), "device": mx.device_info()},
        "versions": {"dflash": dflash.__version__, "mlx": mx.__version__, "mlx_lm": mlx_lm.__version__},
        "dtype": model.dtype,
        "pairs": [{**asdict(pair), "ratio": pair.ratio} for pair in pairs],
    }


if __name__ == "__main__":
    sys.exit(main())
