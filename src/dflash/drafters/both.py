"""Prompt lookup and a draft in one: text that repeats costs no pass of the draft, other text has its proposals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dflash.drafters.ngram import Lookup, NGramDrafter, padded
from dflash.errors import RequestError
from dflash.protocols import Drafter, Drafting, Features, Proposal, Target
from dflash.sampling import SamplingParams

MEMORY = 0.8
"""How much of an estimate a round leaves: about five rounds are remembered."""

PATIENCE = 16
"""Rounds after which the draft is asked again, although it is thought to bring less than the lookup promises."""


class BothDrafters:
    """Proposes what followed the same words before, where that promises as much as the draft; else the draft's block.

    Args:
        draft: what proposes otherwise; it also absorbs what the lookup brought, so it is always up to date.
        lookup: by default one with the draft's block size.

    Raises:
        RequestError: something else was given.
    """

    def __init__(self, draft: Drafter, lookup: NGramDrafter | None = None) -> None:
        if isinstance(draft, str):
            raise RequestError(
                f"BothDrafters takes a loaded draft, and {draft!r} is a name: load the draft with load_draft({draft!r})"
            )
        if not isinstance(draft, Drafter):
            raise RequestError(f"BothDrafters takes a loaded draft, not {type(draft).__name__}: load_draft returns one")
        if not isinstance(lookup, NGramDrafter | None):
            raise RequestError(
                "BothDrafters takes a loaded draft and, if another lookup than its own is wanted, an NGramDrafter, not "
                f"{type(lookup).__name__}"
            )
        self.block_size = draft.block_size
        self.taps = draft.taps
        self.draft = draft
        self.lookup = NGramDrafter(max(draft.block_size, 2)) if lookup is None else lookup

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> _Both:
        """See ``protocols.Drafter``."""
        draft = self.draft.start(target, sampling, verification, step)
        return _Both(draft, self.lookup.start(target, sampling, verification, step))


class _Both:
    """Both at work. Who is asked depends on tokens and rounds that are over, never on one drawn now."""

    def __init__(self, draft: Drafting, lookup: Lookup) -> None:
        self._draft = draft
        self._lookup = lookup
        self._drafted = False
        self._rounds = math.inf
        """Since the draft was last asked; it has never been."""
        self._gain = 0.0
        """Tokens that a block of the draft brought a row, on average of late."""

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        if self._drafted:
            accepted = sum(len(new) - 1 for new in tokens) / len(tokens)
            kept = MEMORY**self._rounds
            self._gain = kept * self._gain + (1 - kept) * accepted
            self._rounds = 0
        self._draft.extend(tokens, features)
        self._lookup.extend(tokens, features)

    def propose(self, pending: list[int], room: int) -> Proposal:
        found = self._lookup.continuations(pending, room)
        promised = self._lookup.promise
        self._rounds += 1
        doubted = promised < self._gain or self._rounds > PATIENCE
        self._drafted = promised == 0 or (promised < room and doubted)
        return self._draft.propose(pending, room) if self._drafted else padded(found, pending)

    def select(self, rows: list[int]) -> None:
        self._draft.select(rows)
        self._lookup.select(rows)
