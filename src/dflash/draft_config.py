"""The config of a DFlash draft: one dataclass, and a writer for each format. ``draft_dialects`` reads them."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import jsontext
from dflash.errors import ConfigError, RequestError
from dflash.sampling import is_whole

ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Rotary scalings whose table does not depend on the length seen so far: what each needs, and what it may have."""

MOST_LAYERS = 1000
_SIZES = (
    "hidden_size",
    "intermediate_size",
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
        sliding_window: of the sliding layers, itself included: a query sees ``|q - k| < sliding_window``.
        causal: for each layer, whether a slot sees only earlier slots of its own block.
        rope_parameters: transformers' form: ``rope_theta``, ``rope_type`` and what scaling needs.
        input_embedding_scale: factor on the target's raw embedding rows.
        output_multiplier: factor on the last hidden state before the head.
        final_logit_softcapping: tanh cap of the logits; None has none.
        draft_vocab_size: tokens the draft can propose, where it has a head of its own for a part of the vocabulary;
            None where it proposes any token, by the target's head.
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
    draft_vocab_size: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        positive("num_hidden_layers", self.num_hidden_layers, MOST_LAYERS)
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        if not self.causal:
            # Absent means: sliding layers are causal inside the block, full layers see all of it.
            object.__setattr__(self, "causal", tuple(kind == SLIDING for kind in self.layer_types))
        self._check_sizes()
        self._check_layers()
        self._check_draft()
        _check_rope(self.rope_parameters)

    def _check_sizes(self) -> None:
        for name in _SIZES:
            positive(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        for name in ("input_embedding_scale", "output_multiplier", "rms_norm_eps"):
            _positive_number(name, getattr(self, name))
        if self.final_logit_softcapping is not None:
            _positive_number("final_logit_softcapping", self.final_logit_softcapping)
        own = self.draft_vocab_size
        if own is not None and positive("draft_vocab_size", own) >= self.vocab_size:
            raise ConfigError(f"draft_vocab_size = {own} is more than a part of vocab_size = {self.vocab_size}")
        if not isinstance(self.attention_bias, bool):
            raise ConfigError(f"attention_bias must be true or false, not {self.attention_bias!r}")
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise ConfigError(f"dtype must be the name of one, not {self.dtype!r}")

    def _check_layers(self) -> None:
        n = self.num_hidden_layers
        strange = [kind for kind in self.layer_types if kind not in (FULL, SLIDING)]
        if strange:
            raise ConfigError(f"unknown layer type {strange[0]!r}: a DFlash draft has {FULL} and {SLIDING} layers")
        if len(self.layer_types) != n:
            raise ConfigError(f"layer_types names {len(self.layer_types)} layers, num_hidden_layers says {n}")
        if len(self.causal) != n or not all(isinstance(value, bool) for value in self.causal):
            raise ConfigError(f"is_causal must be true, false or one of them for each layer, not {self.causal!r}")
        if SLIDING in self.layer_types:
            if self.sliding_window is None:
                raise ConfigError("layer_types has sliding layers, but sliding_window is missing")
            positive("sliding_window", self.sliding_window)
        elif self.sliding_window is not None:
            raise ConfigError(f"sliding_window is {self.sliding_window!r}, but layer_types has no sliding layer")

    def _check_draft(self) -> None:
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 2:
            raise ConfigError(f"block_size must be a whole number of at least 2, not {self.block_size!r}")
        if isinstance(self.mask_token_id, bool) or not isinstance(self.mask_token_id, int) or self.mask_token_id < 0:
            raise ConfigError(f"mask_token_id must be a token id, not {self.mask_token_id!r}")
        ids = self.target_layer_ids
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise ConfigError(f"target_layer_ids must be layer numbers of the target, not {list(ids)!r}")
        if len(set(ids)) != len(ids):
            raise ConfigError(f"target_layer_ids names a layer twice: {list(ids)}")
        if self.num_target_layers is None:
            return
        positive("num_target_layers", self.num_target_layers)
        if max(ids) >= self.num_target_layers:
            raise ConfigError(
                f"target_layer_ids names layer {max(ids)}, but the draft's own num_target_layers is "
                f"{self.num_target_layers} (valid ids are 0 to {self.num_target_layers - 1})"
            )

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
            raw = jsontext.parse(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must hold a JSON object, not {type(raw).__name__}")
        return cls.parse(raw)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> DFlashConfig:
        """From a config in the published ("z-lab") format, flat or nested, or the speculators format.

        Raises:
            ConfigError: a field is missing, wrong, or could change what is computed in a way not known here.
        """
        from dflash.draft_dialects import parse  # which builds on this module

        return parse(raw)

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
        uniform = len(set(self.causal)) == 1
        if uniform and (self.causal[0] or SLIDING in self.layer_types):
            # For all layers, as vLLM reads it. Older engines take its absence for false, for sliding layers too.
            nested["causal"] = self.causal[0]
        if self.causal != tuple(kind == SLIDING for kind in self.layer_types):
            nested["is_causal"] = self.causal[0] if uniform else list(self.causal)
        reduced = {} if self.draft_vocab_size is None else {"draft_vocab_size": self.draft_vocab_size}
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
            **reduced,
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

    def to_speculators(self, target: str, architectures: Sequence[str]) -> dict[str, Any]:
        """The format of vLLM's speculators library.

        Args:
            target: hub id or path of the target, ``architectures`` its classes: what the format calls verifier.

        Raises:
            ConfigError: something of this draft that the format cannot say.
        """
        sliding = {causal for kind, causal in zip(self.layer_types, self.causal, strict=True) if kind == SLIDING}
        full = {causal for kind, causal in zip(self.layer_types, self.causal, strict=True) if kind == FULL}
        if len(sliding) > 1 or True in full:
            raise ConfigError("the speculators format cannot say which single layers are causal inside the block")
        if (self.input_embedding_scale, self.output_multiplier, self.final_logit_softcapping) != (1.0, 1.0, None):
            raise ConfigError("the speculators format has no embedding scale, output multiplier or softcapping")
        published = self.to_published()
        ours = (
            *("architectures", "dflash_config", "block_size", "draft_vocab_size", "dtype", "torch_dtype"),
            *("rope_theta", "rope_scaling"),
        )
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.block_size - 1}
        return {
            "architectures": [ARCHITECTURE],
            "speculators_model_type": "dflash",
            "speculators_version": "0.5.0",
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "verifier": {"name_or_path": target, "architectures": list(architectures)},
            },
            "aux_hidden_state_layer_ids": [i + 1 for i in self.target_layer_ids],
            "mask_token_id": self.mask_token_id,
            "block_size": self.block_size,
            "draft_vocab_size": self.draft_vocab_size or self.vocab_size,
            "sample_from_anchor": False,
            "sliding_window_non_causal": sliding != {True},
            "dtype": self.dtype,
            "transformer_layer_config": {key: value for key, value in published.items() if key not in ours},
        }


def check_window(size: object) -> int | None:
    """The user's bound on how many committed positions a draft looks back on, as Python's own number.

    Raises:
        RequestError: it is neither None nor positive.
    """
    if size is None:
        return None
    if not is_whole(size) or size < 1:
        raise RequestError(f"sliding_window_size must be a positive whole number or None (no window), not {size!r}")
    return int(size)


FLOAT32_CPU_CONFIDENCE = 0.1
"""Where arithmetic and not memory bounds a forward, every further token to check costs: 8 tokens take half as long
again as one. Blocks that end here lose 2% of a round's tokens and a sixth of its time (``docs/benchmark.md``)."""


def confidence(given: object, dtype: str, on_cpu: bool) -> float:
    """How sure a draft must be of a whole run of tokens to propose it: as given, else by what checking them costs.

    Raises:
        RequestError: it is no probability.
    """
    if given is None:
        return FLOAT32_CPU_CONFIDENCE if on_cpu and dtype == "float32" else 0.0
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not 0 <= float(given) <= 1:
        raise RequestError(f"min_confidence must be a probability from 0 (propose whole blocks) to 1, not {given!r}")
    return float(given)


# --- checks -----------------------------------------------------------------------------------------


def _check_rope(rope: Mapping[str, Any]) -> None:
    kind = rope.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise ConfigError(f"rope_type {kind!r} is not supported; known are {', '.join(ROPE_FIELDS)}")
    needed, optional = ROPE_FIELDS[kind]
    for name in ("rope_theta", *needed):
        if name not in rope:
            raise ConfigError(f"{name} is missing from the draft's rope_parameters (rope_type is {kind!r})")
    for name, value in rope.items():
        if name == "truncate" and name in optional and isinstance(value, bool):
            continue
        if name not in ("rope_type", "rope_theta", *needed, *optional):
            raise ConfigError(f"rope_parameters has {name!r}, which is not known for rope_type {kind!r}")
        if name != "rope_type":
            _positive_number(name, value)
    if rope["rope_theta"] <= 1:
        raise ConfigError(f"rope_theta must be above 1, not {rope['rope_theta']!r}")
    if rope.get("factor", 1) < 1:
        raise ConfigError(f"factor in rope_parameters must be at least 1, not {rope['factor']!r}")
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ConfigError("high_freq_factor must be above low_freq_factor")


def positive(name: str, value: Any, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
    return value


def _positive_number(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
