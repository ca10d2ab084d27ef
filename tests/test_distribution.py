"""What is installed, and by what name: a wheel is built of this tree, put into an empty folder and run from there."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import dflash

ROOT = Path(__file__).parents[1]
NAME = "dflash-decoding"


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*arguments: str | Path, **environment: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        list(map(str, arguments)), env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: Any) -> Path:
    """The folder that the wheel is installed in, with nothing else. No index is asked for anything."""
    folder: Path = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # of a copy: building leaves files beside the sources
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder / "wheels", source)
    (wheel,) = (folder / "wheels").iterdir()
    run(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", folder / "target", wheel)
    return folder / "target"


def of_the_package(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in (folder / "dflash").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_file_of_the_package_is_installed(installed: Path) -> None:
    files = of_the_package(installed)
    assert files == of_the_package(ROOT / "src")
    assert {"dflash/py.typed", "dflash/benchmark/data/gsm8k.jsonl"} <= files
    assert "dflash/drafts/smollm2-135m/model.safetensors" in files


def test_the_metadata_is_right(installed: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    assert found.metadata["Name"] == NAME
    assert found.version == dflash.__version__
    assert found.metadata["Requires-Python"] == ">=3.11"
    assert set(found.metadata.get_all("Provides-Extra") or ()) == set(project()["project"]["optional-dependencies"])
    own = [Requirement(line) for line in found.requires or () if line.startswith("dflash")]
    assert {requirement.name for requirement in own} == {NAME}
    assert [point.value for point in found.entry_points if point.name == "dflash"] == ["dflash.__main__:main"]
    assert any(path.name == "LICENSE" for path in found.files or ())


def test_it_runs_from_where_it_is_installed(installed: Path) -> None:
    paths = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    where = """if True:
        import dflash, dflash.benchmark.datasets, dflash.checkpoint
        print(dflash.__file__)
        print(dflash.checkpoint.locate_draft("smollm2-135m"))
        assert dflash.benchmark.datasets.read("gsm8k-sample").talks
    """
    assert all(Path(line).is_relative_to(installed) for line in run(sys.executable, "-c", where, **paths).splitlines())
    version = f"dflash {dflash.__version__}\n"
    assert run(sys.executable, "-m", "dflash", "--version", **paths) == version
    assert run(installed / "bin" / "dflash", "--version", **paths) == version
    assert "benchmark" in run(sys.executable, "-m", "dflash", "--help", **paths)


# --- the version of Python --------------------------------------------------------------------------


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_what_is_pinned_can_be_installed_on_the_oldest_python_promised() -> None:
    (oldest,) = (s.version for s in SpecifierSet(project()["project"]["requires-python"]))
    wanted = {}
    for pin in pins():
        try:
            wanted[pin.name] = importlib.metadata.metadata(pin.name)["Requires-Python"]
        except importlib.metadata.PackageNotFoundError:  # of another extra or system
            continue
    assert "transformers" in wanted
    assert {name: spec for name, spec in wanted.items() if spec and oldest not in SpecifierSet(spec)} == {}


def test_the_oldest_python_is_the_same_everywhere() -> None:
    assert project()["project"]["requires-python"] == ">=3.11"
    assert project()["tool"]["mypy"]["python_version"] == "3.11"
    said = {
        name: re.findall(r"Python (\d\.\d+)", (ROOT / name).read_text(encoding="utf-8"))
        for name in ("README.md", "CONTRIBUTING.md", "Makefile")
    }
    assert said == {"README.md": ["3.11"], "CONTRIBUTING.md": ["3.11"], "Makefile": ["3.11"]}
    assert not [str(pin) for pin in pins() if "python_version" in str(pin.marker)]


# --- the name ---------------------------------------------------------------------------------------

OF_ANOTHER = re.compile(
    r"""
    (?<![\w./-]) dflash \[ [a-z{]          # an extra of dflash
    | pip \s install \b [^\n`]*? (?<![\w./\[-]) dflash (?![\w-])
    | metadata\.\w+ \( ["'] dflash ["']    # its version
    """,
    re.VERBOSE,
)
"""Text that means the distribution named dflash on the package index, which is another project's."""


def texts() -> Iterator[Path]:
    for name in (".ci", "benchmarks", "docs", "examples", "recipes", "src", "tests"):
        for path in sorted((ROOT / name).rglob("*")):
            hidden = {"__pycache__", "data"} & set(path.parts) or any(".egg-info" in part for part in path.parts)
            if path.is_file() and not hidden and path.suffix in ("", ".md", ".py", ".sh", ".txt", ".toml", ".html"):
                yield path
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"))


def test_nobody_is_sent_to_the_other_project_of_that_name() -> None:
    found = {
        str(path.relative_to(ROOT)): match.group()
        for path in texts()
        if path != Path(__file__) and (match := OF_ANOTHER.search(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("pip install 'dflash[torch]'", True),
        ("pip install dflash", True),
        ("pip install -U dflash", True),
        ("with tensorboard (`dflash[train]`)", True),
        ('version("x") importlib.metadata.version("dflash")', True),
        ("pip install 'dflash-decoding[torch]'", False),
        ("pip install '.[torch]', then `dflash demo`", False),
        ("dflash[{name}]", True),
        ("from dflash import load", False),
    ],
)
def test_the_search_finds_what_it_should(text: str, bad: bool) -> None:
    assert (OF_ANOTHER.search(text) is not None) is bad
