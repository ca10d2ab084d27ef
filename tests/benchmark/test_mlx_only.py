"""``dflash benchmark`` on a machine that has MLX and no PyTorch: real processes, in which torch cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dflash
import tiny
from dflash.benchmark.memory import PeakMemory
from dflash.benchmark.results import environment, load

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails, and to find_spec it is not there
import dflash
dflash.default_backend = dflash._default_backend = lambda: "mlx"  # as on Apple silicon
import dflash.cli.benchmark as command
command.default_backend = dflash.default_backend
from dflash.cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a draft for it."""
    place = tmp_path_factory.mktemp("mlx")
    tiny.model("llama", vocab_size=272, max_position_embeddings=2048).save_pretrained(place / "target")
    tiny.make_tokenizer().save_pretrained(place / "target")
    made = tiny.draft(dflash.load(place / "target", backend="torch", device="cpu"))
    return place / "target", tiny.save_draft(made, place / "draft")


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip


def test_all_systems_of_mlx_are_measured_and_the_record_says_mlx(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = folders
    command = ["benchmark", "--model", target, "--draft-model", draft, "--prompt", "abcabc", "--max-new-tokens", "8"]
    done = run(*command, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    found = load(tmp_path / "results.json")
    assert list(found.systems) == ["draft", "both", "ngram", "plain", "mlx-lm"]
    assert all(r.answer.error is None and r.answer.count == 8 for r in found.records)
    assert (found.settings["backend"], found.settings["device"], found.settings["dtype"]) == ("mlx", "cpu", "float32")
    where = found.environment
    assert (where["device"], where["dtype"]) == ("cpu", "float32")
    assert where["versions"].keys() == {"mlx", "mlx-lm", "transformers", "tokenizers", "numpy"}
    assert "threads" not in where
    assert "cpu, float32" in done.stdout and "Device(" not in done.stdout
    # The same command with the backend named is the same run.
    again = run(*command, "--backend", "mlx", "--output", tmp_path)
    assert again.returncode == 0 and load(tmp_path / "results.json").records == found.records


def test_other_commands_name_mlx_and_its_device_too(folders: tuple[Path, Path]) -> None:
    asked = ["--prompt", "x", "--max-new-tokens", "2", "--json"]
    done = run("generate", "--model", folders[0], "--drafter", "none", *asked)
    assert done.returncode == 0, done.stderr
    assert '"backend": "mlx", "dtype": "float32", "device": "cpu"' in done.stdout


def test_several_processes_without_torch_are_refused_before_anything_is_measured(folders: tuple[Path, Path]) -> None:
    done = run("benchmark", "--model", folders[0], "--prompt", "x", WORLD_SIZE="2", RANK="1", LOCAL_RANK="1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "torch is not installed, but needed for 2 processes to share the prompts" in " ".join(done.stderr.split())


def test_a_gpu_of_mlx_is_named_and_its_own_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M9"})
    assert environment("gpu", "bfloat16", "mlx")["gpu"] == "Apple M9"
    resets: list[None] = []
    monkeypatch.setattr(mx, "reset_peak_memory", lambda: resets.append(None))
    target: Any = SimpleNamespace(backend="mlx", device="gpu", peak_memory=lambda: 3.0)
    memory = PeakMemory(target)
    memory.reset()
    assert (memory.peak(), len(resets)) == (3.0, 1), "not that of the process"
