"""One process of a run, or several that share each step's sequences (started by torchrun)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dflash.errors import RequestError
from dflash.launcher import LONGEST_WAIT, launched


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Attributes:
        rank: of this one, from 0.
        world: how many there are.
        device: where the numbers lie that they exchange.
        began: whether this object opened the group.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    began: bool = False

    @classmethod
    def join(cls, device: torch.device) -> Processes:
        """From the environment that torchrun sets.

        Args:
            device: of this process's target.

        Raises:
            RequestError: several processes on a device that they cannot exchange gradients from.
        """
        rank, world, _ = launched()
        if world == 1:
            return cls()
        if device.type not in ("cuda", "cpu"):
            raise RequestError(f"several processes train on CUDA or on the CPU, not on {device.type}: start one alone")
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL works on the current one
        began = not dist.is_initialized()
        if began:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=LONGEST_WAIT)
        return cls(rank, world, device if "nccl" in dist.get_backend() else torch.device("cpu"), began)

    def total(self, value: float) -> float:
        """The sum over all processes, each of which must ask for it."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return float(tensor)

    def wait(self) -> None:
        """Until every process is here."""
        self.total(0.0)

    def leave(self) -> None:
        """Close the group, if this object opened it, when every process is done."""
        self.wait()
        if self.began:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this one writes files and talks."""
        return self.rank == 0


ALONE = Processes()
"""The one process of most runs."""
