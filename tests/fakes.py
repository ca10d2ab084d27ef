"""Drafters with a known record, for any backend: they propose lists of token ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from dflash.protocols import NOTHING, Features, Proposal, Target
from dflash.sampling import SamplingParams

Choose = Callable[[list[int], int], list[int]]
"""(the true continuation, round number) -> what to propose."""


class OracleDrafter:
    """Knows how each row goes on, and proposes what ``choose`` makes of that.

    Attributes:
        contexts: after every round, how many tokens each row's drafter knows (D14).
    """

    taps: tuple[int, ...] = ()

    def __init__(self, block_size: int, texts: Sequence[list[int]], choose: Choose) -> None:
        """``texts``: prompt and greedy answer of each row."""
        self.block_size = block_size
        self.texts = list(texts)
        self.choose = choose
        self.contexts: list[list[int]] = []
        self.proposals = 0

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> OracleDrafter:
        self.known: list[list[int]] = [[] for _ in self.texts]
        self.round = 0
        return self

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        assert [len(new) for new in tokens] == features.counts
        for known, new in zip(self.known, tokens, strict=True):
            known += new
        self.contexts.append([len(known) for known in self.known])

    def propose(self, pending: list[int], room: int) -> Proposal:
        self.proposals += 1
        rows = []
        for text, known, token in zip(self.texts, self.known, pending, strict=True):
            assert text[: len(known) + 1] == [*known, token], "the drafter was told another text than the target's own"
            after = text[len(known) + 1 : len(known) + 1 + room]
            rows.append(self.choose(after + [0] * (room - len(after)), self.round))
        self.round += 1
        return Proposal(rows, room) if room else NOTHING

    def select(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.known = [self.known[row] for row in rows]


def perfect(truth: list[int], round_number: int) -> list[int]:
    """Always right."""
    return truth


def hostile(truth: list[int], round_number: int) -> list[int]:
    """Always wrong, at every place."""
    return [(token + 1) % 64 for token in truth]


def scripted(*accepted: int) -> Choose:
    """Right for exactly that many tokens, round by round, then from the start again."""
    script = list(itertools.chain(accepted))

    def choose(truth: list[int], round_number: int) -> list[int]:
        right = script[round_number % len(script)]
        return truth[:right] + hostile(truth[right:], round_number)

    return choose


def at_random(seed: int) -> Choose:
    """Any token; sometimes right."""
    generator = random.Random(seed)

    def choose(truth: list[int], round_number: int) -> list[int]:
        return [t if generator.random() < 0.5 else generator.randrange(64) for t in truth]

    return choose
