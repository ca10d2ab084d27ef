"""What the drafts of all backends have in common: what they say of themselves, none of what they compute."""

from __future__ import annotations

import warnings
from pathlib import Path

from dflash.draft_config import DFlashConfig

FRUITLESS = 200
"""Blocks in a row without one accepted token, after which a draft is called no help: a poor one has a few in ten."""


class Record:
    """How the blocks of a draft fare with one target, over all requests. Says once when they bring nothing.

    Args:
        draft, target: their names, for the message.
    """

    def __init__(self, draft: str, target: str) -> None:
        self._names = draft, target
        self._fruitless = 0
        self._said = False

    def came(self, tokens: list[list[int]]) -> None:
        """The tokens that each row was given after a block of the draft: the target's own, and the accepted ones."""
        if any(len(new) > 1 for new in tokens):
            self._fruitless = 0
            return
        self._fruitless += len(tokens)
        if self._fruitless >= FRUITLESS and not self._said:
            self._said = True
            draft, target = self._names
            warnings.warn(
                f"none of the last {self._fruitless} blocks of draft {draft} had a token that {target} accepted, so it "
                "only costs time: check that it was made for this target, for the thinking mode in use "
                "(enable_thinking), and that it runs in the dtype it was trained in",
                stacklevel=4,
            )


class PublishedDraft:
    """A draft made as a config says.

    Attributes:
        config: see ``DFlashConfig``.
        path: the folder it was loaded from, None for one made in memory.
        sliding_window_size: committed positions the draft may look back on; None for all.
        min_confidence: a block ends where the draft itself gives the run of its best tokens less than this
            probability. The first token is always proposed; 0 proposes whole blocks, and then nothing waits for it.
    """

    config: DFlashConfig
    path: Path | None
    sliding_window_size: int | None
    min_confidence: float

    @property
    def name(self) -> str:
        """For messages."""
        return self.path.name if self.path is not None else type(self).__name__

    @property
    def block_size(self) -> int:
        """As trained."""
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it reads."""
        return self.config.target_layer_ids

    def windows(self) -> list[tuple[int | None, bool]]:
        """For each layer: its window and whether it is causal inside the block."""
        window = self.config.sliding_window
        return [
            (window if kind == "sliding_attention" else None, causal)
            for kind, causal in zip(self.config.layer_types, self.config.causal, strict=True)
        ]

    def lookback(self, window: int | None) -> int | None:
        """Slots that a layer with this window needs: its own or the user's bound, whichever is less."""
        bound = None if self.sliding_window_size is None else self.sliding_window_size + 1
        return min((size for size in (window, bound) if size is not None), default=None)
