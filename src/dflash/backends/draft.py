"""What the drafts of all backends have in common: what they say of themselves, none of what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.draft_config import DFlashConfig

_EVERYWHERE = 2**30
"""More positions than any text has."""


def in_sight(query: Any, key: Any, window: int | None, causal: bool) -> Any:
    """Whether a layer lets queries look at keys, by their positions: arrays of any framework that broadcast.

    A window reaches as far ahead as back, where the layer is not causal: inside the block, its positions after.

    Args:
        window: positions it reaches, the query's own included; None for all.

    Returns:
        Bool, of the broadcast shape.
    """
    reach = _EVERYWHERE if window is None else window
    ahead = key - query
    return (ahead > -reach) & (ahead < (1 if causal else reach))


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
