"""Where a draft's weights begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from dflash.backends.torch.architectures import sizes
from dflash.backends.torch.draft import DFlashDraftModel, DraftLayer
from dflash.backends.torch.target import TorchTarget
from dflash.draft_config import DFlashConfig
from dflash.errors import RequestError

STARTS = ("target", "random")


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """The published default: ``round(1 + i * (N - 4) / (n - 1))``; one tap is the middle layer."""
    if not 1 <= count <= layers:
        raise RequestError(f"a target of {layers} layers can be tapped at 1 to {layers} of them, not at {count}")
    if count == 1:
        return (layers // 2,)
    taps = tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    if len(set(taps)) < count or min(taps) < 0:
        return tuple(sorted({round(i * (layers - 1) / (count - 1)) for i in range(count)}))
    return taps


def default_mask_token(target: TorchTarget) -> int:
    """A row of the embedding that text does not use: the last padded row, else a special token that ends nothing.

    Raises:
        RequestError: there is none that is safe.
    """
    used = 1 + max(target.tokenizer.get_vocab().values())
    if used < target.vocab_size:
        return target.vocab_size - 1
    tokenizer = target.tokenizer
    special = set(tokenizer.added_tokens_decoder)
    taken = set(target.eos_ids) | {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    free: list[int] = [
        i for i in sorted(special) if i not in taken and tokenizer.added_tokens_decoder[i].content not in template
    ]
    if not free:
        raise RequestError(
            f"{target.name} has no row of its embedding that text does not use: name one with --mask-token"
        )
    return free[-1]


def check_mask_token(target: TorchTarget, token: int) -> None:
    """Raises:
    RequestError: not a row of the embedding, or an id that ends answers.
    """
    if not 0 <= token < target.vocab_size:
        raise RequestError(f"mask token {token} is no row of the target's embedding (0 to {target.vocab_size - 1})")
    if token in target.eos_ids:
        raise RequestError(f"mask token {token} ends answers of {target.name}: choose one that text does not use")


def draft_config(
    target: TorchTarget,
    *,
    layers: int,
    taps: Sequence[int],
    block_size: int,
    mask_token: int,
    sliding_layers: int = 0,
    sliding_window: int | None = None,
) -> DFlashConfig:
    """A draft for a target, of the target's own widths.

    Raises:
        ConfigError, RequestError: sizes that make no draft.
    """
    own = sizes(target.anatomy.config)
    if not 0 <= sliding_layers <= layers:
        raise RequestError(f"{sliding_layers} of {layers} layers cannot be sliding")
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=own.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads,
        head_dim=own.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=own.norm_eps,
        max_position_embeddings=target.context_length or 4096,
        rope_parameters={"rope_type": "default", "rope_theta": own.rope_theta},
        target_layer_ids=tuple(taps),
        mask_token_id=mask_token,
        block_size=block_size,
        num_target_layers=target.num_layers,
        layer_types=("sliding_attention",) * sliding_layers + ("full_attention",) * (layers - sliding_layers),
        sliding_window=sliding_window if sliding_layers else None,
        dtype="bfloat16",
    )


def initialise(draft: DFlashDraftModel, target: TorchTarget, start: str, seed: int) -> int:
    """Give a draft its first weights; return how many tensors were taken from the target.

    "target": evenly spaced layers of the target where names and shapes agree, its final norm, a fusion that passes
    on the mean of the taps, and query and key norms that keep the target's usual length of queries and keys.
    "random": normal with the target's initial deviation.
    """
    if start not in STARTS:
        raise RequestError(f"a draft starts from one of {', '.join(STARTS)} or from a draft's folder, not {start!r}")
    generator = torch.Generator().manual_seed(seed)
    deviation = sizes(target.anatomy.config).deviation
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
            else:
                parameter.fill_(1.0)
        if start == "random":
            return 0
        width, taps = draft.config.hidden_size, len(draft.config.target_layer_ids)
        draft.fc.weight.add_((torch.eye(width) / taps).repeat(1, taps).to(draft.fc.weight))
        copied = _copy(draft.norm, target.anatomy.norm)
        count = len(draft.layers)
        sources = [_source(target, i, count) for i in range(count)]
        for own, source in zip(draft.layers, sources, strict=True):
            copied += _copy(own, source)
        _keep_lengths(draft, target, sources, generator)
        # Context skips a layer's input norm: the norm of the fusion stands in for all of them.
        norms = [cast("DraftLayer", layer).input_layernorm.weight for layer in draft.layers]
        draft.hidden_norm.weight.copy_(torch.stack(list(norms)).mean(dim=0))
        return copied


def _source(target: TorchTarget, i: int, count: int) -> nn.Module:
    """The i-th of ``count`` evenly spaced layers."""
    layers = target.anatomy.layers
    return layers[round((i + 0.5) * len(layers) / count - 0.5)]


def _copy(own: nn.Module, source: nn.Module | None) -> int:
    """Take over the tensors of the same name and shape; return how many."""
    found = {} if source is None else source.state_dict()
    copied = 0
    for name, parameter in own.named_parameters():
        if name in found and found[name].shape == parameter.shape:
            parameter.copy_(found[name])
            copied += 1
    return copied


def _keep_lengths(
    draft: DFlashDraftModel, target: TorchTarget, sources: Sequence[nn.Module], generator: torch.Generator
) -> None:
    """Targets without query and key norms have queries and keys of some usual length: norms of ones would change it."""
    lengths: dict[tuple[int, str], float] = {}
    hooks = []
    for i, source in enumerate(sources):
        for name, module in source.named_modules():
            part = name.rpartition(".")[2]
            if part in ("q_proj", "k_proj") and f"{part[0]}_norm" not in dict(source.named_modules()):

                def measure(module: nn.Module, args: Any, out: torch.Tensor, key: tuple[int, str] = (i, part)) -> None:
                    lengths[key] = float(out.float().square().mean().sqrt())

                hooks.append(module.register_forward_hook(measure))
    tokens = torch.randint(target.vocab_size, (1, 64), generator=generator)
    target.model(tokens.to(target.device))
    for hook in hooks:
        hook.remove()
    for (i, part), length in lengths.items():
        attention = cast("DraftLayer", draft.layers[i]).self_attn
        source_attention = dict(sources[i].named_modules())
        if not any(name.endswith(f"{part[0]}_norm") for name in source_attention):
            (attention.q_norm if part == "q_proj" else attention.k_norm).weight.fill_(length)
