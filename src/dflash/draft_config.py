"""The config of a DFlash draft: one dataclass, one parser for each dialect in the wild, one writer.

Only the fields read here matter. A field that would change the maths and is not understood is
refused, never ignored; fields that name code (auto_map, attention implementations) are never followed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError

ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Rotary scalings whose table does not depend on the length seen so far."""

_MISSING = object()
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash 1 draft: ``num_hidden_layers`` Qwen3-style layers over the target's embedding and head.

    Attributes:
        target_layer_ids: taps; id L is the output of the target's 0-based decoder layer L.
        num_target_layers: layers of the target it was made for, None where the config does not say.
        block_size: the anchor and ``block_size - 1`` masks, as trained.
        mask_token_id: the id whose embedding stands for a position to be filled.
        layer_types: "full_attention" or "sliding_attention" for each layer.
        sliding_window: of the sliding layers, itself included: a query sees ``q - k < sliding_window``.
        causal: for each layer, whether a slot sees only earlier slots of its own block.
        rope_parameters: transformers' form: ``rope_theta``, ``rope_type`` and what scaling needs.
        input_embedding_scale: factor on the target's raw embedding rows.
        output_multiplier: factor on the last hidden state before the head.
        final_logit_softcapping: tanh cap of the logits; None has none.
        dtype: of the weights as written, for example "bfloat16"; None where the config does not say.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    num_target_layers: int | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    causal: tuple[bool, ...] = ()
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        n = self.num_hidden_layers
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * n)
        if not self.causal:
            # Absent means: sliding layers are causal inside the block, full layers see all of it.
            object.__setattr__(self, "causal", tuple(kind == SLIDING for kind in self.layer_types))
        self._check()

    def _check(self) -> None:
        n = self.num_hidden_layers
        for name in _SIZES:
            _positive(name, getattr(self, name))
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 2:
            raise ConfigError(f"block_size must be a whole number of at least 2, not {self.block_size!r}")
        if len(self.layer_types) != n:
            raise ConfigError(f"layer_types names {len(self.layer_types)} layers, num_hidden_layers says {n}")
        strange = sorted(set(self.layer_types) - {FULL, SLIDING})
        if strange:
            raise ConfigError(f"unknown layer type {strange[0]!r}: a DFlash draft has {FULL} and {SLIDING} layers")
        if SLIDING in self.layer_types:
            if self.sliding_window is None:
                raise ConfigError("layer_types has sliding layers, but sliding_window is missing")
            _positive("sliding_window", self.sliding_window)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads"
            )
        ids = self.target_layer_ids
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise ConfigError(f"target_layer_ids must be layer numbers of the target, not {list(ids)!r}")
        if len(set(ids)) != len(ids):
            raise ConfigError(f"target_layer_ids names a layer twice: {list(ids)}")
        if self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            raise ConfigError(
                f"target_layer_ids names layer {max(ids)}, but the draft's own num_target_layers is "
                f"{self.num_target_layers} (valid ids are 0 to {self.num_target_layers - 1})"
            )
        if isinstance(self.mask_token_id, bool) or not isinstance(self.mask_token_id, int) or self.mask_token_id < 0:
            raise ConfigError(f"mask_token_id must be a token id, not {self.mask_token_id!r}")
        for name in ("input_embedding_scale", "output_multiplier", "rms_norm_eps"):
            _positive_number(name, getattr(self, name))
        if self.final_logit_softcapping is not None:
            _positive_number("final_logit_softcapping", self.final_logit_softcapping)
        _positive_number("rope_theta", self.rope_parameters.get("rope_theta"))
        scaling = self.rope_parameters.get("rope_type")
        if scaling not in ROPE_TYPES:
            raise ConfigError(f"rope_type {scaling!r} is not supported; known are {', '.join(ROPE_TYPES)}")

    @property
    def rope_theta(self) -> float:
        """The rotary base in force."""
        return float(self.rope_parameters["rope_theta"])

    @classmethod
    def load(cls, folder: Path) -> DFlashConfig:
        """Read ``config.json`` of a draft folder.

        Raises:
            ConfigError: no or no valid config, or one of another architecture.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no config.json: is it the folder of a DFlash draft?")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must hold a JSON object, not {type(raw).__name__}")
        return cls.parse(raw)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> DFlashConfig:
        """From a config in the published ("z-lab") format, flat or nested, or the speculators format.

        Raises:
            ConfigError: a field is missing, wrong, or would change the maths in a way not known here.
        """
        if raw.get("speculators_model_type") is not None:
            return _parse_speculators(raw)
        return _parse_published(raw)

    def to_published(self) -> dict[str, Any]:
        """The published format; what differs between its dialects is written in both places."""
        rope = dict(self.rope_parameters)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        nested: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
        }
        if self.input_embedding_scale != 1.0:
            nested["input_embedding_scale"] = self.input_embedding_scale
        if self.output_multiplier != 1.0:
            nested["output_multiplier"] = self.output_multiplier
        if self.final_logit_softcapping is not None:
            nested["final_logit_softcapping"] = self.final_logit_softcapping
        if self.causal != tuple(kind == SLIDING for kind in self.layer_types):
            nested["is_causal"] = self.causal[0] if len(set(self.causal)) == 1 else list(self.causal)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
            "rope_parameters": {"rope_type": "default", **rope},
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": self.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "dflash_config": nested,
        }


# --- the published format ---------------------------------------------------------------------------

_SUPPORTED = {"hidden_act": "silu", "attention_dropout": 0.0}
"""Fields with the one value this package computes; the default where they are absent."""

_FOREIGN = (
    "draft_vocab_size",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "markov_rank",
    "fc_norm",
    "num_experts",
    "attention_gate",
    "target_hidden_size",
)
"""Fields of newer or other drafts that would change the maths; None, False and 0 switch them off."""


def _parse_published(raw: Mapping[str, Any]) -> DFlashConfig:
    architectures = raw.get("architectures") or []
    if ARCHITECTURE not in architectures:
        raise ConfigError(
            f"this is no DFlash draft: expected architecture {ARCHITECTURE}, found "
            f"{', '.join(map(str, architectures)) or 'none'}"
        )
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"model_type must be 'qwen3' (the draft's layer kind), not {raw['model_type']!r}")
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"dflash_config must be an object, not {nested!r}")
    return _build(raw, nested)


def _build(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> DFlashConfig:
    """From layer fields in ``raw`` and draft fields in ``nested``, or else in ``raw``: newer configs nest them."""
    for name, value in _SUPPORTED.items():
        if raw.get(name, value) != value:
            raise ConfigError(f"{name} = {raw[name]!r} is not supported; DFlash drafts have {value!r}")
    for name in _FOREIGN:
        value = nested.get(name, raw.get(name))
        if value not in (None, False, 0):
            raise ConfigError(f"{name} = {value!r} belongs to another kind of draft, which is not supported")

    def either(name: str, default: Any = _MISSING) -> Any:
        value = nested.get(name, raw.get(name))
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"{name} is missing from the draft's config: it cannot be guessed")
            return default
        return value

    layers = _need(raw, "num_hidden_layers")
    if isinstance(layers, bool) or not isinstance(layers, int):
        raise ConfigError(f"num_hidden_layers must be a whole number, not {layers!r}")
    heads, hidden = _need(raw, "num_attention_heads"), _need(raw, "hidden_size")
    types = tuple(raw.get("layer_types") or (FULL,) * layers)
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=_need(raw, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        vocab_size=_need(raw, "vocab_size"),
        rms_norm_eps=_need(raw, "rms_norm_eps"),
        max_position_embeddings=_need(raw, "max_position_embeddings"),
        rope_parameters=_rope(raw),
        target_layer_ids=_tuple("target_layer_ids", either("target_layer_ids")),
        mask_token_id=either("mask_token_id"),
        block_size=either("block_size"),
        num_target_layers=either("num_target_layers", None),
        layer_types=types,
        sliding_window=raw.get("sliding_window") if SLIDING in types else None,
        causal=_causal(either("is_causal", None), types),
        attention_bias=bool(raw.get("attention_bias", False)),
        input_embedding_scale=either("input_embedding_scale", 1.0),
        output_multiplier=either("output_multiplier", 1.0),
        final_logit_softcapping=either("final_logit_softcapping", None),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
    )


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Nested wins, flat is the fallback, neither is an error: a wrong base is silent and ruins long prompts."""
    nested = dict(raw.get("rope_parameters") or {})
    scaling = dict(raw.get("rope_scaling") or {})
    theta = nested.get("rope_theta", scaling.get("rope_theta", raw.get("rope_theta")))
    if theta is None:
        raise ConfigError("rope_theta is missing from the draft's config (looked for it flat and in rope_parameters)")
    rope = {**scaling, **nested, "rope_theta": theta}
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if rope["rope_type"] == "default":
        return {"rope_type": "default", "rope_theta": theta}
    return rope


