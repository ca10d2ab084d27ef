"""Several processes share the prompts (``torchrun``), and the first one gets all records."""

from __future__ import annotations

from dataclasses import dataclass

from dflash import packages
from dflash.benchmark.answers import Record
from dflash.launcher import LONGEST_WAIT, launched


@dataclass(frozen=True)
class Share:
    """This process among all, as the launcher says."""

    rank: int = 0
    world: int = 1

    @classmethod
    def of_environment(cls) -> Share:
        """As a launcher started it."""
        own = launched()
        return cls(own.rank, own.world)

    def check(self) -> None:
        """Whether the processes can hand their records to the first one.

        Raises:
            MissingPackage: they cannot: that takes PyTorch, whatever the backend.
        """
        if self.world > 1:
            packages.need(("torch",), f"for {self.world} processes to share the prompts")

    def gather(self, records: list[Record]) -> list[Record]:
        """All processes' records in the first one; its own in any other. Waits for all."""
        if self.world == 1:
            return records
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=LONGEST_WAIT)
        shares: list[list[Record] | None] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(records, shares)
        dist.destroy_process_group()
        if shares is None:
            return records
        return [record for share in shares for record in share or []]
