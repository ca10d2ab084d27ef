"""The log's figures as TensorBoard scalars, where tensorboard is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


class Scalars:
    """Writes beside the log, for ``tensorboard --logdir``; the log itself stays the record."""

    def __init__(self, folder: Path, step: int) -> None:
        """
        Args:
            folder: of the event files.
            step: of the run as it begins or goes on; scalars an earlier run wrote after it are struck out.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """A record of ``log.jsonl``."""
        step = record["step"]
        for name in ("loss", "acceptance", "blocks_per_second", "rate"):
            if name in record:
                self._writer.add_scalar(f"train/{name}", record[name], step)
        if "measured" in record:
            measured = record["measured"]
            self._writer.add_scalar("held_out/length", measured["length"], step)
            for slot, share in enumerate(measured["by_position"], 1):
                self._writer.add_scalar(f"held_out/slot_{slot}", share, step)
        self._writer.flush()


def scalars(folder: Path, step: int) -> Scalars | None:
    """None where tensorboard is not installed."""
    return Scalars(folder, step) if importlib.util.find_spec("tensorboard") is not None else None
