"""Memory of this process."""

from __future__ import annotations

import sys


def process_peak() -> float:
    """The most that this process has had in memory, in GB (1e9 bytes)."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
