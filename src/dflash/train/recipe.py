"""How a draft is trained: every choice in one place, written into the output and checked on resume."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from dflash.errors import RequestError
from dflash.train.mix import LossMix
from dflash.train.schedule import SCHEDULES

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Published decay of the slot weights for a block size."""

WEIGHTS = ("exponential", "dpace", "uniform")
OPTIMIZERS = ("adamw", "muon")
PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True)
class Recipe:
    """Attributes:

    steps: optimiser steps of the whole run; the schedule is laid over them.
    sequences: a step, over all processes; each with up to ``anchors`` blocks.
    weights: of the slots of a block: "exponential" exp(-(k-1)/gamma), "dpace" or "uniform".
    learning_rate: peak, of AdamW; Muon's is ``muon_rate``.
    precision: "bf16" computes matrix products in bfloat16; the weights and their updates stay float32.
    accumulate: parts a step is split into, to save memory; the result is the same.
    recompute: keep no activations of the draft's layers, compute them again going back.
    compile: let torch.compile fuse the layers and the loss: minutes at the start, up to twice the rate afterwards.
    vocabulary: "reduced" takes the softmax over the tokens that occur in the answers learned from, "full" over all.
    others: with a reduced vocabulary, how many of the remaining tokens, drawn afresh each step, stand for all of
        them: the partition function is then unbiased. With 0 the gradient is exactly that of the reduced softmax,
        but nothing keeps the draft from proposing a token it never saw.
    """

    steps: int
    sequences: int = 8
    anchors: int = 16
    loss: str = "ce"
    weights: str = "exponential"
    gamma: float | None = None
    learning_rate: float = 1e-3
    muon_rate: float = 0.02
    weight_decay: float = 0.0
    warmup: float = 0.04
    decay: float = 0.2
    schedule: str = "wsd"
    optimizer: str = "adamw"
    clip: float = 1.0
    precision: str = "bf16"
    accumulate: int = 1
    recompute: bool = False
    compile: bool = False
    vocabulary: str = "reduced"
    others: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "anchors", "accumulate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("learning_rate", "muon_rate", "clip", "gamma"):
            value = getattr(self, name)
            if not (value is None and name == "gamma") and not 0 < value < math.inf:
                raise RequestError(f"{name} must be a number above 0, not {value!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise RequestError(f"weight_decay must be a number of at least 0, not {self.weight_decay!r}")
        for name in ("warmup", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(f"{name} must be a share of the steps, 0 to 1, not {getattr(self, name)!r}")
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed must be a whole number of 64 bits, not {self.seed}")
        for name, known in (
            ("weights", WEIGHTS),
            ("optimizer", OPTIMIZERS),
            ("precision", PRECISIONS),
            ("schedule", SCHEDULES),
            ("vocabulary", ("reduced", "full")),
        ):
            if getattr(self, name) not in known:
                raise RequestError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if isinstance(self.others, bool) or not isinstance(self.others, int) or self.others < 0:
            raise RequestError(f"others must be a whole number of at least 0, not {self.others!r}")
        if self.compile and self.recompute:
            raise RequestError("compile and recompute do not go together: a compiled layer decides what it keeps")
        if not any(asdict(LossMix.parse(self.loss)).values()):
            raise RequestError(f"loss {self.loss!r} has no share above 0: nothing would be learned")

    def decay_of(self, block_size: int) -> float:
        """Gamma in force: the published one of the nearest block size unless given."""
        return self.gamma or GAMMA[min(GAMMA, key=lambda size: abs(size - block_size))]
