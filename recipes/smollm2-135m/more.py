"""Further prompts of the shipped draft: those not answered yet, and all but mathematics once more, to be sampled.

    python more.py train-prompts.jsonl prompts-1.jsonl answers-1.jsonl prompts-2.jsonl answers-2.jsonl \\
        prompts-3.jsonl prompts-4.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from mix import mixed


def lines_of(file: str) -> list[str]:
    """Only newlines end a line: texts hold other separators."""
    return Path(file).read_text(encoding="utf-8").strip("\n").split("\n")


def answered(prompts: str, answers: str) -> set[str]:
    """The prompts that have an answer; ids are "line.turn"."""
    lines = lines_of(prompts)
    return {lines[int(json.loads(answer)["id"].partition(".")[0])] for answer in lines_of(answers)}


def maths(line: str) -> bool:
    """Whether a prompt is of GSM8K."""
    return str(json.loads(line)["source"]).startswith("gsm8k")


def main(source: str, *files: str) -> None:
    """Write what is not answered yet, and what is to be sampled."""
    everything = mixed(lines_of(source))
    done = answered(*files[:2]) | answered(*files[2:4])
    left = [line for line in everything if line not in done]
    fresh = [line for line in left if not maths(line)][:256] + [line for line in left if maths(line)][:1024]
    again = [line for line in everything if not maths(line)]
    random.Random(1).shuffle(again)
    for output, lines in zip(files[4:], (fresh, again[:1400]), strict=True):
        Path(output).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
