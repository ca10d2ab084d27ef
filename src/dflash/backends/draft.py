"""What the drafts of all backends have in common: what they say of themselves, and who sees whom in a layer."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.compat import check_fit, misfit
from dflash.draft_config import DFlashConfig, check_window
from dflash.protocols import Drafting, Target
from dflash.sampling import SamplingParams


def in_sight(seen: Any, query: Any, key: Any, window: int | None, causal: bool) -> Any:
    """Of the keys seen so far, those that a layer lets queries look at, by their positions: arrays of any framework.

    A window reaches as far ahead as back, where the layer is not causal: inside the block, its positions after.

    Args:
        seen: bool. Of a layer without limits it is handed back as it is, for what it costs.
        window: positions it reaches, the query's own included; None for all.

    Returns:
        Bool, of the broadcast shape at most.
    """
    if causal:
        seen = seen & (key <= query)
    if window is not None:
        seen = seen & (abs(query - key) < window)
    return seen


class Once:
    """Warns of each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, what: str, message: str) -> None:
        """
        Args:
            what: told apart by it; the message may name numbers that change.
        """
        if what not in self._said:
            self._said.add(what)
            warnings.warn(message, stacklevel=6)


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
        self._once = Once()

    def came(self, tokens: list[list[int]]) -> None:
        """The tokens that each row was given after a block of the draft: the target's own, and the accepted ones."""
        if any(len(new) > 1 for new in tokens):
            self._fruitless = 0
            return
        self._fruitless += len(tokens)
        if self._fruitless >= FRUITLESS:
            draft, target = self._names
            self._once.say(
                "no help",
                f"none of the last {self._fruitless} blocks of draft {draft} had a token that {target} accepted, so it "
                "only costs time: check that it was made for this target, for the thinking mode in use "
                "(enable_thinking), and that it runs in the dtype it was trained in",
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

    def __init__(self, config: DFlashConfig, path: Path | None, sliding_window_size: int | None) -> None:
        """
        Raises:
            RequestError: ``sliding_window_size`` is not positive.
        """
        super().__init__()  # of a backend's module
        self.config = config
        self.path = path
        self.sliding_window_size = check_window(sliding_window_size)
        self.min_confidence = 0.0
        self.copies: tuple[tuple[str, Path], ...] = ()
        self._once = Once()
        self._records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()

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

    def say_once(self, what: str, message: str) -> None:
        """Warn, but of each thing once in the life of this draft.

        Args:
            what: told apart by it.
        """
        self._once.say(what, message)

    def say_if_beyond(self, length: int) -> None:
        """Whether a text of so many tokens has outgrown what the draft was made for."""
        limit = self.config.max_position_embeddings
        if length >= limit:
            self.say_once(
                "beyond",
                f"the text is longer than the {limit} positions draft {self.name} was made for; its rotary positions "
                "go on past them, answers stay right, but fewer drafts may be accepted",
            )

    def say_if_not(self, finite: bool, dtype: str) -> None:
        """Whether the draft computes NaN; what it proposes is verified all the same."""
        if not finite:
            self.say_once(
                "not finite",
                f"draft {self.name} gave scores that are not finite in {dtype}; answers stay right but nothing is sped "
                "up: load it with dtype bfloat16 or float32",
            )

    def _record(
        self, target: Target, model: object, ids: Callable[[], list[int]], is_copy: Callable[[str, Path], bool]
    ) -> Record:
        """How it fares with a target that it fits; of each model this is asked once.

        Args:
            model: what stands for the target, alive as long as it is.
            ids: gives the tokens that it can propose, where it has a vocabulary of its own; else none.
            is_copy: whether a tensor of a file is the target's.

        Raises:
            IncompatibleDraft: see ``compat.check_fit``; or it comes with an embedding or a head of another target.
        """
        known = self._records.get(model)
        if known is not None:
            return known
        check_fit(self.name, self.config, self.path, target)
        greatest = max(ids(), default=0)
        if greatest >= target.vocab_size:
            raise misfit(
                self.name, target, f"it proposes token {greatest}, the target's end at {target.vocab_size - 1}"
            )
        for tensor, file in self.copies:
            if not is_copy(tensor, file):
                raise misfit(
                    self.name,
                    target,
                    f"it comes with a {tensor} that is not the target's own: it was made for another model, or for "
                    "another fine-tune of this one",
                )
        return self._records.setdefault(model, Record(self.name, target.name))

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
