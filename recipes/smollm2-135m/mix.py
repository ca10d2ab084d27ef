"""The prompts of the shipped draft, mixed: three of mathematics to two of anything else, as long as both last.

python mix.py train-prompts.jsonl prompts-1.jsonl prompts-2.jsonl     # one output for each process that answers
"""

from __future__ import annotations

import json
import random
import sys
from itertools import zip_longest
from pathlib import Path


def mixed(lines: list[str]) -> list[str]:
    """Shuffled by a fixed seed."""
    dice = random.Random(0)
    maths = [line for line in lines if json.loads(line)["source"].startswith("gsm8k")]
    others = [line for line in lines if not json.loads(line)["source"].startswith("gsm8k")]
    dice.shuffle(maths)
    dice.shuffle(others)
    groups = zip_longest(*[iter(maths)] * 3, *[iter(others)] * 2)
    return [line for group in groups for line in group if line is not None]


def main(source: str, *outputs: str) -> None:
    """Deal the mix out to the outputs, line by line."""
    lines = mixed(Path(source).read_text(encoding="utf-8").strip("\n").split("\n"))
    for i, output in enumerate(outputs):
        Path(output).write_text("\n".join(lines[i :: len(outputs)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
