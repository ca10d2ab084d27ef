"""The code of the documentation, read by mypy as a user's own: the annotations promise what the documentation does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dflash

PACKAGE = Path(dflash.__file__).parent
ROOT = Path(__file__).parents[1]

PROMISED = """
from collections.abc import Iterator
from pathlib import Path

from dflash import Generation, Response, generate, load, load_draft, stream_generate
from dflash.decode import decode
from dflash.drafters import BothDrafters, NGramDrafter, NoDrafter
from dflash.protocols import Drafter, Target

target: Target = load("smollm2-135m")
print(target.model, target.tokenizer)
model, tokenizer = target
draft = load_draft("smollm2-135m", min_confidence=0.1)
folder: Path | None = draft.path
trained: int = draft.config.block_size
bounds: tuple[int | None, float] = (draft.sliding_window_size, draft.min_confidence)
drafters: list[Drafter] = [draft, BothDrafters(draft), BothDrafters(draft, NGramDrafter()), NoDrafter()]
for drafter in (*drafters, draft, "ngram", None):
    whole: Generation = generate(target, drafter, None, [1, 2, 3], stop="\\n")
responses = stream_generate(target, draft, tokenizer, "Hello")
first: Response = next(responses)
responses.close()
rounds = decode(target, draft, [], block_size=8)
rounds.close()
"""
"""What docstrings and the documents say in words."""

ON_MLX = """
from pathlib import Path

from dflash import generate
from dflash.model_mlx import load, load_draft, stream_generate

target = load("smollm2-135m", kv_bits=8)
draft = load_draft("smollm2-135m", bits=4)
folder: Path | None = draft.path
trained: int = draft.config.block_size
print(target.model, target.tokenizer, generate(target, draft, None, "Hello").text)
responses = stream_generate(target, draft, None, "Hello")
responses.close()
"""


def snippets() -> dict[str, str]:
    """Every block of Python that a user is shown: name -> code."""
    found = {"promised": PROMISED, "on_mlx": ON_MLX}
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        found |= {f"{path.stem}_{number}": block for number, block in enumerate(blocks)}
    for path in sorted((ROOT / "examples").glob("*.py")):
        found[f"example_{path.stem}"] = path.read_text(encoding="utf-8")
    for path in (PACKAGE / "__init__.py", PACKAGE / "model_mlx.py"):
        docstring = path.read_text(encoding="utf-8").split('"""')[1]
        lines = [line for line in docstring.splitlines() if line.startswith("    ") or not line]
        found[f"docstring_{path.stem.strip('_')}"] = textwrap.dedent("\n".join(lines))
    return found


def test_documented_code_passes_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    code = snippets()
    assert {"README_0", "example_mlx_chat", "docstring_init", "docstring_model_mlx"} <= set(code)
    for name, text in code.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    # The project's own settings: strict, and frameworks are not read.
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "pyproject.toml",
        *map(str, sorted(tmp_path.glob("*.py"))),
    ]
    environment = os.environ | {"MYPYPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
