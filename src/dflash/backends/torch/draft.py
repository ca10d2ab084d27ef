"""The DFlash draft on PyTorch: one pass over ``[anchor, MASK, MASK, ...]`` proposes a block.

Architecture and tensor names as published by z-lab ("DFlash: Block Diffusion for Flash Speculative
Decoding", arXiv 2602.06036): a few Qwen3-style layers whose keys and values come from two sides,
the target's fused hidden states (committed positions) and the block itself. Embedding and head
are the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dflash.backends.draft import PublishedDraft, Record, in_sight
from dflash.backends.torch.attention import grouped
from dflash.backends.torch.cache import AttentionLayer, Rows
from dflash.backends.torch.copies import is_copy
from dflash.backends.torch.head import arranged
from dflash.backends.torch.target import TorchTarget
from dflash.backends.torch.verify import draw, probabilities
from dflash.checkpoint import HEAD
from dflash.compat import misfit
from dflash.draft_config import DFlashConfig
from dflash.errors import IncompatibleDraft, RequestError
from dflash.protocols import NOTHING, Features, Proposal, Target
from dflash.sampling import SamplingParams

Rotary = tuple[Tensor, Tensor]
"""cos and sin, [rows, T, head_dim]."""


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
        self.q_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[rows, heads, T, head_dim] of block states [rows, T, hidden]."""
        q = self.q_norm(self._heads(self.q_proj(x)))
        return apply_rotary_pos_emb(q, q, *rotary)[0]

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[rows, kv_heads, T, head_dim] each, of block states or of fused context: V is not normed."""
        k = self.k_norm(self._heads(self.k_proj(x)))
        return apply_rotary_pos_emb(k, k, *rotary)[0], self._heads(self.v_proj(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """[rows, T, hidden]; mask is bool [rows, 1, T, keys], True where a query sees a key."""
        out: Tensor = self.o_proj(grouped(q, k, v, mask).transpose(1, 2).flatten(-2))
        return out


class DraftLayer(nn.Module):
    """One layer. Context skips the input norm, the queries, the output projection and the MLP."""

    def __init__(self, config: DFlashConfig, rope: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = Qwen3MLP(rope)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, kv: AttentionLayer, mask: Tensor) -> Tensor:
        """Block states [rows, T, hidden]; the block's keys and values are dropped with the round."""
        z = self.input_layernorm(x)
        k, v = kv.update(*self.self_attn.keys_values(z, rotary))
        x = x + self.self_attn.attend(self.self_attn.queries(z, rotary), k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraftModel(PublishedDraft, nn.Module):
    """A DFlash draft, and as such a drafter.

    Attributes:
        lm_head: of a draft with a reduced vocabulary; None where the target's head scores.
        d2t: [draft_vocab_size] int64, what makes a token of that vocabulary the target's: token + d2t[token].
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig, path: Path | None = None, sliding_window_size: int | None = None) -> None:
        """
        Raises:
            RequestError: ``sliding_window_size`` is not positive.
        """
        super().__init__(config, path, sliding_window_size)
        rope = _qwen3_config(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, rope) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(rope)
        own = config.draft_vocab_size
        self.lm_head = None if own is None else nn.Linear(config.hidden_size, own, bias=False)
        self.register_buffer("d2t", None if own is None else torch.zeros(own, dtype=torch.long))

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights: features are cast to it, and its last hidden state to the head's dtype."""
        return self.fc.weight.dtype

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> DFlashDrafting:
        """See ``protocols.Drafter``."""
        if not isinstance(target, TorchTarget):
            raise IncompatibleDraft(
                f"draft {self.name} was loaded for PyTorch, target {target.name} for another backend: load both alike"
            )
        record = self.check_fit(target)
        return DFlashDrafting(self, target, sampling, verification == "rejection", step, record)

    def check_fit(self, target: TorchTarget) -> Record:
        """How it fares with a target that it was made for.

        Raises:
            IncompatibleDraft: it was made for another, see ``PublishedDraft``; or the target's embedding or head is not
                as wide as its layers.
        """
        self._check_widths(target)
        head, embedding = target.anatomy.head, target.anatomy.embedding
        return self._record(
            target,
            target,
            lambda: [] if (ids := self._target_ids()) is None else ids.tolist(),
            lambda tensor, file: is_copy(tensor, file, cast("Tensor", (head if tensor == HEAD else embedding).weight)),
        )

    def _check_widths(self, target: TorchTarget) -> None:
        """Whether the layers, the embedding and the head of a target are alike: all pass through the same draft."""
        for part, width in target.anatomy.widths.items():
            if width != target.hidden_size and (part == "embedding" or self.lm_head is None):
                raise misfit(
                    self.name,
                    target,
                    f"its layers are {target.hidden_size} wide and its {part} {width}, which one draft cannot read: "
                    "use n-grams or plain decoding",
                )

    def _target_ids(self) -> Tensor | None:
        """[draft_vocab_size]: the target's ids of the tokens of a reduced vocabulary."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def for_target(self, tokens: Tensor) -> Tensor:
        """The target's ids of tokens that this draft scored."""
        return tokens if self.d2t is None else tokens + self.d2t.to(tokens.device)[tokens]

    def over_target(self, q: Tensor, vocab_size: int) -> Tensor:
        """Distributions [..., vocab_size] over the target's tokens of those [..., n] over the tokens scored here."""
        ids = self._target_ids()
        if ids is None:
            return q
        spread = q.new_zeros(*q.shape[:-1], vocab_size)
        spread[..., ids.to(q.device)] = q
        return spread

    def fuse(self, taps: Tensor) -> Tensor:
        """Context [rows, T, hidden] from tapped hidden states [rows, T, taps * hidden]."""
        fused: Tensor = self.hidden_norm(self.fc(taps.to(self.dtype)))
        return fused

    def embed(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        """Block states [rows, T, hidden] of token ids, from the target's raw embedding rows."""
        return F.embedding(tokens, embedding).to(self.dtype) * self.config.input_embedding_scale

    def logits(self, x: Tensor, head: nn.Module) -> Tensor:
        """Scores [rows, T, vocab] of last block states, through a head in its dtype, on its device.

        Args:
            head: the target's. A draft with a reduced vocabulary has its own: [rows, T, draft_vocab_size].
        """
        head = head if self.lm_head is None else self.lm_head
        x = self.norm(x) * self.config.output_multiplier
        weight = next(head.parameters())
        scores: Tensor = head(x.to(weight.device, weight.dtype))
        cap = self.config.final_logit_softcapping
        return scores if cap is None else torch.tanh(scores / cap) * cap


class DFlashDrafting:
    """A draft at work: the context keys and values of some rows, committed positions only."""

    def __init__(
        self,
        draft: DFlashDraftModel,
        target: TorchTarget,
        sampling: Sequence[SamplingParams],
        samples: bool,
        step: int,
        record: Record,
    ) -> None:
        self.draft = draft
        self.target = target
        self.rows = Rows(len(sampling), draft.fc.weight.device)
        self.context = [AttentionLayer(self.rows, draft.lookback(window), step) for window, _ in draft.windows()]
        self._samplers = [_Sampler(s, samples and not s.greedy) for s in sampling]
        self._finite: Tensor | None = None
        self._record = record
        self._proposed = False

    @torch.inference_mode()
    def extend(self, tokens: list[list[int]], features: Features) -> None:
        """Absorb the features of newly committed positions; they are not needed afterwards."""
        if self._finite is not None:
            self.draft.say_if_not(bool(self._finite), str(self.draft.dtype).rpartition(".")[2])
        if features.values is None:
            raise RequestError(f"draft {self.draft.name} was handed no hidden states: start the session with its taps")
        if self._proposed:
            self._record.came(tokens)
        self._proposed = False
        context = self.draft.fuse(features.values.to(self.rows.device))
        rotary = self.draft.rotary_emb(context, self.rows.positions(context.shape[1]))
        for layer, kv in zip(self.draft.layers, self.context, strict=True):
            kv.update(*cast("DraftLayer", layer).self_attn.keys_values(context, rotary))
        self.rows.advance(features.counts)

    @torch.inference_mode()
    def propose(self, pending: list[int], room: int) -> Proposal:
        """One pass over the block. See ``protocols.Drafting``."""
        if room == 0:
            return NOTHING
        self.draft.say_if_beyond(max(self.rows.lengths))
        scores = self.block_scores(pending, room)
        self._proposed = True
        self._finite = torch.isfinite(scores.sum(dtype=torch.float32))  # one that is not makes the sum so
        return self._choose(scores[:, : self._promising(scores)])

    @torch.inference_mode()
    def block_scores(self, pending: list[int], room: int) -> Tensor:
        """Scores [rows, room, vocab] of the positions after the pending token; see ``DFlashDraftModel.logits``."""
        draft, anatomy, device = self.draft, self.target.anatomy, self.rows.device
        block = torch.full((len(pending), room + 1), draft.config.mask_token_id, device=device)
        block[:, 0] = torch.tensor(pending, device=device)
        x = draft.embed(block.to(self.target.device), anatomy.embedding.weight).to(device)
        rotary = draft.rotary_emb(x, self.rows.positions(room + 1))
        masks = {
            (window, causal): self._visible(kv, room + 1, window, causal)[:, None]
            for (window, causal), kv in zip(draft.windows(), self.context, strict=True)
        }
        for layer, kv, kind in zip(draft.layers, self.context, draft.windows(), strict=True):
            x = layer(x, rotary, kv, masks[kind])
        with arranged():
            return draft.logits(x[:, 1:], anatomy.head)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows, device=self.rows.device)
        for kv in self.context:
            kv.select(index)
        self.rows.lengths[:] = [self.rows.lengths[row] for row in rows]
        self._samplers = [self._samplers[row] for row in rows]

    def _visible(self, kv: AttentionLayer, width: int, window: int | None, causal: bool) -> Tensor:
        """Bool [rows, width, slots]: committed positions before the anchor, and the block itself."""
        key = kv.slot_positions(width)[:, None]
        query = self.rows.positions(width)[:, :, None]
        start = self.rows.starts()[:, :, None]
        seen = in_sight((key >= 0) & (key < start + width), query, key, window, causal)
        if self.draft.sliding_window_size is not None:
            seen = seen & (key >= start - self.draft.sliding_window_size)
        return seen.expand(len(start), width, -1)

    def _promising(self, scores: Tensor) -> int:
        """How many positions are worth checking in some row. No drawn token has a say, so sampling stays exact."""
        if self.draft.min_confidence == 0:
            return scores.shape[1]
        scores = scores.float()
        run = (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).cumsum(dim=-1)
        return max(1, int((run >= math.log(self.draft.min_confidence)).sum(dim=-1).max()))

    def _choose(self, scores: Tensor) -> Proposal:
        """The most likely tokens: positions are predicted independently, so samples make a poor whole.

        Only for rejection, and rows that sample, are they drawn, from the distribution reported as q.
        """
        if not any(sampler.samples for sampler in self._samplers):
            return Proposal(self.draft.for_target(scores.argmax(dim=-1)), scores.shape[1])
        drawn = [sampler.draw(row.float()) for sampler, row in zip(self._samplers, scores, strict=True)]
        tokens, q = (torch.stack(parts) for parts in zip(*drawn, strict=True))
        q = self.draft.over_target(q, self.target.vocab_size)
        return Proposal(self.draft.for_target(tokens), scores.shape[1], q)


class _Sampler:
    """Draws the proposals of one row with a generator of its own, independent of the verifier's."""

    def __init__(self, sampling: SamplingParams, samples: bool) -> None:
        self.sampling = sampling
        self.samples = samples
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((sampling.seed + 0x9E3779B97F4A7C15) % 2**63)

    def draw(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [K] and the distributions [K, vocab] they were drawn from."""
        if not self.samples or not bool(torch.isfinite(scores).all()):
            tokens = scores.argmax(dim=-1)
            return tokens, F.one_hot(tokens, scores.shape[-1]).double()
        q = probabilities(scores, self.sampling)
        noise = torch.rand(len(q), generator=self._generator, dtype=torch.float64).to(q.device)
        return draw(q, noise), q


def _qwen3_config(config: DFlashConfig) -> Qwen3Config:
    """What the rotary embedding and the MLP of transformers' Qwen3 read."""
    return Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
        hidden_act="silu",
        attn_implementation="sdpa",
    )
