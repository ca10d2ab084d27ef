"""Loading on MLX: targets through mlx-lm, drafts from their published files."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, maybe_set_recommended_wired_limit
from transformers import AutoTokenizer

from dflash import jsontext, packages
from dflash.backends.mlx.architectures import cast, completed
from dflash.backends.mlx.draft import DFlashDraftModel
from dflash.backends.mlx.target import MlxTarget, default_device
from dflash.checkpoint import (
    Place,
    check_files,
    check_weights,
    fetch_target,
    find_weights,
    locate,
    locate_draft,
    token_offsets,
)
from dflash.draft_config import ARCHITECTURE, DFlashConfig, confidence
from dflash.errors import CheckpointError, DFlashError, RequestError, UnsupportedTarget
from dflash.protocols import Features, Proposal
from dflash.text import repair_decoder

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
BITS = (4, 8)
"""Quantizations of a draft and of a target's keys and values."""


def load(
    id_or_path: str | Path,
    dtype: str | mx.Dtype | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> MlxTarget:
    """See ``dflash.load``. Quantized targets stay as mlx-lm loads them."""
    place = locate(id_or_path)
    _check_device(device)
    source = _folder(place, dtype, revision, trust_remote_code)
    config = _json(place.name, source / "config.json")
    if ARCHITECTURE in (config.get("architectures") or []):
        raise UnsupportedTarget(
            f"{place.name} is a DFlash draft, not a target: load it with load_draft, or give it as --draft"
        )
    with _blaming(place.name, "model"):
        model, _ = load_model(source, lazy=True, model_config=completed(config), trust_remote_code=trust_remote_code)
    chosen = _dtype(dtype, None)
    if chosen is not None:
        cast(model, chosen)
    # Before anything else, and all of it, rotary tables too, which are no parameters: what one thread leaves
    # unevaluated, another has no stream for.
    mx.eval(model)
    with _blaming(place.name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    repair_decoder(tokenizer)
    generation = source / "generation_config.json"
    more = [_json(place.name, generation)] if generation.is_file() else []
    target = MlxTarget(model.eval(), tokenizer, place.name, config, *more)
    check_rollback(target)
    maybe_set_recommended_wired_limit()  # on Apple, so that weights stay resident; elsewhere it does nothing
    return target


def quantize_cache(target: MlxTarget, bits: int, group_size: int = 64) -> None:
    """Have a target keep keys and values of full attention in ``bits`` bits; windows and states stay as they are.

    Raises:
        RequestError: bits that there are not, or a model whose keys and values cannot be quantized so.
    """
    _check_bits("kv_bits", bits)
    target.kv_bits, target.kv_group_size = bits, group_size
    try:
        session = target.start(1, (), 4, 4)
        session.prefill([[0, 0]], _ignore)
        with session.verify([0], Proposal([[0]], 1)) as ahead:
            mx.eval(ahead.scores)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        target.kv_bits = None
        raise RequestError(
            f"the keys and values of {target.name} cannot be kept in {bits} bits by groups of {group_size}: "
            f"{_one_line(error)}"
        ) from error


def load_draft(
    id_or_path: str | Path,
    sliding_window_size: int | None = None,
    dtype: str | mx.Dtype | None = None,
    device: str | None = None,
    revision: str | None = None,
    bits: int | None = None,
    min_confidence: float | None = None,
) -> DFlashDraftModel:
    """See ``dflash.load_draft``.

    Args:
        bits: quantize the draft's weights to 4 or 8 bits; None leaves them as they are.
    """
    if bits is not None:
        _check_bits("draft bits", bits)
    folder = locate_draft(id_or_path, revision)
    config = DFlashConfig.load(folder)
    _check_device(device)
    chosen = _dtype(dtype, DTYPES.get(config.dtype or "", mx.bfloat16))
    if chosen == mx.float16 and config.dtype == "bfloat16":
        warnings.warn(
            f"draft {folder.name} was trained in bfloat16; float16 can overflow and then accept nothing", stacklevel=3
        )
    draft = DFlashDraftModel(config, folder, sliding_window_size, chosen)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    draft.min_confidence = confidence(min_confidence, str(chosen).rpartition(".")[2], on_cpu)
    weights = find_weights(folder)
    shapes = {name: tuple(p.shape) for name, p in tree_flatten(draft.parameters())}
    draft.copies = check_weights(folder, weights, config, shapes)
    tensors = {}
    for file in weights.files:
        stored: Any = mx.load(str(file))
        for name, tensor in stored.items():
            if name not in shapes:
                continue  # not read
            if tensor.dtype not in DTYPES.values():
                raise CheckpointError(
                    f"{folder.name}: {name} is stored as {tensor.dtype}: quantized drafts are not read"
                )
            tensors[name] = tensor.astype(chosen)
    draft.load_weights(list(tensors.items()))
    if config.draft_vocab_size is not None:
        draft.name_tokens(token_offsets(folder, weights, config))
    if bits is not None:
        _quantize(draft, bits)
    mx.eval(draft)
    draft.eval()
    return draft


def _quantize(draft: DFlashDraftModel, bits: int) -> None:
    """By groups of 64, or 32 where a width asks for it; a projection that neither divides stays as it is."""
    widths = {module.weight.shape[-1] for _, module in draft.named_modules() if isinstance(module, nn.Linear)}
    group = 64 if all(width % 64 == 0 for width in widths) else 32
    nn.quantize(
        draft,
        group_size=group,
        bits=bits,
        class_predicate=lambda _, module: isinstance(module, nn.Linear) and module.weight.shape[-1] % group == 0,
    )


def check_rollback(target: MlxTarget) -> None:
    """What is read in chunks and behind rejections must be as one forward of the model itself has it.

    The model runs over caches of ours, whose calls mlx-lm's releases may change. Twelve tokens tell. A model that
    does not read rows of different lengths together reads them one after the other.

    Raises:
        UnsupportedTarget: it is not, or the model cannot be read that way at all.
    """
    name = f"{type(target.model).__module__} in mlx-lm {mlx_lm.__version__}"
    limit = 1e-3 if target.anatomy.dtype == mx.float32 else 0.2
    try:
        target.together = target.together and _ragged_error(target) < limit
    except _NOT_READABLE:
        target.together = False
    try:
        error = _rollback_error(target)
    except DFlashError:
        raise
    except _NOT_READABLE as failure:
        raise UnsupportedTarget(f"{name} cannot be read block by block: {_one_line(failure)}") from failure
    if not error < limit:
        raise UnsupportedTarget(
            f"{name} does not read on correctly from a cache that was rolled back (relative error {error:.2g}): "
            "answers would not be the target's own"
        )


_NOT_READABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _ragged_error(target: MlxTarget) -> float:
    """The largest relative error of the scores of two ragged rows read in chunks."""
    text, whole = _text_and_scores(target)
    rows = target.start(2, (), 8, 4)
    first = rows.prefill([text[:9], text[:2]], _ignore)
    with rows.verify([text[9], text[2]], Proposal([text[10:12], text[3:5]], 2)) as ahead:
        pairs = [(first[0], whole[8:9]), (first[1], whole[1:2])]
        pairs += [(ahead.scores[0], whole[9:12]), (ahead.scores[1], whole[2:5])]
        return _largest_error(pairs)


def _rollback_error(target: MlxTarget) -> float:
    """The largest relative error of the scores of a row read in chunks, and of a block behind a rejection."""
    text, whole = _text_and_scores(target)
    session = target.start(1, (0, target.num_layers - 1), 8, 4)
    first = session.prefill([text[:6]], _ignore)
    with session.verify(text[6:7], Proposal([text[:3]], 3)) as ahead:
        ahead.keep([1])
    with session.verify(text[7:8], Proposal([text[8:]], 4)) as ahead:
        pairs = [(first[0], whole[5:6]), (ahead.scores[0], whole[7:])]
        ahead.keep([5])
    return _largest_error(pairs)


def _text_and_scores(target: MlxTarget) -> tuple[list[int], mx.array]:
    """Twelve tokens, and the scores [12, vocab] that the model itself gives them in one forward."""
    text = [(i * 7919 + 13) % target.vocab_size for i in range(12)]
    return text, target.model(mx.array([text]))[0]


def _largest_error(pairs: list[tuple[mx.array, mx.array]]) -> float:
    errors = [
        mx.linalg.norm((have - want).astype(mx.float32).flatten()) / mx.linalg.norm(want.astype(mx.float32).flatten())
        for have, want in pairs
    ]
    return float(mx.stack(errors).max())


def _ignore(tokens: list[list[int]], features: Features) -> None:
    """Nobody drafts."""


# --- files, devices, numbers --------------------------------------------------------------------------


def _folder(place: Place, dtype: str | mx.Dtype | None, revision: str | None, code: bool) -> Path:
    """The local folder of a target, fetched or unpacked where need be."""
    if place.gguf is not None:
        return _unpacked(place, dtype)
    folder = Path(place.source)
    folder = folder if folder.is_dir() else fetch_target(place.source, revision, code)
    check_files(folder)
    return folder


def _unpacked(place: Place, dtype: str | mx.Dtype | None) -> Path:
    """A GGUF file is unpacked by transformers, which does it with PyTorch."""
    packages.need(("torch", *packages.GGUF), f"to unpack the .gguf file of {place.name}")
    torch, gguf = importlib.import_module("torch"), importlib.import_module("dflash.backends.torch.gguf")
    chosen = _dtype(dtype, mx.bfloat16)
    with _blaming(place.name, "GGUF file"):
        folder: Path = gguf.unpacked(
            Path(place.source) / str(place.gguf), getattr(torch, str(chosen).rpartition(".")[2])
        )
    return folder


def _json(name: str, path: Path) -> Mapping[str, Any]:
    try:
        read = jsontext.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} of {name} cannot be read: {_one_line(error)}") from error
    if not isinstance(read, dict):
        raise CheckpointError(f"{path.name} of {name} must hold a JSON object, not {type(read).__name__}")
    return read


@contextmanager
def _blaming(name: str, part: str) -> Iterator[None]:
    """Say in our terms what could not be loaded: mlx-lm and transformers raise whatever is at hand."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedTarget(f"{name} needs a package that is not here: {_one_line(error)}") from error
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedTarget(
                f"{name} comes with Python code of its own, which is not run unless you pass trust_remote_code=True"
            ) from error
        kind = UnsupportedTarget if "not supported" in str(error) else CheckpointError
        raise kind(f"mlx-lm {mlx_lm.__version__} cannot read the {part} of {name}: {_one_line(error)}") from error


def _check_device(device: str | None) -> None:
    """MLX has one default device for a process, which its user sets."""
    here = default_device()
    if device not in (None, here):
        raise RequestError(
            f"the mlx backend computes on MLX's default device, here {here!r}, not on {device!r}: leave the device out"
        )


def _dtype(dtype: str | mx.Dtype | None, default: Any) -> Any:
    """float32 on CPU, where it is exact; elsewhere what the checkpoint was written in."""
    if dtype is None:
        return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else default
    name = str(dtype).rpartition(".")[2]
    if name not in DTYPES:
        raise RequestError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_bits(name: str, bits: int) -> None:
    if bits not in BITS:
        raise RequestError(f"{name} must be {' or '.join(map(str, BITS))}, not {bits!r}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
