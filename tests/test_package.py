"""The package as a whole: what importing it costs, and what it must never contain."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash

ROOT = Path(dflash.__file__).parent
HEAVY = ("torch", "mlx", "transformers", "tokenizers", "numpy", "huggingface_hub", "jinja2", "datasets", "fastapi")


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    paths = [str(ROOT.parent), *filter(None, sys.path)]
    prelude = f"import sys; sys.path[:0] = {paths!r}\n"
    done = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_framework() -> None:
    loaded = fresh("import dflash, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))").split()
    assert [name for name in HEAVY if name in loaded] == []
    assert "dflash" in loaded


def test_everything_promised_is_there() -> None:
    printed = fresh("from dflash import *; print(sorted(k for k in globals() if not k.startswith('_')))")
    assert set(dflash.__all__) <= set(ast.literal_eval(printed))
    assert len(set(dflash.__all__)) == len(dflash.__all__)


def modules() -> list[str]:
    """All but those that run on import, and those of a framework that is not installed here."""
    names = [module.name for module in pkgutil.walk_packages([str(ROOT)], "dflash.")]
    without = () if importlib.util.find_spec("mlx") else ("mlx",)
    return [name for name in names if not name.endswith("__main__") and not any(word in name for word in without)]


@pytest.mark.parametrize("name", modules())
def test_every_module_imports(name: str) -> None:
    importlib.import_module(name)


def keywords(tree: ast.AST) -> Iterator[tuple[str, ast.expr, int]]:
    """Names given a value in a call, a dict or a signature: (name, value, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value, node.value.lineno
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), value, value.lineno
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            for argument, value in zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True):
                yield argument.arg, value, value.lineno
            for argument, default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                if default is not None:
                    yield argument.arg, default, default.lineno


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_remote_code_is_never_switched_on(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    switched_on = [
        line
        for name, value, line in keywords(tree)
        if name in ("trust_remote_code", "trust-remote-code") and isinstance(value, ast.Constant) and value.value
    ]
    assert switched_on == []


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_pickles_are_never_loaded(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert "pickle.load" not in source
    assert all("weights_only=True" in line for line in source.splitlines() if "torch.load(" in line)


@pytest.mark.parametrize("path", ["decode.py", "generate.py", "limits.py", "text.py", "sampling.py", "compat.py"])
def test_the_loop_and_what_it_needs_import_no_framework(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & set(HEAVY)


def test_a_backend_that_is_not_installed_is_named() -> None:
    code = "import sys; sys.modules['torch'] = None; import dflash; dflash.load('smollm2-135m')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needed for the torch backend: pip install 'dflash-decoding[torch]'" in done.stderr.splitlines()[-1]
