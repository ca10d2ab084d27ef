"""Which of several processes this one is, as torchrun, or any launcher that sets the same variables, started it."""

from __future__ import annotations

import os
from typing import NamedTuple


class Launched(NamedTuple):
    """This process among those of a run.

    Attributes:
        rank: its number, from 0.
        world: how many there are.
        local: its number on its machine: the GPU it takes.
    """

    rank: int
    world: int
    local: int


def launched() -> Launched:
    """Of this process; alone where no launcher started it."""
    rank = int(os.environ.get("RANK", "0"))
    return Launched(rank, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", rank)))


def is_first() -> bool:
    """Whether this process is the one that talks and writes."""
    return launched().rank == 0
