"""Attention of a block behind a long context, without copying the context.

Where a mask is given, transformers' SDPA copies keys and values once for every query head they serve: for
a block of 8 behind 200 tokens that costs six times the attention itself. A block is always masked, so its
attention is registered here under a name of its own, through the library's attention interface.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "grouped_sdpa"
"""The name under which a model is told to use ``grouped_attention``. (A name with "flash" in it would be taken for a
flash attention kernel.)"""


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Masked attention with fewer key-value heads than query heads; nothing of the context is copied.

    Args:
        q: [rows, heads, T, dim].
        k, v: [rows, kv_heads, slots, dim].
        mask: bool [rows or 1, 1, T, slots], True where a query looks.

    Returns:
        [rows, heads, T, dim of v].
    """
    rows, heads, width, _ = q.shape
    groups = heads // k.shape[1]
    if groups == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if q.device.type == "cpu" and q.requires_grad:
        return _explicit(q, k, v, mask, scale)
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    # CUDA's fast kernels take no mask with grouped heads: the queries of a group become one long block.
    packed = q.reshape(rows, k.shape[1], groups * width, -1)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale)
    return out.reshape(rows, heads, width, -1)


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """``grouped`` spelled out, for training on the CPU: going back costs half of what SDPA's own way back does."""
    rows, heads, width, dim = q.shape
    packed = q.reshape(rows, k.shape[1], heads // k.shape[1] * width, dim)
    scores = torch.matmul(packed, k.transpose(2, 3)) * (dim**-0.5 if scale is None else scale)
    hidden = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill(~mask, float("-inf"))
    shares = (scores.view(rows, heads, width, -1) + hidden).softmax(dim=-1)
    return (shares.view_as(scores) @ v).view(rows, heads, width, -1)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form transformers calls it: the library's own SDPA wherever there is no mask to make it copy."""
    extras = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None or dropout > 0.0
    if extras or attention_mask is None or attention_mask.dtype != torch.bool:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    return grouped(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def group_attention(model: PreTrainedModel) -> None:
    """Give a model that was loaded here such attention in place of SDPA: the same numbers without the copies."""
    used = model.config.get_text_config(decoder=True)._attn_implementation
    if used == "sdpa" and model._can_set_attn_implementation():  # Falcon's is part of the model
        model.set_attn_implementation(GROUPED)
