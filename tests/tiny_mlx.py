"""Tiny seeded models of mlx-lm, made from the tiny configs of ``tiny.py``, and drafts for them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.utils import _get_classes, load_model

import tiny
from dflash.backends.mlx.architectures import completed
from dflash.backends.mlx.load import check_rollback, load_draft
from dflash.backends.mlx.target import MlxTarget

OWN_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"num_experts": 4},
    "qwen3-next": {"num_experts": 4},
    "qwen3.5": {"model_type": "qwen3_5"},
    "qwen3.5-moe": {"model_type": "qwen3_5_moe", "num_experts": 4},
    "lfm2": {
        "block_dim": 32, "block_ff_dim": 48, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2-moe": {"num_experts": 4},
    "granite-hybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "gpt2": {"n_ctx": 512, "num_key_value_heads": 4},
    "gpt-bigcode": {"n_inner": 48, "num_key_value_heads": 1},
    "gpt-neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.25},
    "longcat-flash": {
        "attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
        "num_layers": 2,
    },
}  # fmt: skip
"""Fields that mlx-lm's classes want under other names than transformers' text configs give them."""

_PYTORCH_ONLY = {"bamba", "bart", "bloom", "codegen", "falcon", "falcon-alibi", "gpt-neo", "mpt"}
_UNTRIED = {"gemma3n", "llama4", "mistral-sliding"}

ARCHITECTURES = [name for name in tiny.ARCHITECTURES if name not in _PYTORCH_ONLY | _UNTRIED]
"""Those that mlx-lm has, and has alike. (Its Mistral reads past the window of a config that gives no layer types.)"""


def config(name: str, **overrides: Any) -> dict[str, Any]:
    """What mlx-lm reads of a tiny config."""
    made = tiny.config(name).to_dict()
    return {**made, **completed(made), **OWN_FIELDS.get(name, {}), **overrides}


def model(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model in float32 with random weights large enough that its answers vary."""
    made = config(name, **overrides)
    kind, arguments = _get_classes(made)
    mx.random.seed(seed)
    built = kind(arguments.from_dict(made))

    def weight(path: str, old: mx.array) -> mx.array:
        if old.ndim < 2 or "conv" in path:
            return old
        # Gemma scales its embedding up.
        return mx.random.normal(old.shape) * (0.06 if "embed_tokens" in path and name == "gemma3" else 0.35)

    built.update(tree_map_with_path(weight, built.parameters()))
    mx.eval(built.parameters())
    return built.eval()


def target_of(made: Any, name: str, settings: dict[str, Any]) -> MlxTarget:
    """A model as a target, checked as ``load`` checks it."""
    target = MlxTarget(made, tiny.tokenizer(), name, settings)
    check_rollback(target)
    return target


def converted(made: Any, name: str, folder: Path) -> MlxTarget:
    """A tiny model of transformers, written to a folder and read by mlx-lm."""
    made.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings = {**settings, **completed(settings), **OWN_FIELDS.get(name, {})}
    read, _ = load_model(folder, model_config=settings)
    return target_of(read.eval(), name, settings)


@functools.cache
def target(name: str) -> MlxTarget:
    """A tiny target, shared by the tests of a run: sessions never change it."""
    return target_of(model(name), name, config(name))


def draft(of: Any, folder: Path, *, bits: int | None = None, **overrides: Any) -> Any:
    """The draft that ``tiny.draft`` makes, written by PyTorch and loaded by MLX. Like that it proposes whole blocks."""
    return load_draft(tiny.save_draft(tiny.draft(of, **overrides), folder), bits=bits, min_confidence=0)
