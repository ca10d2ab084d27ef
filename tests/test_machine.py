"""What is read of the machine: processors and memory, on machines and in containers of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from dflash import memory
from dflash.backends.torch import load as loading
from dflash.processors import Processors, processors

CONTAINERS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "version 2": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    "version 2 without a quota": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "version 2, a service's own group": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3.0),
    "version 2, a group of the host's that is not mounted": ("0::/docker/77\n", {"cpu.max": "50000 100000"}, 0.5),
    "version 2 beside version 1": ("1:name=systemd:/\n0::/\n", {"unified/cpu.max": "200000 100000"}, 2.0),
    "version 1": (
        "5:memory:/x\n4:cpu,cpuacct:/docker/77\n",
        {"cpu,cpuacct/docker/77/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/docker/77/cpu.cfs_period_us": "100000\n"},
        2.5,
    ),
    "version 1 in its container": (
        "4:cpu,cpuacct:/docker/77\n",
        {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        4.0,
    ),
    "version 1 without a quota": (
        "1:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "another controller's group": ("1:cpuset:/\n", {"cpuset/cpu.max": "100000 100000"}, None),
    "no quota files": ("0::/\n", {}, None),
    "a name with what other readers take for ends of lines": (
        "0::/a\u2028b\x85\x1c\x0b\rc\n",
        {"a\u2028b\x85\x1c\x0b\rc/cpu.max": "50000 100000"},
        0.5,
    ),
    "a name that is no UTF-8": ("0::/a\udcff\n", {"a\udcff/cpu.max": "50000 100000"}, 0.5),
    "lines that say nothing": ("\nnonsense\n1:2\n::\n\n0::/\n", {"cpu.max": "50000 100000"}, 0.5),
    "a name that is too long": (f"0::/{'a' * 5000}\n", {"cpu.max": "50000 100000"}, 0.5),
    "more than a number can be": ("0::/\n", {"cpu.max": "9" * 400 + " 100000"}, None),
    "more than Python reads": ("0::/\n", {"cpu.max": "9" * 5000 + " 100000"}, None),
    "nothing for no time": ("0::/\n", {"cpu.max": "100000 0"}, None),
    "quota files of something else": ("0::/\n", {"cpu.max": "a b c\n"}, None),
    "an empty quota file": ("0::/\n", {"cpu.max": ""}, None),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_quota_of_a_container_is_found(name: str, tmp_path: Path) -> None:
    groups, files, quota = CONTAINERS[name]
    (tmp_path / "own").write_bytes(os.fsencode(groups))
    for path, text in files.items():
        file = tmp_path / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert processors(tmp_path / "cgroup", tmp_path / "own").quota == quota


def test_there_is_no_quota_where_there_are_no_groups(tmp_path: Path) -> None:
    found = processors(tmp_path / "absent", tmp_path / "absent too")
    assert found.quota is None
    assert 1 <= found.affinity <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("affinity", "quota", "wanted", "threads"),
    [(8, None, 4, 4), (2, None, 4, 2), (8, 3.0, 4, 3), (8, 2.5, 4, 2), (8, 0.5, 4, 1), (8, 6.0, 1, 1)],
)
def test_the_smallest_of_affinity_quota_and_setting(
    affinity: int, quota: float | None, wanted: int, threads: int
) -> None:
    assert Processors(affinity, quota).threads(wanted) == threads


@pytest.mark.parametrize(("setting", "quota", "expected"), [(4, 2.0, 2), (1, 2.0, 1), (2, None, 2)])
def test_load_keeps_to_the_quota_and_never_raises_the_users_own_setting(
    setting: int, quota: float | None, expected: int, tmp_path: Path, monkeypatch: Any
) -> None:
    tiny.model("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "processors", lambda: Processors(8, quota))
    before = torch.get_num_threads()
    torch.set_num_threads(setting)
    try:
        loading.load(tmp_path, device="cpu")
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_thread_count_says_where_it_comes_from() -> None:
    assert str(Processors(2, None)) == "affinity 2, quota none"
    assert str(Processors(8, 2.5)) == "affinity 8, quota 2.5"


def test_no_module_of_ours_needs_what_only_unix_has() -> None:
    """Imported twice: what other packages need on this system is there before it is blocked."""
    code = """
import importlib, pkgutil, sys
import dflash
names = [found.name for found in pkgutil.walk_packages(dflash.__path__, "dflash.") if "mlx" not in found.name]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
for name in [name for name in sys.modules if name.partition(".")[0] == "dflash"]:
    del sys.modules[name]
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in names:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_peak_of_memory_on_windows(monkeypatch: Any) -> None:
    counted = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=3_000_000_000))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: counted))
    monkeypatch.setitem(sys.modules, "resource", None)
    assert memory.process_peak() == 3.0
