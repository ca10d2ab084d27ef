"""Drafters that need no model. The DFlash draft lives in each backend."""

from dflash.drafters.ngram import NGramDrafter
from dflash.drafters.none import NoDrafter

__all__ = ["NGramDrafter", "NoDrafter"]