def _causal(value: Any, types: tuple[str, ...]) -> tuple[bool, ...]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (value,) * len(types)
    if isinstance(value, list) and len(value) == len(types) and all(isinstance(v, bool) for v in value):
        return tuple(value)
    raise ConfigError(f"is_causal must be true, false or one of them for each layer, not {value!r}")


# --- the speculators format -------------------------------------------------------------------------


def _parse_speculators(raw: Mapping[str, Any]) -> DFlashConfig:
    kind = raw["speculators_model_type"]
    if kind != "dflash":
        raise ConfigError(f"speculators_model_type must be 'dflash', not {kind!r}")
    if raw.get("sample_from_anchor"):
        raise ConfigError("sample_from_anchor = true is another labelling of the block, which is not supported")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ConfigError("transformer_layer_config is missing from the draft's config")
    draft_vocab = raw.get("draft_vocab_size")
    if draft_vocab not in (None, layer.get("vocab_size")):
        raise ConfigError(
            f"draft_vocab_size = {draft_vocab} differs from the target's {layer.get('vocab_size')}: "
            "drafts with a vocabulary of their own are not supported"
        )
    ids = _tuple("aux_hidden_state_layer_ids", _need(raw, "aux_hidden_state_layer_ids"))
    draft = {
        "target_layer_ids": [i - 1 for i in ids],  # they name a tap by the layer it enters
        "mask_token_id": raw.get("mask_token_id"),
        "block_size": raw.get("block_size"),
    }
    return _build({"dtype": raw.get("dtype") or raw.get("torch_dtype"), **layer}, draft)


# --- checks -----------------------------------------------------------------------------------------


def _need(raw: Mapping[str, Any], name: str) -> Any:
    value = raw.get(name)
    if value is None:
        raise ConfigError(f"{name} is missing from the draft's config")
    return value


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} must be a list, not {value!r}")
    return tuple(value)


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, not {value!r}")


def _positive_number(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= 0:
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
