"""How the kinds of loss are mixed. Read before PyTorch is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash.errors import RequestError

KINDS = ("ce", "kl", "l1")


@dataclass(frozen=True)
class LossMix:
    """Shares of the kinds of loss.

    ce: cross-entropy with the token that the target chose; kl: from the target's distribution to the draft's;
    l1: total variation between the two. kl and l1 need the target's last hidden states.
    """

    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LossMix:
        """From "ce", "kl", "ce+kl" or "0.3*ce+0.7*kl".

        Raises:
            RequestError: another form, or an unknown kind.
        """
        shares: dict[str, float] = {}
        for part in text.replace(" ", "").split("+"):
            found = re.fullmatch(r"(?:(\d+(?:\.\d+)?)\*)?(ce|kl|l1)", part)
            if found is None or found[2] in shares:
                raise RequestError(f"loss {text!r} must be a sum of {', '.join(KINDS)}, for example 0.5*ce+0.5*kl")
            shares[found[2]] = float(found[1] or 1.0)
        return cls(**{kind: shares.get(kind, 0.0) for kind in KINDS})

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's distribution is read."""
        return self.kl > 0 or self.l1 > 0
