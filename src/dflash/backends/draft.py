"""What the drafts of all backends have in common: what they say of themselves, and who sees whom in a layer."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.compat import check_fit, misfit
from dflash.draft_config import DFlashConfig
from dflash.protocols import Drafting, Target
from dflash.sampling import SamplingParams

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


class PublishedDraft(ABC):
    """A draft made as a config says, and as such a drafter. ``dflash.load_draft`` gives one of a backend.

    Attributes:
        config: see ``DFlashConfig``.
        path: the folder it was loaded from, None for one made in memory.
        sliding_window_size: committed positions the draft may look back on; None for all.
        min_confidence: a block ends where the draft itself gives the run of its best tokens less than this
            probability. The first token is always proposed; 0 proposes whole blocks, and then nothing waits for it.
        copies: tensors of its files that are to be the target's, each with its file. They are compared when the two
            first meet, and never kept: the target's own are used.
    """

    config: DFlashConfig
    path: Path | None
    sliding_window_size: int | None
    min_confidence: float
    copies: tuple[tuple[str, Path], ...]

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

    def _check_fit(self, target: Target, proposed: int, is_copy: Callable[[str, Path], bool]) -> None:
        """See ``compat.check_fit``.

        Args:
            proposed: the greatest token id that it can propose, where it has a vocabulary of its own; else 0.
            is_copy: whether a tensor of a file is the target's.
        """
        check_fit(self.name, self.config, self.path, target)
        if proposed >= target.vocab_size:
            raise misfit(
                self.name, target, f"it proposes token {proposed}, the target's end at {target.vocab_size - 1}"
            )
        for tensor, file in self.copies:
            if not is_copy(tensor, file):
                raise misfit(
                    self.name,
                    target,
                    f"it comes with a {tensor} that is not the target's own: it was made for another model, or for "
                    "another fine-tune of this one",
                )

    @abstractmethod
    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> Drafting:
        """See ``protocols.Drafter``."""

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
