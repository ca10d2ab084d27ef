"""One process of a run, or several that share each step's sequences (started by torchrun)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dflash.errors import ProcessLost, RequestError
from dflash.launcher import LONGEST_WAIT, launched
from dflash.train.whole import nothing_to_keep


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
        """The sum over all processes, each of which must ask for it.

        Raises:
            ProcessLost: one of them has ended.
        """
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        with self.exchanging():
            dist.all_reduce(tensor)
            return float(tensor)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Tell the errors of exchanges with other processes, inside this, from all others.

        Raises:
            ProcessLost: one of them has ended.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not _is_of_an_exchange(error):
                raise
            raise ProcessLost(
                "another process of this run has ended, and none goes on alone: see why it did, then start all again"
            ) from error

    def wait(self) -> None:
        """Until every process is here."""
        self.total(0.0)

    def leave(self) -> None:
        """Close the group, if this object opened it, when every process is done. All is written by then."""
        if self.world == 1:
            return
        with nothing_to_keep():
            with contextlib.suppress(ProcessLost):  # nothing is wanted of the others any more
                self.wait()
            self.close()

    def close(self) -> None:
        """Close the group, if this object opened it and it is open, whatever the others do.

        Gloo's threads, left running, may abort the process as it ends, and its exit status with it.
        """
        if self.began and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this one writes files and talks."""
        return self.rank == 0


def _is_of_an_exchange(error: RuntimeError) -> bool:
    """Gloo has no class of errors of its own: its messages begin with the place in its code, or tell of it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


ALONE = Processes()
"""The one process of most runs."""
