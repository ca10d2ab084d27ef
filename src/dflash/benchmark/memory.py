"""Peak memory while one answer is made."""

from __future__ import annotations

import re
from pathlib import Path

from dflash.protocols import Target

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class PeakMemory:
    """Of the GPU (CUDA, or the one of MLX); else of the process, everything loaded in it included.

    On these GPUs and on Linux the peak is taken anew for every answer. Elsewhere it is the peak so far.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cuda = target.backend == "torch" and str(target.device).startswith("cuda")
        self._mlx_gpu = target.backend == "mlx" and target.device == "gpu"
        self._linux = not self._cuda and not self._mlx_gpu and _can_reset()

    def reset(self) -> None:
        """Forget the peak so far."""
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(self._target.device)
        elif self._mlx_gpu:
            import mlx.core as mx

            mx.reset_peak_memory()
        elif self._linux:
            _RESET.write_text("5")  # "reset the peak resident set size": proc(5)

    def peak(self) -> float:
        """GB (1e9 bytes) since ``reset``."""
        if not self._linux:
            return self._target.peak_memory()
        found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 / 1e9 if found else self._target.peak_memory()


def _can_reset() -> bool:
    try:
        _RESET.write_text("5")
    except OSError:  # another system, or a sandbox that does not allow it
        return False
    return "VmHWM" in _STATUS.read_text()
