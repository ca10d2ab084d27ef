"""Tiny seeded models of real architectures, a byte-level tokenizer, and drafts in the published format."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash.backends.torch.attention import group_attention
from dflash.backends.torch.check import check_rollback
from dflash.backends.torch.draft import DFlashDraftModel
from dflash.backends.torch.target import TorchTarget
from dflash.draft_config import DFlashConfig

VOCAB = 64
"""Small, so that random models repeat themselves and drafts are sometimes right by chance."""

WINDOW = 8

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
_SLIDES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}

LEFT_OUT = object()
"""In place of a value of the common part that a config does not take."""

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "norm_topk_prob": True}),
    "mistral-sliding": ("Mistral", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW, "layer_types": _SLIDES, "query_pre_attn_scalar": 8}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _SLIDES,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**_MOE, **_DELTA, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    ),
    "qwen3.5": ("Qwen3_5", _DELTA),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_MOE, **_DELTA, "shared_expert_intermediate_size": 24}),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **_MOE,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "olmo-hybrid": ("OlmoHybrid", {**_DELTA, "linear_num_key_heads": 4}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "falcon-h1": ("FalconH1", _MAMBA),
    "bamba": (
        "Bamba",
        {
            **{key: value for key, value in _MAMBA.items() if key != "mamba_d_ssm"},
            "mamba_n_heads": 8,
            "mamba_expand": 2,
            "attn_layer_indices": [1, 3],
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **{key: value for key, value in _MAMBA.items() if key != "mamba_d_ssm"},
            "mamba_n_heads": 8,
            "mamba_expand": 2,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 8,
        },
    ),
    "gpt2": ("GPT2", {}),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "codegen": ("CodeGen", {"rotary_dim": 8}),
    "gpt-bigcode": ("GPTBigCode", {}),
    "gpt-neo": ("GPTNeo", {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW}),
    "gpt-neox": ("GPTNeoX", {}),
    "falcon": ("Falcon", {"head_dim": LEFT_OUT}),
    "falcon-alibi": ("Falcon", {"head_dim": LEFT_OUT, "alibi": True}),
    "bloom": ("Bloom", {}),
    "mpt": ("Mpt", {}),
    "bart": (
        "Bart",
        {"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "forced_eos_token_id": None},
    ),
    "llama4": (
        "Llama4",
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 1, 1, 0],
            "floor_scale": WINDOW,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "sliding_window": WINDOW,
            "layer_types": _SLIDES,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "longcat-flash": (
        "LongcatFlash",
        {
            "num_key_value_heads": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 4,
            "zero_expert_num": 1,
            "moe_topk": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
"""name -> (transformers' class prefix, what its config needs beside the common part)."""


def config(name: str, **overrides: Any) -> Any:
    """The tiny config of an architecture."""
    prefix, own = ARCHITECTURES[name]
    text = f"{prefix}TextConfig"
    kind = getattr(transformers, text if hasattr(transformers, text) else f"{prefix}Config")
    given = {**_BASE, **own, **overrides}
    return kind(**{key: value for key, value in given.items() if value is not LEFT_OUT})


def model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A tiny model with random weights large enough that its answers vary."""
    torch.manual_seed(seed)
    own = config(name, **overrides)
    made = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(own)](own)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.ndim >= 2 and "conv" not in parameter_name:
                # Gemma scales its embedding up, and ties its head to it.
                parameter.normal_(std=0.06 if "embed_tokens" in parameter_name and name == "gemma3" else 0.35)
    return made.to(dtype).eval()


@functools.cache
def target(name: str, seed: int = 0) -> TorchTarget:
    """A tiny target made as ``load`` makes one, shared by the tests of a run: sessions never change it."""
    made = model(name, seed=seed)
    group_attention(made)
    found = TorchTarget(made, tokenizer(), name)
    check_rollback(found)
    return found


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without merges: ids 0 to 255 are bytes; then the special tokens."""
    return make_tokenizer()


def make_tokenizer(bos: str | None = None) -> PreTrainedTokenizerFast:
    """A fresh tokenizer; with ``bos`` it puts that before raw text, and its chat template prints it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", *([bos] if bos else [])]
    core.add_special_tokens(special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", bos_token=bos, additional_special_tokens=special[1:4]
    )
    made.chat_template = (bos or "") + CHAT_TEMPLATE
    if bos:
        from tokenizers.processors import TemplateProcessing

        core = made.backend_tokenizer
        core.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.convert_tokens_to_ids(bos))]
        )
    return made


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

DRAFTS: dict[str, dict[str, Any]] = {
    "full": {},
    "yarn": {"rope_parameters": YARN},
    "sliding": {
        "num_hidden_layers": 3,
        "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
        "sliding_window": 8,
    },
    "sliding, seeing the whole block": {
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 8,
        "causal": (False, False),
    },
    "a window smaller than the block": {
        "num_hidden_layers": 3,
        "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
        "sliding_window": 3,
        "causal": (False, False, True),
    },
    "causal": {"causal": (True, True)},
    "bias": {"attention_bias": True},
    "a part of the vocabulary": {"draft_vocab_size": 20},
    "scales": {"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 3.0},
}
"""name -> what a draft's config has beside the common part."""


def draft_config(of: TorchTarget, **overrides: Any) -> DFlashConfig:
    """A draft config that fits a target."""
    fields: dict[str, Any] = {
        "hidden_size": of.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": of.vocab_size,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "target_layer_ids": (0, of.num_layers - 1),
        "mask_token_id": of.vocab_size - 1,
        "block_size": 8,
        "num_target_layers": of.num_layers,
        "dtype": "float32",
    }
    return DFlashConfig(**{**fields, **overrides})


def reduced_ids(config: DFlashConfig) -> torch.Tensor:
    """The target's ids of the tokens that such a draft can propose, in no order."""
    return (7 * torch.arange(config.draft_vocab_size) + 3) % config.vocab_size


def draft(of: TorchTarget, *, seed: int = 0, **overrides: Any) -> DFlashDraftModel:
    """A draft with random weights."""
    torch.manual_seed(seed)
    made = DFlashDraftModel(draft_config(of, **overrides))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
            else:
                parameter.uniform_(0.7, 1.3)
    if "draft_vocab_size" in overrides:
        made.d2t.copy_(reduced_ids(made.config) - torch.arange(len(made.d2t)))
    return made.eval().requires_grad_(False)


def save_draft(made: DFlashDraftModel, folder: Path) -> Path:
    """Write a draft in the published format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.config.to_published()))
    save_file({name: tensor.contiguous() for name, tensor in made.state_dict().items()}, folder / "model.safetensors")
    return folder
