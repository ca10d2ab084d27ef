"""dflash: lossless block-diffusion speculative decoding.

    from dflash import load, load_draft, stream_generate

    model, tokenizer = load("smollm2-135m")
    draft = load_draft("smollm2-135m")
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    for response in stream_generate(model, draft, tokenizer, messages):
        print(response.text, end="")

Importing this package imports neither torch nor mlx: a backend is imported by ``load``.
"""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import packages
from dflash.errors import DFlashError, RequestError
from dflash.generate import Generation, Response, generate, stream_generate
from dflash.sampling import SamplingParams

if TYPE_CHECKING:
    from dflash.backends.draft import PublishedDraft
    from dflash.protocols import Target

__version__ = "0.1.0"

__all__ = [
    "DFlashError",
    "Generation",
    "Response",
    "SamplingParams",
    "generate",
    "load",
    "load_draft",
    "stream_generate",
]


def load(
    id_or_path: str | Path,
    backend: str | None = None,
    dtype: Any = None,
    device: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a target model and its tokenizer.

    Args:
        id_or_path: a hub id, a local folder, a ``.gguf`` file, or the alias ``smollm2-135m``.
        backend: "torch" or "mlx"; by default mlx on Apple silicon, where it is installed, else torch.
        dtype: "float32", "bfloat16", "float16" or the framework's; by default float32 on CPU, elsewhere
            the checkpoint's own.
        device: for example "cpu", "cuda", "mps"; by default the best there is. MLX has one for a process.
        revision: of a hub repository.
        trust_remote_code: run Python that a repository ships. Off unless you say so.

    Returns:
        The target, with ``.model`` and ``.tokenizer``. It also unpacks as ``model, tokenizer``.

    Raises:
        ModelNotFound: there is no such model.
        CheckpointError: weights are missing.
        UnsupportedTarget: it has layers whose cache cannot be rolled back, or is no causal language model.
        RequestError: an unknown backend, dtype or device.
        MissingPackage: the backend is not installed.
    """
    target: Target = _backend(backend, id_or_path).load(id_or_path, dtype, device, revision, trust_remote_code)
    return target


def load_draft(
    id_or_path: str | Path,
    sliding_window_size: int | None = None,
    backend: str | None = None,
    dtype: Any = None,
    device: Any = None,
    revision: str | None = None,
    bits: int | None = None,
    min_confidence: float | None = None,
) -> PublishedDraft:
    """Load a DFlash draft in the published format. Its code is never needed: only json and safetensors are read.

    Args:
        id_or_path: a hub id, a local folder, or the alias ``smollm2-135m``, whose draft comes with this package.
        sliding_window_size: how many committed positions the draft may look back on; None for all.
        backend, dtype, device, revision: as for ``load``.
        bits: quantize the weights to 4 or 8 bits (mlx only); None leaves them as they are.
        min_confidence: end a block where the draft itself gives the run of tokens less than this probability. 0 checks
            whole blocks, which costs a GPU next to nothing; by default 0, and on a CPU in float32 0.1.

    Returns:
        The draft, a drafter with ``.config`` (see ``DFlashConfig``) and ``.path``, the folder it was loaded from.

    Raises:
        ModelNotFound: there is no such draft.
        ConfigError: its config is incomplete, or asks for something not computed here.
        CheckpointError: tensors are missing, left over or misshapen.
        RequestError: ``sliding_window_size`` is not positive, ``min_confidence`` no probability, or ``bits`` that the
            backend does not have.
        MissingPackage: the backend is not installed.
    """
    draft: PublishedDraft = _backend(backend, None).load_draft(
        id_or_path, sliding_window_size, dtype, device, revision, bits, min_confidence
    )
    return draft


def check_backend(name: str | None, model: str | Path | None) -> str:
    """The name of the backend in force.

    Args:
        model: the target that is to be loaded, if one is.

    Raises:
        RequestError: it is unknown.
        MissingPackage: it is not installed.
    """
    name = default_backend() if name is None else name
    if name not in packages.BACKENDS:
        raise RequestError(f"unknown backend {name!r}: choose one of {', '.join(packages.BACKENDS)}")
    from dflash.checkpoint import packages_of  # here, because importing this package is to cost nothing

    along = [] if model is None else packages_of(model)
    packages.need(packages.BACKENDS[name], f"for the {name} backend", along)
    return name


def default_backend() -> str:
    """mlx where it is at home and installed, else torch."""
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return "mlx" if apple and all(map(packages.is_installed, packages.BACKENDS["mlx"])) else "torch"


def _backend(name: str | None, model: str | Path | None) -> Any:
    return importlib.import_module(f"dflash.backends.{check_backend(name, model)}.load")
