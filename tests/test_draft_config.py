"""Draft configs: every dialect in the wild gives the same config, and nothing is guessed or ignored."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from dflash.backends.torch.draft import DFlashDraftModel
from dflash.backends.torch.load import load_draft
from dflash.draft_config import FULL, SLIDING, DFlashConfig
from dflash.errors import ConfigError

seeded = settings(derandomize=True, deadline=None, max_examples=200)

# Qwen3-8B's published draft.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": [FULL] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 16,
    "mask_token_id": 151669,
    "draft_vocab_size": 151936,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    "transformer_layer_config": {
        name: PUBLISHED[name]
        for name in (
            *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types"),
            *("max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers"),
            *("num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size"),
        )
    },
}


def changed(raw: dict[str, Any] | None = None, drop: str = "", **fields: Any) -> dict[str, Any]:
    """A config with some fields replaced and one dropped; ``a__b`` is field b of object a."""
    raw = copy.deepcopy(PUBLISHED if raw is None else raw)
    for name, value in fields.items():
        outer, _, inner = name.partition("__")
        (raw[outer] if inner else raw)[inner or outer] = value
    raw.pop(drop, None)
    return raw


def short(value: Any) -> str:
    return ascii(value)[:20]


# --- dialects ---------------------------------------------------------------------------------------


def test_published_config_is_read() -> None:
    config = DFlashConfig.parse(PUBLISHED)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (16, 151669, 36)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (4096, 5, 128)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert (config.causal, config.layer_types, config.dtype) == ((False,) * 5, (FULL,) * 5, "bfloat16")


def nested_block() -> dict[str, Any]:
    return changed(drop="block_size", dflash_config={**PUBLISHED["dflash_config"], "block_size": 16})


def all_nested() -> dict[str, Any]:
    raw = changed(nested_block(), drop="num_target_layers", dflash_config__num_target_layers=36)
    return changed(raw, drop="rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 1000000})


def all_flat() -> dict[str, Any]:
    return changed(drop="dflash_config", **PUBLISHED["dflash_config"])


def both_places() -> dict[str, Any]:
    return changed(mask_token_id=151669, dflash_config__block_size=16, block_size=99)


@pytest.mark.parametrize("dialect", [nested_block, all_nested, all_flat, both_places])
def test_dialects_of_the_published_format_read_alike(dialect: Any) -> None:
    assert DFlashConfig.parse(dialect()) == DFlashConfig.parse(PUBLISHED)


def test_speculators_format_reads_alike_with_its_layer_ids_counted_from_one() -> None:
    read = DFlashConfig.parse(SPECULATORS)
    assert read == DFlashConfig.parse(changed(num_target_layers=None, dtype=None))


def test_speculators_sliding_fields_may_lie_above_the_layer_config() -> None:
    types = [SLIDING] * 4 + [FULL]
    raw = changed(SPECULATORS, layer_types=types, sliding_window=2048, use_sliding_window=True)
    config = DFlashConfig.parse(raw)
    assert (config.layer_types, config.sliding_window) == (tuple(types), 2048)
    assert config.causal == (True,) * 4 + (False,)


@pytest.mark.parametrize("non_causal", [True, None])
def test_speculators_sliding_layers_are_causal_only_where_the_file_says_so(non_causal: bool | None) -> None:
    raw = changed(SPECULATORS, layer_types=[SLIDING] * 5, sliding_window=64, sliding_window_non_causal=non_causal)
    assert DFlashConfig.parse(raw).causal == (False,) * 5


YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}

# layers, block, taps, target layers, and what else is special: dflash-facts.md.
SHAPES: dict[str, tuple[int, int, list[int], int, dict[str, Any]]] = {
    "Qwen3-8B": (5, 16, [1, 9, 17, 25, 33], 36, {}),
    "Llama-3.1-8B": (5, 10, [1, 8, 15, 22, 29], 32, {"rope_theta": 500000.0, "vocab_size": 128256}),
    "Qwen3-Coder-30B-A3B": (8, 16, [1, 12, 23, 34, 45], 48, {"hidden_size": 2048, "rope_theta": 10000000}),
    "Qwen3.5-4B": (6, 16, [1, 5, 9, 13, 17, 21, 25, 29], 32, {"hidden_size": 2560, "head_dim": 256}),
    "Qwen3.6-27B": (
        *(5, 16, [1, 16, 31, 46, 61], 64),
        {"layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 2048, "use_sliding_window": True},
    ),
    "gpt-oss-20b": (8, 8, [1, 6, 11, 16, 21], 24, {"hidden_size": 2880, "head_dim": 64, "num_attention_heads": 64}),
    "Kimi-K2.5": (
        *(6, 8, [1, 12, 24, 35, 47, 58], 61),
        {"hidden_size": 7168, "num_attention_heads": 64, "rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 50000},
    ),
}


JETSPEC = changed(  # JetSpec/jetspec-Qwen3.6-35B-A3B
    changed(drop="rope_theta", rope_parameters={"rope_theta": 10000000, "rope_type": "default"}),
    dflash_config={"causal_head": True, "mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=8,
    layer_types=[FULL] * 8,
    num_key_value_heads=4,
    num_target_layers=40,
    vocab_size=248320,
)
REDHAT = {  # speculators' layout for a Gemma target: the layers' config says "llama" and is written as a difference
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "dtype": "bfloat16",
    "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
    "block_size": 8,
    "mask_token_id": 4,
    "max_anchors": 3072,
    "draft_vocab_size": 32000,
    "target_hidden_size": None,
    "transformer_layer_config": {
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 262144,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "vocab_size": 262144,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
MIMO = {  # XiaomiMiMo's draft: learned sinks, scaled values, half-rotated heads
    "num_anchors": 4096,
    "loss_decay_gamma": 7.0,
    "use_swa": True,
    "swa_window_size": 1024,
    "block_size": 8,
    "backbone_rotary_base": 1000000,
    "attention_value_scale": 0.612,
    "attention_sink_bias": True,
}


def test_published_drafts_of_other_trainers_are_read_or_refused_for_what_they_need() -> None:
    jetspec, redhat = DFlashConfig.parse(JETSPEC), DFlashConfig.parse(REDHAT)
    assert (jetspec.causal, jetspec.rope_theta) == ((True,) * 8, 10000000)
    assert (redhat.draft_vocab_size, redhat.vocab_size, redhat.causal) == (32000, 262144, (False,) * 5)
    assert redhat.target_layer_ids == (0, 16, 28, 46, 57)
    with pytest.raises(ConfigError, match=r"attention_value_scale = 0\.612 in dflash_config"):
        DFlashConfig.parse(changed(dflash_config={**PUBLISHED["dflash_config"], **MIMO}))


@pytest.mark.parametrize("name", SHAPES)
def test_every_published_shape_is_read(name: str) -> None:
    layers, block, taps, target_layers, special = SHAPES[name]
    raw = changed(
        num_hidden_layers=layers,
        block_size=block,
        num_target_layers=target_layers,
        dflash_config__target_layer_ids=taps,
        **{"layer_types": [FULL] * layers, **special},
    )
    config = DFlashConfig.parse(raw)
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (layers, block, tuple(taps))
    assert list(config.layer_types) == raw["layer_types"]
    assert config.rope_theta == raw["rope_theta"]
    assert config.rope_parameters["rope_type"] == ("yarn" if "rope_scaling" in special else "default")


# --- rotary positions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flat", "scaling", "nested"),
    [
        (50000, YARN, None),
        (None, None, {**YARN, "rope_theta": 50000}),
        (50000, None, YARN),
        (50000, {key if key != "rope_type" else "type": value for key, value in YARN.items()}, None),
        (None, {**YARN, "rope_theta": 50000}, None),
        (7, {**YARN, "factor": 2.0}, {**YARN, "rope_theta": 50000}),
    ],
)
def test_rope_is_found_flat_nested_and_mixed(flat: Any, scaling: Any, nested: Any) -> None:
    raw = changed(rope_theta=flat, rope_scaling=scaling, rope_parameters=nested)
    assert DFlashConfig.parse(raw).rope_parameters == {**YARN, "rope_theta": 50000}


@pytest.mark.parametrize("nested", [None, {}, {"rope_type": "default"}])
def test_missing_rope_base_is_named(nested: Any) -> None:
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        DFlashConfig.parse(changed(drop="rope_theta", rope_parameters=nested))


def test_nested_rope_base_wins_over_a_different_flat_one() -> None:
    raw = changed(rope_theta=1000000, rope_parameters={"rope_theta": 10000000})
    assert DFlashConfig.parse(raw).rope_theta == 10000000.0


@pytest.mark.parametrize("default", [None, {}, {"rope_type": "default"}, {"type": "default", "factor": 1.0}])
def test_default_rope_is_no_scaling(default: Any) -> None:
    config = DFlashConfig.parse(changed(rope_scaling=default))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}


def test_axes_for_images_do_not_matter_to_text() -> None:
    scaling = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    assert DFlashConfig.parse(changed(rope_scaling=scaling)) == DFlashConfig.parse(PUBLISHED)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0},
        {"rope_type": ["yarn"]},
        {"rope_type": "default", "partial_rotary_factor": 0.25},
        {"rope_type": "default", "unheard_of": 1},
        {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
        {"rope_type": "yarn", "factor": 4.0},
        {**YARN, "factor": 0},
        {**YARN, "factor": "4"},
        {**YARN, "truncate": "no"},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_scaling_that_is_unknown_or_incomplete_is_refused(place: str, scaling: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DFlashConfig.parse(changed(**{place: scaling}))


@pytest.mark.parametrize(
    "theta", [0, -1, 1, math.nan, math.inf, "10000", True, [1e6], 10**400], ids=lambda v: str(v)[:9]
)
def test_rope_base_that_is_none_is_refused(theta: Any) -> None:
    with pytest.raises(ConfigError, match="rope_theta"):
        DFlashConfig.parse(changed(rope_theta=theta))


# --- layers and masks -------------------------------------------------------------------------------


def sliding(types: list[str], **fields: Any) -> dict[str, Any]:
    return changed(**{"layer_types": types, "sliding_window": 64, "use_sliding_window": True, **fields})


def test_sliding_layers_are_causal_and_full_ones_are_not_unless_the_file_says_so() -> None:
    types = [SLIDING, FULL, SLIDING, FULL, FULL]
    assert DFlashConfig.parse(sliding(types)).causal == (True, False, True, False, False)
    for place in ("is_causal", "dflash_config__is_causal", "causal", "dflash_config__causal"):
        for value in (True, False):
            assert DFlashConfig.parse(sliding(types, **{place: value})).causal == (value,) * 5
    each = [False, False, True, True, False]
    assert DFlashConfig.parse(sliding(types, is_causal=each)).causal == tuple(each)


@pytest.mark.parametrize("place", ["causal_head", "dflash_config__causal_head"])
def test_jetspecs_causal_head_makes_every_layer_causal(place: str) -> None:
    assert DFlashConfig.parse(changed(**{place: True})).causal == (True,) * 5
    types = [SLIDING, FULL, SLIDING, FULL, FULL]
    assert DFlashConfig.parse(sliding(types, **{place: True})).causal == (True,) * 5
    assert DFlashConfig.parse(sliding(types, **{place: True, "dflash_config__causal": True})).causal == (True,) * 5
    assert DFlashConfig.parse(changed(**{place: False})) == DFlashConfig.parse(PUBLISHED)
    assert DFlashConfig.parse(sliding(types, **{place: False})).causal == (True, False, True, False, False)
    written = DFlashConfig.parse(changed(**{place: True})).to_published()["dflash_config"]
    assert written["causal"] is True


@pytest.mark.parametrize(
    "fields",
    [
        {"dflash_config__causal_head": True, "dflash_config__causal": False},
        {"dflash_config__causal_head": True, "is_causal": False},
        {"dflash_config__causal_head": False, "dflash_config__causal": True},
        {"dflash_config__causal_head": True, "is_causal": [True, True, False, True, True]},
        {"is_causal": True, "dflash_config__causal": False},
    ],
    ids=str,
)
def test_masks_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        DFlashConfig.parse(changed(**fields))


def test_window_that_full_layers_do_not_use_has_no_effect() -> None:
    assert DFlashConfig.parse(changed(sliding_window=4096)) == DFlashConfig.parse(PUBLISHED)
    assert DFlashConfig.parse(changed(drop="layer_types")) == DFlashConfig.parse(PUBLISHED)
    assert DFlashConfig.parse(changed(drop="layer_types", sliding_window=4096)) == DFlashConfig.parse(PUBLISHED)
    assert DFlashConfig.parse(changed(drop="use_sliding_window", sliding_window=64)) == DFlashConfig.parse(PUBLISHED)
    off = {"dflash_config__use_swa": False, "dflash_config__swa_window_size": 1024}
    assert DFlashConfig.parse(changed(**off)) == DFlashConfig.parse(PUBLISHED)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (changed(changed(drop="layer_types"), drop="use_sliding_window", sliding_window=64), "sliding_window"),
        (changed(use_sliding_window=True, sliding_window=64), "use_sliding_window"),
        (changed(dflash_config__use_swa=True, sliding_window=64), "use_swa"),
        (changed(drop="layer_types", dflash_config__use_swa=True, sliding_window=64), "use_swa"),
        (changed(dflash_config__sliding_window=64), "sliding_window"),
        (changed(dflash_config__swa_window_size=64), "swa_window_size"),
        (changed(dflash_config__use_swa=1024), "use_swa"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_window_without_a_layer_that_slides_is_refused(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DFlashConfig.parse(raw)


def test_window_without_a_layer_that_slides_makes_no_config() -> None:
    with pytest.raises(ConfigError, match="sliding_window is 64"):
        tiny.draft_config(tiny.target("llama"), sliding_window=64)


def test_window_of_sliding_layers_is_found_in_either_place() -> None:
    types = [SLIDING] * 5
    for name in ("sliding_window", "swa_window_size"):
        inner = {f"dflash_config__{name}": 64}
        for outer in (None, 64):
            config = DFlashConfig.parse(sliding(types, sliding_window=outer, dflash_config__use_swa=True, **inner))
            assert config.sliding_window == 64
        with pytest.raises(ConfigError, match=f"{name} is 64, but sliding_window is 2048"):
            DFlashConfig.parse(sliding(types, sliding_window=2048, **inner))


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (sliding([SLIDING] * 5, sliding_window=None), "sliding_window"),
        (sliding([SLIDING] * 5, sliding_window=0), "sliding_window"),
        (sliding([SLIDING] * 4), "layer_types"),
        (sliding([SLIDING] * 6), "layer_types"),
        (sliding(["linear_attention"] * 5), "linear_attention"),
        (sliding([SLIDING] * 5, use_sliding_window=False), "use_sliding_window"),
        (changed(drop="layer_types", use_sliding_window=True, sliding_window=64), "layer_types"),
        (sliding([SLIDING] * 5, is_causal=[True] * 4), "is_causal"),
        (sliding([SLIDING] * 5, is_causal="yes"), "is_causal"),
        (sliding([SLIDING] * 5, is_causal=1), "is_causal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_contradict_each_other_are_refused(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DFlashConfig.parse(raw)


# --- nothing is guessed, nothing is ignored ---------------------------------------------------------

NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("rms_norm_eps", "max_position_embeddings", "rope_theta", "block_size"),
)


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("null", [False, True])
def test_missing_field_is_named(name: str, null: bool) -> None:
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        DFlashConfig.parse(changed(**{name: None}) if null else changed(drop=name))


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_missing_draft_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        DFlashConfig.parse(changed(**{f"dflash_config__{name}": None}))


@pytest.mark.parametrize(
    "name", ["aux_hidden_state_layer_ids", "mask_token_id", "block_size", "transformer_layer_config"]
)
def test_missing_speculators_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        DFlashConfig.parse(changed(SPECULATORS, drop=name))


def test_number_of_target_layers_may_be_absent() -> None:
    config = DFlashConfig.parse(changed(drop="num_target_layers"))
    assert config.num_target_layers is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("partial_rotary_factor", 0.5),
        ("draft_vocab_size", 151937),
        ("target_hidden_size", 5120),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_experts", 16),
        *((f"dflash_config__{name}", value) for name, value in [("projector_type", "domino"), ("markov_rank", 256)]),
        *((f"dflash_config__{name}", value) for name, value in [("attention_mode", "mla"), ("shift_label", True)]),
        *((f"dflash_config__{name}", value) for name, value in [("selector_rank", 256), ("conv_kernel_size", 2)]),
        ("dflash_config__attention_modes", ["gqa", "kda"]),
        ("sample_from_anchor", True),
        *((f"dflash_config__{name}", value) for name, value in [("pure_draft_prefix_len", 1), ("emb_dim", 256)]),
        *((f"dflash_config__{name}", value) for name, value in [("gru_hidden_dim", 1024), ("fc_norm", True)]),
        *((f"dflash_config__{name}", value) for name, value in [("use_aux_hidden_state", False)]),
        *((name, True) for name in ("add_swa_attention_sink_bias", "mlp_bias", "quantization")),
        *(("logit_scale", value) for value in (0, 0.5)),
        ("eagle_config", {"use_aux_hidden_state": False}),
        *(
            (place + name, value)
            for place in ("", "dflash_config__")
            for name, value in [
                *(("attention_sink_bias", True), ("attn_logit_softcapping", 50.0), ("rope_is_neox_style", False)),
                *(("attention_value_scale", 0.612), ("add_sink_token", True), ("backbone_rotary_base", 5000000)),
                *(("never_heard_of", 1), ("never_heard_of", 0), ("never_heard_of", "text"), ("never_heard_of", {})),
                *(("never_heard_of", False), ("use_rope", False), ("use_input_layernorm", False)),
            ]
        ),
    ],
)
def test_field_that_would_change_the_maths_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name.split("__")[-1]):
        DFlashConfig.parse(changed(**{name: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_vocab_size": 151936, "target_hidden_size": 4096, "num_experts": 0, "quantization_config": None},
        {"dflash_config__projector_type": "dflash", "dflash_config__attention_mode": "gqa"},
        {"dflash_config__shift_label": False, "dflash_config__markov_rank": None},
        {"auto_map": {"AutoModel": "evil.Model"}, "attn_implementation": "someone/kernel"},
        {"_attn_implementation": "someone/kernel", "custom_pipelines": {"x": {"impl": "evil.Pipe"}}},
        {"dflash_config__attention_sink_bias": False, "dflash_config__rope_is_neox_style": True},
        {"attn_logit_softcapping": None, "rope_is_neox_style": True, "logit_scale": 1.0, "pretraining_tp": 1},
        {"dflash_config__mask_token": "<|MASK|>", "dflash_config__use_aux_hidden_state": True, "is_neox_style": True},
        {"dflash_config__num_anchors": 4096, "dflash_config__loss_decay_gamma": 7.0, "max_anchors": 3072},
        {"dflash_config__backbone_rotary_base": 1000000, "never_heard_of": None, "dflash_config__unheard_of": None},
    ],
    ids=str,
)
def test_field_that_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert DFlashConfig.parse(changed(**fields)) == DFlashConfig.parse(PUBLISHED)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_vocab_size": 151937}, "draft_vocab_size"),
        ({"target_hidden_size": 5120}, "target_hidden_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type"),
        ({"aux_hidden_state_layer_ids": [0, 10]}, "aux_hidden_state_layer_ids"),
        ({"transformer_layer_config__hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_speculators_field_that_would_change_the_maths_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DFlashConfig.parse(changed(SPECULATORS, **fields))


def test_refusal_of_an_unknown_field_says_where_what_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        DFlashConfig.parse(changed(dflash_config__never_heard_of=[1, 2]))
    for part in ("never_heard_of = [1, 2] in dflash_config", "not known here", "remove it from config.json"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", [transformers.Qwen3Config, transformers.LlamaConfig])
@pytest.mark.parametrize("whole", [True, False])
def test_whatever_transformers_writes_of_a_config_by_itself_is_known(kind: Any, whole: bool) -> None:
    own = {
        name: value for name, value in PUBLISHED.items() if name not in ("rope_scaling", "architectures", "auto_map")
    }
    made = kind(**{**own, "sliding_window": 4096, "model_type": "qwen3"}, architectures=["DFlashDraftModel"])
    written = {**(made.to_dict() if whole else made.to_diff_dict()), "model_type": "qwen3"}
    written = {"rope_theta": 1000000, "architectures": ["DFlashDraftModel"], **written}
    assert DFlashConfig.parse(json.loads(json.dumps(written, default=str))) == DFlashConfig.parse(PUBLISHED)


def test_a_reduced_vocabulary_is_read_from_either_format_and_written_to_both() -> None:
    flat = DFlashConfig.parse(changed(draft_vocab_size=32000))
    assert (flat.draft_vocab_size, flat.vocab_size) == (32000, 151936)
    assert flat.to_published()["draft_vocab_size"] == 32000
    raw = changed(SPECULATORS, draft_vocab_size=32000)
    assert DFlashConfig.parse(raw) == DFlashConfig.parse(
        changed(draft_vocab_size=32000, num_target_layers=None, dtype=None)
    )
    assert flat.to_speculators("a/b", [])["draft_vocab_size"] == 32000
    assert DFlashConfig.parse(flat.to_speculators("a/b", [])) == flat


def test_layers_of_a_speculators_draft_are_qwen3s_whatever_their_config_was_made_from() -> None:
    """As RedHatAI publishes them for targets of other families."""
    raw = changed(SPECULATORS, transformer_layer_config__model_type="llama", max_anchors=3072, target_hidden_size=None)
    assert DFlashConfig.parse(raw) == DFlashConfig.parse(SPECULATORS)


@pytest.mark.parametrize("name", ["never_heard_of", "transformer_layer_config__never_heard_of", "attention_sink_bias"])
def test_unknown_field_of_a_speculators_config_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name.split("__")[-1]):
        DFlashConfig.parse(changed(SPECULATORS, **{name: 3}))


@pytest.mark.parametrize("architectures", [["DFlash2DraftModel"], ["Qwen3Model"], [], None, "DFlashDraftModel", 5])
def test_other_architecture_is_refused(architectures: Any) -> None:
    with pytest.raises(ConfigError, match="architecture"):
        DFlashConfig.parse(changed(architectures=architectures))


def test_other_layer_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type"):
        DFlashConfig.parse(changed(model_type="llama"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dflash_config__target_layer_ids": [1, 9, 36]}, "36"),
        ({"dflash_config__target_layer_ids": [1, 1]}, "twice"),
        ({"dflash_config__target_layer_ids": []}, "target_layer_ids"),
        ({"dflash_config__target_layer_ids": [-1]}, "target_layer_ids"),
        ({"dflash_config__mask_token_id": -1}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 5}, "5 key-value heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 127}, "head_dim"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"dtype": ["bfloat16"]}, "dtype"),
        ({"dflash_config__final_logit_softcapping": 0}, "final_logit_softcapping"),
        ({"dflash_config__output_multiplier": -1}, "output_multiplier"),
        ({"dflash_config": ["mask_token_id"]}, "dflash_config"),
    ],
    ids=str,
)
def test_senseless_value_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DFlashConfig.parse(changed(**fields))


def test_scales_and_cap_are_read_from_either_place() -> None:
    for prefix in ("", "dflash_config__"):
        fields = {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
        config = DFlashConfig.parse(changed(**{prefix + name: value for name, value in fields.items()}))
        assert {name: getattr(config, name) for name in fields} == fields


# --- any JSON ---------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)
FIELDS = [
    *(f"{name}" for name in PUBLISHED),
    *(f"dflash_config__{name}" for name in ("mask_token_id", "target_layer_ids", "block_size", "is_causal", "causal")),
    *("is_causal", "rope_parameters", "num_experts", "draft_vocab_size", "partial_rotary_factor", "attention_modes"),
    *("input_embedding_scale", "final_logit_softcapping", "torch_dtype", "speculators_model_type", "projector_type"),
    *("causal_head", "use_swa", "swa_window_size", "backbone_rotary_base", "attention_sink_bias", "unheard_of"),
    *(f"dflash_config__{name}" for name in ("causal_head", "sliding_window", "use_swa", "num_anchors", "unheard_of")),
]
SPECULATORS_FIELDS = [*SPECULATORS, "layer_types", "transformer_layer_config__rope_theta"]
ROPE_FIELDS = [*YARN, "type", "truncate", "mrope_section", "unheard_of"]


def read_or_refused(raw: Any) -> DFlashConfig | None:
    """What is read can be written and read again; anything else is a ConfigError, never an accident."""
    try:
        config = DFlashConfig.parse(raw)
    except ConfigError:
        return None
    assert DFlashConfig.parse(json.loads(json.dumps(config.to_published()))) == config
    return config


@pytest.mark.parametrize("name", FIELDS)
@given(value=anything)
@settings(seeded, max_examples=25)
def test_any_value_of_a_field_is_read_or_refused(name: str, value: Any) -> None:
    read_or_refused(changed(sliding([SLIDING] * 5), **{name: value}))


@pytest.mark.parametrize("name", SPECULATORS_FIELDS)
@given(value=anything)
@settings(seeded, max_examples=25)
def test_any_value_of_a_speculators_field_is_read_or_refused(name: str, value: Any) -> None:
    read_or_refused(changed(SPECULATORS, **{name: value}))


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ROPE_FIELDS)
@given(value=anything | st.sampled_from(["default", "linear", "llama3", 1e-300, 1e300]))
@settings(seeded, max_examples=20)
def test_any_value_of_a_rope_field_makes_finite_frequencies_or_is_refused(place: str, name: str, value: Any) -> None:
    config = read_or_refused(changed(rope_scaling=dict(YARN), rope_parameters={}, **{f"{place}__{name}": value}))
    if config is not None:
        draft = DFlashDraftModel(tiny.draft_config(tiny.target("llama"), rope_parameters=config.rope_parameters))
        assert draft.rotary_emb.inv_freq.isfinite().all()


@given(ids=st.lists(scalars, max_size=3), types=st.lists(anything, max_size=5), causal=st.lists(anything, max_size=5))
@settings(seeded, max_examples=50)
def test_any_items_of_lists_are_read_or_refused(ids: list[Any], types: list[Any], causal: list[Any]) -> None:
    read_or_refused(changed(dflash_config__target_layer_ids=ids))
    read_or_refused(changed(SPECULATORS, aux_hidden_state_layer_ids=ids))
    read_or_refused(changed(layer_types=types))
    read_or_refused(changed(is_causal=causal))


@st.composite
def configs(draw: st.DrawFn) -> DFlashConfig:
    layers = draw(st.integers(1, 4))
    types = tuple(draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=layers, max_size=layers)))
    vocab = draw(st.integers(2, 99))
    rope = draw(st.sampled_from([{"rope_type": "default"}, YARN, {"rope_type": "linear", "factor": 2}]))
    return DFlashConfig(
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 9)),
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([2, 8])),
        vocab_size=vocab,
        rms_norm_eps=draw(st.floats(1e-9, 1)),
        max_position_embeddings=draw(st.integers(1, 99)),
        rope_parameters={**rope, "rope_theta": draw(st.integers(2, 10**7) | st.floats(2, 1e7))},
        target_layer_ids=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))),
        mask_token_id=draw(st.integers(0, 99)),
        block_size=draw(st.integers(2, 16)),
        num_target_layers=draw(st.none() | st.integers(10, 20)),
        layer_types=types,
        sliding_window=draw(st.integers(1, 99)) if SLIDING in types else None,
        causal=tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers) | st.just([]))),
        attention_bias=draw(st.booleans()),
        input_embedding_scale=draw(st.floats(0.1, 9)),
        output_multiplier=draw(st.sampled_from([1.0, 0.5])),
        final_logit_softcapping=draw(st.none() | st.floats(1, 99)),
        draft_vocab_size=draw(st.none() | st.integers(1, vocab - 1)),
        dtype=draw(st.sampled_from([None, "bfloat16", "float32"])),
    )


@given(config=configs())
@seeded
def test_what_is_written_reads_back_the_same(config: DFlashConfig) -> None:
    assert DFlashConfig.parse(json.loads(json.dumps(config.to_published()))) == config


def test_uniform_masks_are_written_in_both_spellings() -> None:
    config = DFlashConfig.parse(sliding([SLIDING] * 5, is_causal=False))
    assert config.to_published()["dflash_config"]["causal"] is False


# --- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", "null", "\ufeff{}", "[" * 100_000, '"DFlashDraftModel"'], ids=ascii
)
def test_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        DFlashConfig.load(tmp_path)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.json"):
        DFlashConfig.load(tmp_path)


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        DFlashConfig.load(tmp_path)


def test_code_that_a_draft_names_does_not_run(tmp_path: Path) -> None:
    folder = tiny.save_draft(tiny.draft(tiny.target("llama")), tmp_path / "draft")
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Model: pass\nclass Config: pass\n")
    raw = json.loads((folder / "config.json").read_text())
    raw["auto_map"] = {"AutoModel": "evil.Model", "AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    raw["attn_implementation"] = raw["_attn_implementation"] = "someone/evil-kernel"
    (folder / "config.json").write_text(json.dumps(raw))
    load_draft(folder)
    assert not marker.exists()
