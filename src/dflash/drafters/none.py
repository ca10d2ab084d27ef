"""The plain autoregressive baseline: the same loop, with a drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from dflash.protocols import NOTHING, Features, Proposal, Target
from dflash.sampling import SamplingParams


class NoDrafter:
    """Proposes nothing, so that every round yields one token: plain decoding."""

    block_size = 1
    taps: tuple[int, ...] = ()

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> NoDrafter:
        """There is nothing to set up."""
        return self

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        """Tokens do not matter to it."""

    def propose(self, pending: list[int], room: int) -> Proposal:
        """Nothing."""
        return NOTHING

    def select(self, rows: list[int]) -> None:
        """It keeps no state."""
