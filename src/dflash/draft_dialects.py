"""Reading a draft's config: the published ("z-lab") format, flat or nested, and the speculators format.

Every field is on one of the lists below, or it is refused: a field that is not known here may change what the draft
computes, and then it would only be noticed by drafts that are not accepted. Fields that name code (auto_map,
attention implementations) are never followed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflash.draft_config import ARCHITECTURE, FULL, MOST_LAYERS, ROPE_FIELDS, SLIDING, DFlashConfig, positive
from dflash.errors import ConfigError

_MISSING = object()

# --- what is known ------------------------------------------------------------------------------------

_LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "attention_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window"),
    *("dtype", "torch_dtype"),
)
"""Read from the top of a published config, or from ``transformer_layer_config``."""

_DRAFT_FIELDS = (
    *("target_layer_ids", "mask_token_id", "block_size", "num_target_layers", "target_hidden_size"),
    *("is_causal", "causal", "causal_head", "use_swa", "swa_window_size", "backbone_rotary_base", "draft_vocab_size"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)
"""Read from ``dflash_config`` or, where that lacks them, from the top."""

_VALUES: Mapping[str, tuple[Any, ...]] = {
    # What a DFlash draft computes, for fields that could ask for something else.
    "attention_dropout": (0.0,),
    "attention_mode": ("gqa", "mha"),
    "attention_value_scale": (1.0,),
    "hidden_act": ("silu",),
    "is_neox_style": (True,),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),
    "projector_type": ("dflash",),
    "qk_norm": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "use_qk_norm": (True,),
    # Parts that a DFlash draft lacks, and how a config says that it has none.
    **dict.fromkeys(
        (
            *("attention_gate", "fc_norm", "mlp_bias", "norm_before_fc", "norm_before_residual"),
            *("attention_sink_bias", "add_swa_attention_sink_bias", "add_full_attention_sink_bias", "add_sink_token"),
            *("sample_from_anchor", "shift_label", "enable_confidence_head"),
            *("rope_interleaved", "rope_traditional", "use_mrope"),
        ),
        (False, 0),
    ),
    **dict.fromkeys(
        (
            *("num_experts", "markov_rank", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
            *("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
        ),
        (0, False),
    ),
    **dict.fromkeys(("attn_logit_softcapping", "attention_modes", "eagle_config", "quantization_config"), ()),
}
"""Fields of other drafts, and of layers, with the values that mean what is computed here. None always does."""

_TRAINING = ("num_anchors", "max_anchors", "loss_decay_gamma")
"""Settings of a training run, which trainers leave in the config."""

_HARMLESS_NESTED = (
    *_TRAINING,
    "attention_backend",  # which kernel computes it; never followed
    "mask_token",  # the text of the mask token: its id is what is read
)

_HARMLESS = (
    *_HARMLESS_NESTED,
    # What transformers' ``PretrainedConfig`` and ``Qwen3Config`` write (4.57 and 5.24), and no draft's maths reads.
    *("architectures", "model_type", "auto_map", "custom_pipelines", "transformers_version", "_name_or_path"),
    *("_commit_hash", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
    *("_attn_implementation_internal", "_experts_implementation", "experts_implementation"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class"),
    *("initializer_range", "use_cache", "tie_word_embeddings", "max_window_layers", "return_dict"),
    *("output_hidden_states", "output_attentions", "output_scores", "return_dict_in_generate", "torchscript"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"),
    *("cross_attention_hidden_size", "pruned_heads", "id2label", "label2id", "problem_type", "finetuning_task"),
    *("task_specific_params", "prefix", "use_bfloat16", "tf_legacy_loss"),
    # How an older transformers has it generate text: a draft generates none by itself.
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens",),
    # Where a trainer found the target's embedding and head, and the target's tokens for images.
    *("embed_weight_key", "lm_head_key", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id",),
)
"""Fields outside ``dflash_config`` that change nothing here."""

_ABOVE_LAYER = (
    *("draft_vocab_size", "dtype", "layer_types", "quantization_config", "sample_from_anchor", "sliding_window"),
    *("target_hidden_size", "torch_dtype", "use_sliding_window"),
)
"""Layer fields that the speculators format also has at the top, where they win."""

_SPECULATORS_FIELDS = (
    *_ABOVE_LAYER,
    *("speculators_model_type", "aux_hidden_state_layer_ids", "mask_token_id", "block_size"),
    *("sliding_window_non_causal", "transformer_layer_config"),
    *("speculators_version", "speculators_config", "has_no_defaults_at_init"),  # notes: nothing reads them
)


def _check_known(place: str, given: Mapping[str, Any], fields: Collection[str]) -> None:
    """Refuse what is neither read nor known to change nothing. ``fields`` are those that are."""
    for name, value in given.items():
        if value is None or name in fields:
            continue
        if name in _VALUES:
            if value not in _VALUES[name]:
                known = " or ".join(map(repr, _VALUES[name])) or "null"
                raise ConfigError(
                    f"{name} = {reprlib.repr(value)} in {place} is of another kind of draft, which is not supported "
                    f"(a DFlash draft has {known}): use a draft without it"
                )
            continue
        raise ConfigError(
            f"{name} = {reprlib.repr(value)} in {place} is not known here, and could change what the draft computes: "
            "remove it from config.json if it changes nothing, else use a version of dflash that knows it"
        )


# --- the formats --------------------------------------------------------------------------------------

_NESTED = "dflash_config"


def parse(raw: Mapping[str, Any]) -> DFlashConfig:
    """See ``DFlashConfig.parse``."""
    if raw.get("speculators_model_type") is not None:
        return _parse_speculators(raw)
    architectures = _list("architectures", raw.get("architectures") or [])
    if ARCHITECTURE not in architectures:
        raise ConfigError(
            f"this is no DFlash draft: expected architecture {ARCHITECTURE}, found "
            f"{', '.join(map(str, architectures)) or 'none'}"
        )
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"model_type must be 'qwen3' (the draft's layer kind), not {raw['model_type']!r}")
    nested = _object(_NESTED, raw.get(_NESTED))
    _check_known(_NESTED, nested, (*_DRAFT_FIELDS, "sliding_window", *_HARMLESS_NESTED))
    _check_known("config.json", raw, (*_LAYER_FIELDS, *_DRAFT_FIELDS, *_HARMLESS, _NESTED))
    return _build(raw, nested)


def _parse_speculators(raw: Mapping[str, Any]) -> DFlashConfig:
    kind = raw["speculators_model_type"]
    if kind != "dflash":
        raise ConfigError(f"speculators_model_type must be 'dflash', not {kind!r}")
    ids = _list("aux_hidden_state_layer_ids", _need(raw, "aux_hidden_state_layer_ids"))
    for i in ids:
        positive("an id in aux_hidden_state_layer_ids", i)
    # Its model_type may be the target's: the layers are Qwen3's all the same.
    layer = _object("transformer_layer_config", _need(raw, "transformer_layer_config"))
    _check_known("config.json", raw, (*_SPECULATORS_FIELDS, *_HARMLESS))
    above = {name: raw[name] for name in _ABOVE_LAYER if raw.get(name) is not None}
    layer = {**layer, **above}
    _check_known("transformer_layer_config", layer, (*_LAYER_FIELDS, *_DRAFT_FIELDS, *_HARMLESS))
    draft = {
        "target_layer_ids": [i - 1 for i in ids],  # they name a tap by the layer it enters
        "mask_token_id": raw.get("mask_token_id"),
        "block_size": raw.get("block_size"),
    }
    # Older files lack the field: then no layer is causal inside the block. Full layers never are.
    if _given(raw, "sliding_window_non_causal", True):
        draft["is_causal"] = False
    return _build(layer, draft)


def _build(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> DFlashConfig:
    """From layer fields in ``raw`` and draft fields in ``nested``, or else in ``raw``: newer configs nest them."""

    def either(name: str, default: Any = _MISSING) -> Any:
        value = nested.get(name)
        value = raw.get(name) if value is None else value
        if value is None and default is _MISSING:
            raise ConfigError(f"{name} is missing from the draft's config: it cannot be guessed")
        return default if value is None else value

    layers = positive("num_hidden_layers", _need(raw, "num_hidden_layers"), MOST_LAYERS)
    heads = positive("num_attention_heads", _need(raw, "num_attention_heads"))
    hidden = positive("hidden_size", _need(raw, "hidden_size"))
    vocab = positive("vocab_size", _need(raw, "vocab_size"))
    types = _layer_types(raw, layers)
    rope = _rope(raw)
    for name, other, value in (
        ("target_hidden_size", "hidden_size", hidden),
        ("backbone_rotary_base", "rope_theta", rope["rope_theta"]),
    ):
        if (given := either(name, None)) is not None and given != value:
            raise ConfigError(f"{name} = {given!r} differs from {other} = {value!r}: not supported")
    reduced = either("draft_vocab_size", vocab)
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=_need(raw, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_given(raw, "num_key_value_heads", heads),
        head_dim=_given(raw, "head_dim", hidden // heads),
        vocab_size=vocab,
        rms_norm_eps=_need(raw, "rms_norm_eps"),
        max_position_embeddings=_need(raw, "max_position_embeddings"),
        rope_parameters=rope,
        target_layer_ids=tuple(_list("target_layer_ids", either("target_layer_ids"))),
        mask_token_id=either("mask_token_id"),
        block_size=either("block_size"),
        num_target_layers=either("num_target_layers", None),
        layer_types=types,
        sliding_window=_window(raw, nested, types),
        causal=_causal(raw, nested, layers),
        attention_bias=_given(raw, "attention_bias", False),
        input_embedding_scale=either("input_embedding_scale", 1.0),
        output_multiplier=either("output_multiplier", 1.0),
        final_logit_softcapping=either("final_logit_softcapping", None),
        draft_vocab_size=None if reduced == vocab and not isinstance(reduced, bool) else reduced,
        dtype=_given(raw, "dtype", raw.get("torch_dtype")),
    )


# --- layers and masks ---------------------------------------------------------------------------------


def _layer_types(raw: Mapping[str, Any], layers: int) -> tuple[Any, ...]:
    types = tuple(_list("layer_types", raw.get("layer_types") or [FULL] * layers))
    if raw.get("use_sliding_window") and all(kind == FULL for kind in types):
        raise ConfigError(
            "use_sliding_window is on, but layer_types names no sliding layer: which layers slide cannot be guessed"
        )
    if raw.get("use_sliding_window") is False and SLIDING in types:
        raise ConfigError("layer_types has sliding layers, but use_sliding_window is off")
    return types


def _window(raw: Mapping[str, Any], nested: Mapping[str, Any], types: Sequence[Any]) -> Any:
    """The window of the sliding layers; None where there are none, and nothing says that there should be."""
    draft = [(f"{_NESTED}.{name}", nested.get(name)) for name in ("sliding_window", "swa_window_size")]
    draft.append(("swa_window_size", raw.get("swa_window_size")))
    draft = [(name, value) for name, value in draft if value is not None]
    window = raw.get("sliding_window")
    switch = nested.get("use_swa", raw.get("use_swa"))
    if switch not in (None, True, False):
        raise ConfigError(f"use_swa must be true or false, not {switch!r}")
    if SLIDING in types:
        given = draft if window is None else [*draft, ("sliding_window", window)]
        for name, value in given[1:]:
            if value != given[0][1]:
                raise ConfigError(f"{given[0][0]} is {given[0][1]!r}, but {name} is {value!r}: make them the same")
        return given[0][1] if given else None
    if switch:
        raise ConfigError("use_swa is on, but layer_types names no sliding layer: write which layers slide there")
    if switch is None and draft:
        raise ConfigError(f"{draft[0][0]} is {draft[0][1]!r}, but layer_types names no layer that slides")
    # transformers writes a window for full layers too, and says that it is not used.
    if window is not None and raw.get("layer_types") is None and raw.get("use_sliding_window") is None:
        raise ConfigError(
            f"sliding_window is {window!r}, but the config does not say which layers slide: write layer_types, "
            "or use_sliding_window false"
        )
    return None


def _causal(raw: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """What ``is_causal``, ``causal`` and JetSpec's ``causal_head`` say for each layer; nothing where none says it.

    ``causal`` and ``causal_head`` are of all layers, as vLLM and JetSpec read them. ``causal_head: false`` alone is
    no more than the absence of ``causal_head``.
    """
    said: dict[str, tuple[bool, ...]] = {}
    for place, given in ((f"{_NESTED}.", nested), ("", raw)):
        for name in ("is_causal", "causal", "causal_head"):
            value = given.get(name)
            if isinstance(value, (list, tuple)) and name != "causal_head" and all(isinstance(v, bool) for v in value):
                said[place + name] = tuple(value)
            elif isinstance(value, bool):
                said[place + name] = (value,) * layers
            elif value is not None:
                raise ConfigError(f"{place}{name} must be true, false or one of them for each layer, not {value!r}")
    plain = {name: value for name, value in said.items() if name.endswith("causal_head") and not any(value)}
    spoken = {name: value for name, value in said.items() if name not in plain}
    if not spoken:
        return ()
    first = next(iter(spoken))
    against = [name for name, value in spoken.items() if value != spoken[first]]
    against += [name for name in plain if any(spoken[first])]
    if against:
        raise ConfigError(
            f"{first} and {against[0]} contradict each other: say once which layers are causal inside the block"
        )
    return spoken[first]


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Nested wins, flat is the fallback, neither is an error: a wrong base is silent and ruins long prompts."""
    given = {
        "rope_type": "default",
        "rope_theta": raw.get("rope_theta"),
        **_rope_fields(raw, "rope_scaling"),
        **_rope_fields(raw, "rope_parameters"),
    }
    if given["rope_theta"] is None:
        raise ConfigError("rope_theta is missing from the draft's config (looked for it flat and in rope_parameters)")
    if given["rope_type"] == "default":  # no scaling, whatever else is there
        scaling = {name for needed, optional in ROPE_FIELDS.values() for name in (*needed, *optional)}
        return {name: value for name, value in given.items() if name not in scaling}
    return given


def _rope_fields(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What one of the two objects says; ``type`` is the older name of ``rope_type``."""
    fields = {key: value for key, value in _object(name, raw.get(name)).items() if value is not None}
    if "type" in fields:
        fields.setdefault("rope_type", fields.pop("type"))
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"a partial_rotary_factor in {name} is not supported; DFlash drafts rotate whole heads")
    for image in ("mrope_section", "mrope_interleaved"):  # in text all axes have the same position
        fields.pop(image, None)
    return fields


# --- fields -------------------------------------------------------------------------------------------


def _need(raw: Mapping[str, Any], name: str) -> Any:
    value = raw.get(name)
    if value is None:
        raise ConfigError(f"{name} is missing from the draft's config")
    return value


def _given(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    value = raw.get(name)
    return default if value is None else value


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} must be a list, not {value!r}")
    return value


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be an object, not {value!r}")
    return value or {}
