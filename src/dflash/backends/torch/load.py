"""Loading on PyTorch: targets through transformers, drafts from their published files."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dflash import packages
from dflash.backends.torch.attention import group_attention
from dflash.backends.torch.check import check_rollback
from dflash.backends.torch.draft import DFlashDraftModel
from dflash.backends.torch.gguf import unpacked
from dflash.backends.torch.head import pack_head
from dflash.backends.torch.target import TorchTarget
from dflash.checkpoint import (
    OFFSETS,
    check_files,
    check_weights,
    fetch_target,
    find_weights,
    locate,
    locate_draft,
    token_offsets,
)
from dflash.draft_config import ARCHITECTURE, DFlashConfig, confidence
from dflash.errors import CheckpointError, RequestError, UnsupportedTarget, one_line
from dflash.processors import processors
from dflash.text import repair_decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    id_or_path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> TorchTarget:
    """See ``dflash.load``."""
    place = locate(id_or_path)
    device = _device(device)
    if device.type == "cpu":
        _limit_threads()
    chosen = _dtype(dtype, device, "auto" if place.gguf is None else torch.bfloat16)
    if place.gguf is not None:
        packages.need(packages.GGUF, f"to unpack the .gguf file of {place.name}")
    with _blaming(place.name, "GGUF file"):
        source = None if place.gguf is None else unpacked(Path(place.source) / place.gguf, chosen)
    if source is None:
        source = Path(place.source)
        source = source if source.is_dir() else fetch_target(place.source, revision, trust_remote_code)
        check_files(source)
    with _blaming(place.name, "config"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = _model(place.name, source, config, chosen, trust_remote_code)
    with _blaming(place.name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    repair_decoder(tokenizer)
    model = model.to(device)
    pack_head(model)
    group_attention(model)
    target = TorchTarget(model, tokenizer, place.name)
    check_rollback(target)
    return target


def _model(name: str, folder: Path, config: Any, dtype: Any, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a folder, all of its weights found."""
    if ARCHITECTURE in (config.architectures or []):
        raise UnsupportedTarget(
            f"{name} is a DFlash draft, not a target: load it with load_draft, or give it as --draft"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None and not trust_remote_code:
        raise UnsupportedTarget(f"{name} ({config.model_type}) is no causal language model of transformers")
    # Set here, so that no config can name a kernel to fetch: what it names would be preferred to the argument.
    config._attn_implementation = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    config._experts_implementation = None
    with _blaming(name, "weights"):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # they are told below
            output_loading_info=True,
        )
    for tensor, found, needed in info["mismatched_keys"]:
        raise CheckpointError(f"{name}: {tensor} has shape {list(found)}, its config asks for {list(needed)}")
    if info["missing_keys"]:
        saved_as = ", ".join(config.architectures or [])
        raise CheckpointError(
            f"{name} (saved as {saved_as or 'unknown'}, loaded as {type(model).__name__}) lacks weights for "
            f"{len(info['missing_keys'])} tensors, {sorted(info['missing_keys'])[0]} among them: incomplete download?"
        )
    return model


@contextmanager
def _blaming(name: str, part: str) -> Iterator[None]:
    """Say in our terms what could not be loaded: transformers raises whatever is at hand, tokenizers bare Exception."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedTarget(f"{name} needs a package that is not here: {one_line(error)}") from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedTarget(
                f"{name} comes with Python code of its own, which is not run unless you pass trust_remote_code=True"
            ) from error
        kind = UnsupportedTarget if part == "config" and not isinstance(error, OSError) else CheckpointError
        raise kind(f"transformers cannot read the {part} of {name}: {one_line(error)}") from error


def load_draft(
    id_or_path: str | Path,
    sliding_window_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    bits: int | None = None,
    min_confidence: float | None = None,
) -> DFlashDraftModel:
    """See ``dflash.load_draft``."""
    if bits is not None:
        raise RequestError("a draft is quantized on load by the mlx backend only: leave bits (--draft-bits) out")
    folder = locate_draft(id_or_path, revision)
    config = DFlashConfig.load(folder)
    device = _device(device)
    with torch.device("meta"):
        draft = DFlashDraftModel(config, folder, sliding_window_size)
    weights = find_weights(folder)
    shapes = {name: tuple(p.shape) for name, p in draft.named_parameters()}
    draft.copies = check_weights(folder, weights, config, shapes)
    chosen = _dtype(dtype, device, DTYPES.get(config.dtype or "", torch.bfloat16))
    if chosen == torch.float16 and config.dtype == "bfloat16":
        warnings.warn(
            f"draft {folder.name} was trained in bfloat16; float16 can overflow and then accept nothing", stacklevel=3
        )
    tensors = {}
    for file in weights.files:
        for name, tensor in _stored(file, shapes):
            if tensor.dtype not in DTYPES.values():
                raise CheckpointError(
                    f"{folder.name}: {name} is stored as {tensor.dtype}: quantized drafts are not read"
                )
            tensors[name] = tensor.to(device, chosen)
    if config.draft_vocab_size is not None:
        tensors[OFFSETS] = torch.from_numpy(token_offsets(folder, weights, config)).to(device)
    draft.load_state_dict(tensors, assign=True)
    draft.min_confidence = confidence(min_confidence, str(chosen).rpartition(".")[2], device.type == "cpu")
    draft.rotary_emb = type(draft.rotary_emb)(draft.rotary_emb.config).to(device)  # its tables are no weights
    return draft.eval().requires_grad_(False)


def _stored(file: Path, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Those tensors of a file; no other is read."""
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118
            if name in names:
                yield name, stored.get_tensor(name)


def _device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        try:
            return torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
            raise RequestError(f"no device {device!r} here: there is {', '.join(_devices())}") from error
    return torch.device(_devices()[0])


def _limit_threads() -> None:
    """PyTorch counts processors; a container may be given less of their time. A user's own count is never raised."""
    threads = processors().threads(torch.get_num_threads())
    if threads < torch.get_num_threads():
        torch.set_num_threads(threads)


def _devices() -> list[str]:
    """What this machine has, the best first."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    return [*(["cuda"] if cuda else []), *(["mps"] if mps else []), "cpu"]


def _dtype(dtype: str | torch.dtype | None, device: torch.device, default: Any) -> Any:
    """float32 on CPU, where it is exact and often fastest; elsewhere what the checkpoint was written in."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else default
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise RequestError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
