"""What the drafts of all backends have in common: what they say of themselves, none of what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash.draft_config import DFlashConfig
from dflash.protocols import Drafting, Target
from dflash.sampling import SamplingParams


class PublishedDraft:
    """A draft made as a config says, and as such a drafter. ``dflash.load_draft`` gives one of a backend.

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

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> Drafting:
        """See ``protocols.Drafter``. Each backend has its own."""
        raise NotImplementedError

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
