"""Which of several processes this one is, as torchrun, or any launcher that sets the same variables, started it."""

from __future__ import annotations

import datetime
import os
from typing import NamedTuple

from dflash.errors import RequestError

LONGEST_WAIT = datetime.timedelta(days=7)
"""How long a process waits for the others. They may be at work for long: the first one measures alone, and shares take
one longer than another. Where a process ends with an error, torchrun ends the others at once."""


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


def own_device(device: str | None) -> str | None:
    """The PyTorch device that this process loads its target on: of several, each has a GPU of its own.

    Args:
        device: as asked for. "cuda", or None where there is CUDA, becomes this process's; another is taken as it is.

    Raises:
        RequestError: there are fewer GPUs than processes.
    """
    _, world, local = launched()
    if world == 1 or device not in (None, "cuda"):
        return device
    import torch

    if device is None and not torch.cuda.is_available():
        return None
    if local >= torch.cuda.device_count():
        raise RequestError(
            f"process {local} of this machine has no GPU of its own, of {torch.cuda.device_count()}: start as many "
            "processes as there are GPUs, or give --device cpu"
        )
    return f"cuda:{local}"
