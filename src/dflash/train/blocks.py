"""Many blocks of many sequences in one pass, each seeing what it would see in decoding and nothing more.

A block anchored at position s sees the context of positions before s, and itself. Blocks of one
sequence share its context, so the context is fused and projected once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from dflash.backends.draft import in_sight
from dflash.backends.torch.draft import DFlashDraftModel, DraftLayer, Rotary


@dataclass(frozen=True)
class Batch:
    """Sequences of one step.

    Attributes:
        tokens: [sequences, length] token ids, padded with 0.
        taps: [sequences, length, taps * hidden] tapped hidden states.
        anchors: [sequences, blocks] positions; each with its whole block inside the sequence, or padding.
        weights: [sequences, blocks, slots] of the slots 1.. of each block; 0 for what is not there.
        final: [sequences, length, hidden], the target's last hidden states; None where no loss reads them.
        others: [n] token ids outside a reduced vocabulary that stand for all of those; None for none.
    """

    tokens: Tensor
    taps: Tensor
    anchors: Tensor
    weights: Tensor
    final: Tensor | None = None
    others: Tensor | None = None

    def labels(self, block_size: int) -> Tensor:
        """[sequences, blocks, block_size - 1]: the token at each slot's own position."""
        return self.tokens.gather(1, self._slots(block_size).flatten(1)).view(*self.anchors.shape, -1)

    def _slots(self, block_size: int) -> Tensor:
        slots = self.anchors[:, :, None] + torch.arange(1, block_size, device=self.anchors.device)
        return slots.clamp(max=self.tokens.shape[1] - 1)

    def teachers(self, block_size: int) -> Tensor:
        """[sequences, blocks, block_size - 1, hidden]: the states from which the target predicted each slot."""
        assert self.final is not None
        at = self._slots(block_size).flatten(1) - 1
        picked = self.final.gather(1, at[:, :, None].expand(-1, -1, self.final.shape[-1]))
        return picked.view(*self.anchors.shape, block_size - 1, -1)


class _Context:
    """Stands where the cache stands in decoding: committed keys and values before those of the blocks."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


def layer_over_context(
    layer: DraftLayer, x: Tensor, context: Tensor, rotary: Rotary, rotary_before: Rotary, mask: Tensor
) -> Tensor:
    """One layer over the blocks, behind the context projected for it: [sequences, blocks * block_size, hidden]."""
    kv = _Context(*layer.self_attn.keys_values(context, rotary_before))
    out: Tensor = layer(x, rotary, kv, mask)
    return out


def recomputed(*args: Any) -> Tensor:
    """``layer_over_context``, keeping none of its activations: they are computed again going back."""
    out: Tensor = torch.utils.checkpoint.checkpoint(layer_over_context, *args, use_reentrant=False)
    return out


def block_states(
    draft: DFlashDraftModel,
    embedding: Tensor,
    batch: Batch,
    block_size: int,
    run_layer: Callable[..., Tensor] = layer_over_context,
) -> Tensor:
    """Last block states of the slots 1.., before the final norm: [sequences, blocks, block_size - 1, hidden].

    Args:
        embedding: the target's raw embedding rows.
        run_layer: ``layer_over_context`` or what stands for it.
    """
    anchors, device = batch.anchors, batch.tokens.device
    sequences, blocks = anchors.shape
    context = draft.fuse(batch.taps)
    before = torch.arange(batch.tokens.shape[1], device=device).expand(sequences, -1)
    position = (anchors[:, :, None] + torch.arange(block_size, device=device)).flatten(1)
    ids = torch.full((sequences, blocks, block_size), draft.config.mask_token_id, device=device)
    ids[:, :, 0] = batch.tokens.gather(1, anchors)
    x = draft.embed(ids.flatten(1), embedding)
    rotary_before, rotary = draft.rotary_emb(context, before), draft.rotary_emb(x, position)
    masks = {kind: visible(anchors, before, block_size, *kind)[:, None] for kind in set(draft.windows())}
    for layer, kind in zip(draft.layers, draft.windows(), strict=True):
        x = run_layer(layer, x, context, rotary, rotary_before, masks[kind])
    return x.view(sequences, blocks, block_size, -1)[:, :, 1:]


def visible(anchors: Tensor, before: Tensor, block_size: int, window: int | None, causal: bool) -> Tensor:
    """Bool [sequences, blocks * block_size, length + blocks * block_size]: what each slot of each block sees."""
    position = (anchors[:, :, None] + torch.arange(block_size, device=anchors.device)).flatten(1)
    start = anchors.repeat_interleave(block_size, dim=1)
    context = before[:, None] < start[:, :, None]
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    own = (block[:, None] == block[None]).expand(len(anchors), -1, -1)
    query = position[:, :, None]
    sides = ((context, before), (own, position))
    return torch.cat([in_sight(seen, query, key[:, None], window, causal) for seen, key in sides], dim=-1)
