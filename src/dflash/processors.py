"""How much of the machine's processors this process may use: by its affinity, and by a container's quota."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Processors:
    """What there is for this process.

    Attributes:
        affinity: processors it may run on.
        quota: processors' worth of time it is given, as 1.5; None where there is no quota.
    """

    affinity: int
    quota: float | None

    def threads(self, wanted: int) -> int:
        """``wanted`` or fewer: more than there are processors for only wait for each other. At least 1."""
        quota = wanted if self.quota is None else int(self.quota)
        return max(1, min(wanted, self.affinity, quota))

    def shared_by(self, threads: int) -> str:
        """How many threads there are, and what there is for them."""
        return f"{threads} thread{'' if threads == 1 else 's'} ({self})"

    def __str__(self) -> str:
        quota = "none" if self.quota is None else f"{self.quota:g}"
        return f"affinity {self.affinity}, quota {quota}"


def processors(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Processors:
    """Of this process, now.

    Args:
        cgroups: where control groups are mounted, version 1 or 2.
        membership: the file that says in which of them this process is.
    """
    quotas = [quota for folder in _groups(cgroups, membership) if (quota := _quota(folder)) is not None]
    return Processors(_affinity(), min(quotas, default=None))


def _affinity() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's groups that can limit its time, each with those above it.

    Inside a container the path may be the host's, which is not mounted: then the container's own group is at the top.
    """
    try:
        # Names of groups are bytes, which may be no UTF-8; and only newlines end a line, unlike for splitlines.
        lines = os.fsdecode(membership.read_bytes()).split("\n")
    except OSError:  # not Linux
        return
    for line in lines:
        if line.count(":") < 2:  # the last one is empty
            continue
        _, controllers, path = line.split(":", 2)
        tops = []
        if not controllers:  # version 2; beside version 1 it is mounted under a name of its own
            tops = [cgroups, cgroups / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [cgroups / controllers, cgroups / "cpu"]
        for top in tops:
            own = top / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _quota(folder: Path) -> float | None:
    """Processors' worth of time a group is given; None where it has no quota."""
    try:
        if (folder / "cpu.max").is_file():
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            limit, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ArithmeticError):  # none of these files here, "max", or no number that can be one
        return None
