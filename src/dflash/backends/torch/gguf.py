"""GGUF targets: unpacked once, then loaded like any other folder.

transformers parses a GGUF several times and slowly (40 s for a 135M model); the folder it is unpacked
into loads in a second. It lies in the user's cache and is made again when the file changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

LAYOUT = 2
"""Counts the changes of what is unpacked; folders of an earlier one are not used."""


def unpacked(file: Path, dtype: torch.dtype) -> Path:
    """The folder with the dequantized weights, config and tokenizer of a GGUF file."""
    stat = file.stat()
    key = f"{LAYOUT} {file.resolve()} {stat.st_size} {stat.st_mtime_ns} {dtype} {__version__}"
    folder = cache_dir() / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Made beside its place and moved there whole: an interrupted or parallel run leaves no half folder.
        draft = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            _unpack(file, dtype, draft)
            try:
                draft.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def cache_dir() -> Path:
    """``$DFLASH_CACHE``, or ``dflash`` in the user's cache folder."""
    own = os.environ.get("DFLASH_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dflash"


def _unpack(file: Path, dtype: torch.dtype, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(dtype=dtype, **source)
    # The weights are plain numbers now: what still calls them quantized would be saved along.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(_as_meant(json.loads(config.read_text("utf-8"))), indent=2) + "\n", "utf-8")
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _as_meant(value: Any) -> Any:
    """Numbers of a config as they were before GGUF kept them in float32: 1e-05 instead of 9.999999747378752e-06.

    The shortest decimal that is the same number in float32, which is what models compute with.
    """
    if isinstance(value, dict):
        return {key: _as_meant(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_meant(inner) for inner in value]
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
