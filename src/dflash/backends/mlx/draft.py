"""The DFlash draft on MLX: one pass over ``[anchor, MASK, MASK, ...]`` proposes a block.

The same architecture, tensor names and numbers as ``backends/torch/draft.py``, from the same published files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx import nn

from dflash.backends.draft import PublishedDraft, Record, in_sight
from dflash.backends.mlx.architectures import Anatomy
from dflash.backends.mlx.cache import AttentionCache, Rows
from dflash.backends.mlx.copies import is_copy
from dflash.backends.mlx.rotary import Rotary
from dflash.backends.mlx.target import MlxTarget
from dflash.backends.mlx.verify import Noise, Processors, draw, noise_of
from dflash.checkpoint import HEAD
from dflash.draft_config import DFlashConfig
from dflash.errors import IncompatibleDraft, RequestError
from dflash.protocols import NOTHING, Features, Proposal, Target
from dflash.sampling import SamplingParams


class DraftAttention(nn.Module):
    """Attention of a block over committed context and itself."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def queries(self, x: mx.array, rotary: Rotary, offset: int | mx.array) -> mx.array:
        """[rows, heads, T, head_dim] of block states [rows, T, hidden]."""
        return rotary(self.q_norm(self._heads(self.q_proj(x))).swapaxes(1, 2), offset)

    def keys_values(self, x: mx.array, rotary: Rotary, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """[rows, kv_heads, T, head_dim] each, of block states or of fused context: V is not normed."""
        k = self.k_norm(self._heads(self.k_proj(x))).swapaxes(1, 2)
        return rotary(k, offset), self._heads(self.v_proj(x)).swapaxes(1, 2)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
        """[rows, T, hidden]; mask is bool [rows, 1, T, keys], True where a query sees a key, None if it sees all."""
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5, mask=mask)
        return self.o_proj(out.swapaxes(1, 2).flatten(-2))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One layer. Context skips the input norm, the queries, the output projection and the MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, rotary: Rotary, kv: AttentionCache, mask: mx.array | None) -> mx.array:
        """Block states [rows, T, hidden]; the block's keys and values are dropped with the round."""
        z = self.input_layernorm(x)
        k, v = kv.update_and_fetch(*self.self_attn.keys_values(z, rotary, kv.offset))
        x = x + self.self_attn.attend(self.self_attn.queries(z, rotary, kv.offset), k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraftModel(PublishedDraft, nn.Module):
    """A DFlash draft, and as such a drafter.

    Attributes:
        dtype: what it computes in: features are cast to it, and its last hidden state to the head's dtype.
        lm_head: of a draft with a reduced vocabulary; None where the target's head scores.
    """

    lm_head: nn.Linear | None
    _target_ids: mx.array | None

    def __init__(
        self,
        config: DFlashConfig,
        path: Path | None = None,
        sliding_window_size: int | None = None,
        dtype: mx.Dtype = mx.float32,
    ) -> None:
        """
        Raises:
            RequestError: ``sliding_window_size`` is not positive.
        """
        super().__init__(config, path, sliding_window_size)
        self.dtype = dtype
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [DraftLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)
        own = config.draft_vocab_size
        self.lm_head = None if own is None else nn.Linear(config.hidden_size, own, bias=False)
        self._target_ids = None

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> DFlashDrafting:
        """See ``protocols.Drafter``."""
        if not isinstance(target, MlxTarget):
            raise IncompatibleDraft(
                f"draft {self.name} was loaded for MLX, target {target.name} for another backend: load both alike"
            )
        record = self.check_fit(target)
        return DFlashDrafting(self, target, sampling, verification == "rejection", step, record)

    def check_fit(self, target: MlxTarget) -> Record:
        """How it fares with a target that it was made for.

        Raises:
            IncompatibleDraft: it was made for another; see ``PublishedDraft``.
        """
        anatomy, ids = target.anatomy, self._target_ids
        return self._record(
            target,
            anatomy,  # copies of a target share it
            lambda: [] if ids is None else cast("list[int]", ids.tolist()),
            lambda tensor, file: is_copy(tensor, file, anatomy.projection if tensor == HEAD else anatomy.embedding),
        )

    def name_tokens(self, offsets: np.ndarray) -> None:
        """Of a draft with a reduced vocabulary [draft_vocab_size]: its token i is the target's i + offset."""
        self._target_ids = mx.array(offsets + np.arange(len(offsets)), mx.int32)

    def for_target(self, tokens: mx.array) -> mx.array:
        """The target's ids of tokens that this draft scored."""
        return tokens if self._target_ids is None else self._target_ids[tokens]

    def over_target(self, q: mx.array, vocab_size: int) -> mx.array:
        """Distributions [..., vocab_size] over the target's tokens of those [..., n] over the tokens scored here."""
        if self._target_ids is None:
            return q
        spread = mx.zeros((*q.shape[:-1], vocab_size), q.dtype)
        spread[..., self._target_ids] = q
        return spread

    def fuse(self, taps: mx.array) -> mx.array:
        """Context [rows, T, hidden] from tapped hidden states [rows, T, taps * hidden]."""
        return self.hidden_norm(self.fc(taps.astype(self.dtype)))

    def logits(self, x: mx.array, anatomy: Anatomy) -> mx.array:
        """Scores [rows, T, vocab] of last block states, through the target's head in its dtype.

        A draft with a reduced vocabulary has a head of its own: [rows, T, draft_vocab_size].
        """
        x = self.norm(x) * self.config.output_multiplier
        scores = anatomy.projection.score(x.astype(anatomy.dtype)) if self.lm_head is None else self.lm_head(x)
        cap = self.config.final_logit_softcapping
        return scores if cap is None else mx.tanh(scores / cap) * cap


class DFlashDrafting:
    """A draft at work: the context keys and values of some rows, committed positions only."""

    def __init__(
        self,
        draft: DFlashDraftModel,
        target: MlxTarget,
        sampling: Sequence[SamplingParams],
        samples: bool,
        step: int,
        record: Record,
    ) -> None:
        self.draft = draft
        self.target = target
        self.rows = Rows(len(sampling))
        self.context = [AttentionCache(self.rows, draft.lookback(window), step) for window, _ in draft.windows()]
        self._sampler = None
        if samples and not all(one.greedy for one in sampling):
            self._sampler = _Sampler(sampling, draft.config.draft_vocab_size or target.vocab_size)
        self._finite: mx.array | None = None
        self._record = record
        self._proposed = False

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        """Absorb the features of newly committed positions; they are not needed afterwards."""
        if self._finite is not None:
            self.draft.say_if_not(bool(self._finite.item()), str(self.draft.dtype).rpartition(".")[2])
        if features.values is None:
            raise RequestError(f"draft {self.draft.name} was handed no hidden states: start the session with its taps")
        if self._proposed:
            self._record.came(tokens)
        self._proposed = False
        context, offset = self.draft.fuse(features.values), self.rows.offset
        for layer, kv in zip(self.draft.layers, self.context, strict=True):
            kv.update_and_fetch(*layer.self_attn.keys_values(context, self.draft.rotary, offset))
        self.rows.advance(features.counts)
        # Set going, not waited for: the device works while the host deals with text, and the features are let go.
        mx.async_eval([array for kv in self.context for array in kv.arrays])

    def propose(self, pending: list[int], room: int) -> Proposal:
        """One pass over the block. See ``protocols.Drafting``."""
        if room == 0:
            return NOTHING
        self.draft.say_if_beyond(max(self.rows.lengths))
        self._proposed = True
        scores = self.block_scores(pending, room)
        proposal, self._finite = self._choose(scores[:, : self._promising(scores)])
        # The draft runs while the host still puts the target's forward together.
        mx.async_eval(proposal.tokens, self._finite)
        return proposal

    def block_scores(self, pending: list[int], room: int) -> mx.array:
        """Scores [rows, room, vocab] of the positions after the pending token; see ``DFlashDraftModel.logits``."""
        draft, anatomy = self.draft, self.target.anatomy
        block = mx.concatenate(
            [mx.array(pending)[:, None], mx.full((len(pending), room), draft.config.mask_token_id, mx.int32)], axis=1
        )
        x = anatomy.embedding.embed(block).astype(draft.dtype) * draft.config.input_embedding_scale
        masks = {kind: self._mask(kv, room + 1, *kind) for kind, kv in zip(draft.windows(), self.context, strict=True)}
        for layer, kv, kind in zip(draft.layers, self.context, draft.windows(), strict=True):
            x = layer(x, draft.rotary, kv, masks[kind])
        return draft.logits(x[:, 1:], anatomy)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        index = mx.array(rows)
        for kv in self.context:
            kv.select(index)
        self.rows.lengths[:] = [self.rows.lengths[row] for row in rows]
        if self._sampler is not None:
            self._sampler.select(rows)

    def _mask(self, kv: AttentionCache, width: int, window: int | None, causal: bool) -> mx.array | None:
        """Bool [rows, 1, width, slots]: committed positions before the anchor, and the block itself."""
        bound = self.draft.sliding_window_size
        if self.rows.uniform and not causal and window is None and bound is None:
            return None
        key = kv.slot_positions(width)[:, None]
        query = self.rows.positions(width)[:, :, None]
        start = self.rows.starts()[:, :, None]
        seen = in_sight((key >= 0) & (key < start + width), query, key, window, causal)
        if bound is not None:
            seen = seen & (key >= start - bound)
        return seen[:, None]

    def _promising(self, scores: mx.array) -> int:
        """How many positions are worth checking in some row. No drawn token has a say, so sampling stays exact."""
        if self.draft.min_confidence == 0:
            return scores.shape[1]
        scores = scores.astype(mx.float32)
        run = (scores.max(axis=-1) - mx.logsumexp(scores, axis=-1)).cumsum(axis=-1)
        lengths: Any = (run >= math.log(self.draft.min_confidence)).sum(axis=-1).tolist()
        return max(1, *lengths)

    def _choose(self, scores: mx.array) -> tuple[Proposal, mx.array]:
        """The most likely tokens: positions are predicted independently, so samples make a poor whole.

        Only for rejection, and rows that sample, are they drawn, from the distribution reported as q.

        Returns:
            The proposal, and whether the scores are finite.
        """
        finite = mx.isfinite(scores).all()
        best = mx.argmax(scores, axis=-1).astype(mx.int32)
        if self._sampler is None:
            return Proposal(self.draft.for_target(best), scores.shape[1]), finite
        tokens, q = self._sampler.draw(scores.astype(mx.float32), best)
        q = self.draft.over_target(q, self.target.vocab_size)
        return Proposal(self.draft.for_target(tokens), scores.shape[1], q), finite


class _Sampler:
    """Draws proposals with generators of their own, independent of the verifier's."""

    def __init__(self, sampling: Sequence[SamplingParams], vocab_size: int) -> None:
        self._processors = Processors(sampling, vocab_size)
        self._noise = [Noise(None if one.seed is None else (one.seed + 0x9E3779B97F4A7C15) % 2**63) for one in sampling]

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self._processors.select(rows)
        self._noise = [self._noise[row] for row in rows]

    def draw(self, scores: mx.array, best: mx.array) -> tuple[mx.array, mx.array]:
        """Tokens [rows, K] and the distributions [rows, K, vocab] they were drawn from.

        Rows that are greedy, or whose scores are not finite, have their best tokens, and q is one-hot.
        """
        keys, _ = noise_of(self._noise, scores.shape[1])
        for noise in self._noise:
            noise.advance(scores.shape[1])
        warped = self._processors.warp(scores)
        fixed = self._processors.greedy | ~mx.isfinite(scores).all(axis=(1, 2))
        tokens = mx.where(fixed[:, None], best, draw(warped, keys))
        certain = (tokens[..., None] == mx.arange(scores.shape[-1])).astype(mx.float32)
        return tokens, mx.where(fixed[:, None, None], certain, mx.softmax(warped, axis=-1))
