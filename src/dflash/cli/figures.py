"""How a generation went, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dflash.generate import Generation

BAR_WIDTH = 30
_EIGHTHS = " ▏▎▍▌▋▊▉"


def summary(answer: Generation, drafter: str, block_size: int) -> str:
    """Speeds and acceptance in a line."""
    parts = [f"{answer.prompt_tokens} prompt tokens at {answer.prompt_tps:,.0f} tok/s"]
    parts.append(f"{answer.generation_tokens} tokens ({answer.finish_reason})")
    if answer.rounds:
        parts[-1] += f" at {answer.generation_tps:,.1f} tok/s"
    if answer.rounds and block_size > 1:
        parts.append(f"{answer.acceptance_length:.2f} tokens a round")
        drafter += f", block {block_size}"
    return f"{', '.join(parts)} ({drafter})"


def histogram(rounds: Sequence[int], block_size: int, unicode: bool = True) -> list[str]:
    """Which share of the rounds gave 1, 2, ... block_size tokens: one line for each number that occurred."""
    counts = Counter(rounds)
    digits = len(str(block_size))
    lines = []
    for tokens in sorted(counts):
        share = counts[tokens] / len(rounds)
        lines.append(f"{tokens:>{digits}} {_bar(share, unicode):<{BAR_WIDTH}} {share:4.0%}")
    return lines


def _bar(share: float, unicode: bool) -> str:
    if not unicode:
        return "#" * round(share * BAR_WIDTH)
    whole, part = divmod(round(share * BAR_WIDTH * 8), 8)
    return "█" * whole + _EIGHTHS[part].strip()
