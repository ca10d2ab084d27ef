"""Files written whole or not at all, whatever ends the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from dflash.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


def write(file: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    beside = _beside(file)
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, file)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        CheckpointError: it cannot be written: the disk is full, for one.
    """
    from safetensors.torch import save_file  # here, because text is written without PyTorch too

    beside = _beside(file)
    try:
        save_file(dict(tensors), beside, metadata={"format": "pt"})
    except SafetensorError as error:  # what its library makes of an error of the system
        raise CheckpointError(f"{file} cannot be written: {error}") from error
    beside.chmod(0o644)  # its library lets only the owner read
    os.replace(beside, file)


def _beside(file: Path) -> Path:
    """A name of this process's own: several may write the same cache."""
    return file.with_name(f".{file.name}.{os.getpid()}.part")
