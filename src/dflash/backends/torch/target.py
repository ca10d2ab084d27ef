"""The target on PyTorch: one forward over the rows of a session, with taps and rollback."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash.backends.keep import check_first, check_tap, checked_counts
from dflash.backends.rows import RowByRow
from dflash.backends.torch.architectures import FULL, Anatomy, context_length, dissect, eos_ids
from dflash.backends.torch.attention import GROUPED
from dflash.backends.torch.cache import AttentionLayer, RollbackCache, Rows
from dflash.backends.torch.check import proven_reading
from dflash.backends.torch.head import PackedHead, arranged
from dflash.backends.torch.hooks import attach_hooks
from dflash.backends.torch.scoring import Scoring
from dflash.backends.torch.verify import TorchVerifier
from dflash.errors import RequestError, UnsupportedTarget
from dflash.memory import process_peak
from dflash.protocols import Features, Proposal, Session, Verifier
from dflash.sampling import SamplingParams


class Reading(enum.Enum):
    """How a model's forward can be used, from the fastest way to the one that asks least of the model."""

    TOGETHER = "rows of different lengths in one forward, each with its own positions and mask"
    ALONE = "one row after the other"
    BY_ITSELF = "one row after the other, positions and mask made by the model from the length of its cache"


class TorchTarget:
    """A causal language model of transformers, ready for block decoding. It is left as it is for other use.

    Hooks registered here do nothing outside of our own forward, and sessions with different taps, in
    different threads, do not see each other.

    Attributes:
        model: the transformers module.
        tokenizer: its transformers tokenizer.
        name: for messages.
    """

    backend = "torch"

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        """
        Raises:
            UnsupportedTarget: a layer kind whose cache cannot be rolled back.
        """
        self.anatomy: Anatomy = dissect(model)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        config = self.anatomy.config
        self.vocab_size: int = self.anatomy.embedding.num_embeddings
        self.num_layers = len(self.anatomy.layers or self.anatomy.kinds)
        self.hidden_size: int = config.hidden_size
        self.context_length = context_length(config)
        self.eos_ids = eos_ids(model, tokenizer)
        self.device: torch.device = self.anatomy.embedding.weight.device
        attach_hooks(model, self.anatomy)

    @functools.cached_property
    def reading(self) -> Reading:
        """How the model is read: the first way that proves right on it. ``load`` asks at once, else the first session.

        Raises:
            UnsupportedTarget: none does; see ``check.check_rollback``.
        """
        return proven_reading(self)

    @property
    def readings(self) -> list[Reading]:
        """The ways that are worth trying, in order."""
        ways = [Reading.TOGETHER] if self.anatomy.ragged else []
        ways.append(Reading.ALONE)
        # A model knows nothing of the order of slots in a sliding window, nor of recurrent states that are replayed.
        full = self.anatomy.attention_kinds == {FULL} and not self.anatomy.mixers
        return [*ways, Reading.BY_ITSELF] if full else ways

    @property
    def dtype(self) -> str:
        """What its layers compute in: "float32", "bfloat16" ..."""
        return str(self.model.dtype).rpartition(".")[2]

    def __iter__(self) -> Iterator[Any]:
        """``model, tokenizer = load(...)``. The first is this target, which ``stream_generate`` takes."""
        return iter((self, self.tokenizer))

    def start(self, rows: int, taps: Sequence[int], step: int, chunk: int) -> Session:
        """Empty caches. Rows that cannot be read together run one after the other behind the same calls.

        Raises:
            RequestError: a tap that is no layer, or a model in training mode.
            UnsupportedTarget: the model cannot be tapped, or not be read on from a cache that was rolled back.
        """
        if taps and not self.anatomy.layers:
            raise UnsupportedTarget(
                f"{self.name}: no list of decoder layers was found in {type(self.model).__name__}, so a draft cannot "
                "read their outputs: leave the draft out, n-grams and plain decoding need none"
            )
        bad = [tap for tap in taps if not 0 <= tap < self.num_layers]
        if bad:
            raise RequestError(f"tap {bad[0]} is no layer of {self.name}: valid ids are 0 to {self.num_layers - 1}")
        if self.model.training:
            raise RequestError(f"{self.name} is in training mode, where answers are random: call model.eval() first")
        if isinstance(self.anatomy.head, PackedHead):
            self.anatomy.head.refresh()
        reading = self.reading  # asked of single rows too, before they read: a target is checked on its first use
        if reading is not Reading.TOGETHER and rows > 1:
            single = [TorchSession(self, 1, tuple(taps), step, chunk) for _ in range(rows)]
            return RowByRow(single, chunk, torch.cat, lambda values, more: F.pad(values, (0, 0, 0, more)))
        return TorchSession(self, rows, tuple(taps), step, chunk)

    def verifier(
        self, sampling: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], verification: str
    ) -> Verifier:
        """See ``protocols.Target``."""
        return TorchVerifier(sampling, prompts, verification, self.vocab_size, self.device)

    def peak_memory(self) -> float:
        """Peak memory in GB (1e9 bytes): of the CUDA device, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return process_peak()

    @torch.inference_mode()
    def forward(self, cache: RollbackCache, tokens: Tensor, scored: Tensor | int) -> Tensor:
        """Read tokens [rows, T] behind each row's length; the cache is ahead afterwards.

        Args:
            scored: which of the T positions to score: indices [rows, n], or 0 for all.

        Returns:
            Scores [rows, n, vocab] in the model's dtype.
        """
        cache.tapped.clear()
        given: dict[str, Any] = {"input_ids": tokens, "cache": cache, "use_cache": True}
        if self.reading is not Reading.BY_ITSELF:
            given["position_ids"] = cache.rows.positions(tokens.shape[1])
            given["attention_mask"] = self._masks(cache, tokens.shape[1])
        selects = "logits_to_keep" in self.anatomy.takes
        if selects:
            given["logits_to_keep"] = scored
        with arranged():
            scores: Tensor = self.model(**given).logits
        if selects or isinstance(scored, int):
            return scores
        return scores.gather(1, scored[..., None].expand(-1, -1, scores.shape[-1]))

    def logits(self, hidden: Tensor, head: nn.Module | None = None) -> Tensor:
        """The model's own scores of its last hidden states, cast to the dtype of its head.

        Args:
            hidden: [..., hidden], as ``scoring.watched`` sees them.
            head: in the place of its own: ``rows_of`` it, to score n tokens only.

        Returns:
            Scores [..., vocab or n].

        Raises:
            UnsupportedTarget: its head is a part of its decoder.
        """
        head = self.anatomy.head if head is None else head
        return self.scoring(hidden.to(next(head.parameters()).dtype), head)

    @functools.cached_property
    def scoring(self) -> Scoring:
        """The way from its last hidden states to its scores.

        Raises:
            UnsupportedTarget: its head is a part of its decoder.
        """
        return Scoring(self.model, self.anatomy.head)

    def _masks(self, cache: RollbackCache, width: int) -> Any:
        """What each query sees, in the form the model takes: 4-D, and by attention kind where it mixes them."""
        layers = {kind: layer for kind, layer in cache.attention.items() if width > 1 or not _all_seen(kind, layer)}
        masks = {kind: self._mask(layer.visible(width)) for kind, layer in layers.items()}
        if len(self.anatomy.attention_kinds) > 1:
            return {kind: masks.get(kind) for kind in self.anatomy.attention_kinds}
        return next(iter(masks.values()), None)

    def _mask(self, visible: Tensor) -> Tensor:
        """[rows, 1, T, slots]: bool for SDPA, additive for eager attention."""
        visible = visible[:, None]
        if self.anatomy.config._attn_implementation in ("sdpa", GROUPED):
            return visible
        low = torch.finfo(self.model.dtype).min
        return torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device).masked_fill(~visible, low)


def _all_seen(kind: str, layer: AttentionLayer) -> bool:
    """Whether a single new token looks at every slot in use, so that no mask is needed."""
    return kind == FULL and layer.rows.uniform


class TorchSession:
    """The caches of some rows of one target, advanced together in one forward."""

    def __init__(self, target: TorchTarget, rows: int, taps: tuple[int, ...], step: int, chunk: int) -> None:
        self.target = target
        self.taps = taps
        self.chunk = chunk
        self.cache = RollbackCache(target.anatomy, Rows(rows, target.device), taps, max(step, chunk))

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        return self.cache.rows.lengths

    def prefill(self, prompts: Sequence[Sequence[int]], absorb: Callable[[list[list[int]], Features], None]) -> Tensor:
        """Read prompts of any lengths, padded on the right chunk by chunk. See ``protocols.Session``."""
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        for start in range(0, max(map(len, prompts)), self.chunk):
            parts = [list(prompt[start : start + self.chunk]) for prompt in prompts]
            counts = [len(part) for part in parts]
            width = max(counts)
            # Only the last token of each prompt is scored: never the whole prompt's logits.
            ends = [len(prompt) - 1 - start for prompt in prompts]
            scored = torch.tensor([[min(max(end, 0), width - 1)] for end in ends])
            # Padded with tokens of the row's own: NaN in the embedding of another would reach it through the mask.
            rows = [part + [prompt[-1]] * (width - len(part)) for part, prompt in zip(parts, prompts, strict=True)]
            scores, features = self.read(rows, counts, scored)
            for row, end in enumerate(ends):
                if 0 <= end < width:
                    last[row] = scores[row]
            absorb(parts, features)
        return torch.stack(last)

    def read(self, tokens: list[list[int]], counts: list[int], scored: Tensor | int) -> tuple[Tensor, Features]:
        """Commit the first ``counts[r]`` of each row's tokens. Scores as ``TorchTarget.forward``, and features."""
        scores = self._read(tokens, scored)
        self.cache.rows.advance(counts)
        return scores, self._features(counts, len(tokens[0]))

    @contextmanager
    def verify(self, pending: list[int], proposal: Proposal) -> Iterator[Ahead]:
        """One forward over the pending token and the proposal. See ``protocols.Session``."""
        block = torch.tensor(pending, device=self.target.device)[:, None]
        if proposal.width:
            block = torch.cat([block, self._drafted(proposal, len(pending))], dim=1)
        self.cache.mark()
        ahead = None
        try:
            ahead = Ahead(self, self._read(block, 0), block.shape[1])
            yield ahead
        finally:
            if ahead is None or not ahead.kept:
                self.cache.restore()
                self.cache.tapped.clear()

    def _drafted(self, proposal: Proposal, rows: int) -> Tensor:
        """Proposed tokens [rows, K]; a drafter that breaks the protocol is told so."""
        drafted = torch.as_tensor(proposal.tokens, device=self.target.device)
        if drafted.shape != (rows, proposal.width) or drafted.dtype.is_floating_point:
            raise RequestError(
                f"the drafter must propose whole numbers [{rows} rows, {proposal.width}], not {drafted.dtype} "
                f"{list(drafted.shape)}"
            )
        if not isinstance(proposal.tokens, Tensor):  # a tensor's values are not read back: that would cost a sync
            bad = next((t for row in proposal.tokens for t in row if not 0 <= t < self.target.vocab_size), None)
            if bad is not None:
                raise RequestError(f"the drafter proposed token {bad}, which is outside the target's vocabulary")
        return drafted

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.cache.select(rows)

    def _read(self, tokens: list[list[int]] | Tensor, scored: Tensor | int) -> Tensor:
        device = self.target.device
        scored = scored.to(device) if isinstance(scored, Tensor) else scored
        return self.target.forward(self.cache, torch.as_tensor(tokens, device=device), scored)

    def _features(self, counts: list[int], width: int) -> Features:
        """The taps of the last forward, let go of here: they live until the draft has absorbed them."""
        silent = [tap for tap in self.taps if tap not in self.cache.tapped]
        if silent:
            raise UnsupportedTarget(
                f"{self.target.name}: layer {silent[0]} was not run, so its output cannot be tapped"
            )
        tapped = [self.cache.tapped[tap] for tap in self.taps]
        self.cache.tapped.clear()
        for states in tapped:
            check_tap(self.target.name, tuple(states.shape), (len(counts), width, self.target.hidden_size))
        return Features(torch.cat(tapped, dim=-1) if tapped else None, counts)


class Ahead:
    """A verified block whose caches are ahead of what is committed."""

    def __init__(self, session: TorchSession, scores: Tensor, width: int) -> None:
        self.scores = scores
        self.kept = False
        self._session = session
        self._width = width

    @torch.inference_mode()
    def keep(self, counts: list[int]) -> Features:
        """See ``protocols.Round``."""
        check_first(self.kept)
        counts = checked_counts(counts, len(self._session.lengths), self._width)
        self._session.cache.keep(counts, self._width)
        self.kept = True
        return self._session._features(counts, self._width)
