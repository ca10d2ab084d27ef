"""Several processes share the prompts (``torchrun``), and the first one gets all records."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from dflash import packages
from dflash.benchmark.answers import Record
from dflash.launcher import launched

PATIENCE = datetime.timedelta(days=7)
"""How long one process waits for the others. If one dies, torchrun ends the others."""


@dataclass(frozen=True)
class Share:
    """This process among all, as the launcher says.

    Attributes:
        local: its number on its machine: the GPU it takes.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def of_environment(cls) -> Share:
        """As a launcher started it."""
        return cls(*launched())

    def check(self) -> None:
        """Whether the processes can hand their records to the first one.

        Raises:
            MissingPackage: they cannot: that takes PyTorch, whatever the backend.
        """
        if self.world > 1:
            packages.need(("torch",), f"for {self.world} processes to share the prompts")

    def device(self, wanted: str | None, backend: str) -> str | None:
        """The device to use: where PyTorch has several GPUs, each process takes its own."""
        if wanted is None and self.world > 1 and backend == "torch":
            import torch

            if torch.cuda.is_available():
                return f"cuda:{self.local % torch.cuda.device_count()}"
        return wanted

    def gather(self, records: list[Record]) -> list[Record]:
        """All processes' records in the first one; its own in any other. Waits for all."""
        if self.world == 1:
            return records
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
        shares: list[list[Record] | None] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(records, shares)
        dist.destroy_process_group()
        if shares is None:
            return records
        return [record for share in shares for record in share or []]
