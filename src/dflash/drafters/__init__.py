"""Drafters that need no model of their own. The DFlash draft lives in each backend."""

from dflash.drafters.both import BothDrafters
from dflash.drafters.ngram import NGramDrafter
from dflash.drafters.none import NoDrafter

__all__ = ["BothDrafters", "NGramDrafter", "NoDrafter"]
