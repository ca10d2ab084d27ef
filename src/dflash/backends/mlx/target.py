"""A target of mlx-lm, and its sessions: prefill, verify, keep.

Nothing here waits for the device but the prefill, once a chunk: a round's one evaluation is the verifier's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash.backends.keep import check_first, check_tap, checked_counts
from dflash.backends.mlx.architectures import Anatomy, context_length, dissect, eos_ids
from dflash.backends.mlx.sampler import Processor, Sampler, SamplerVerifier
from dflash.backends.mlx.seams import reader
from dflash.backends.mlx.verify import MlxVerifier, drafted_tokens
from dflash.backends.rows import RowByRow
from dflash.errors import RequestError, UnsupportedTarget
from dflash.memory import process_peak
from dflash.protocols import Features, Proposal, Session, Verifier
from dflash.sampling import SamplingParams

CLEAR_EVERY = 256
"""Tokens after which freed buffers are given back. Counted by elapsed tokens: rounds step over exact multiples."""


def default_device() -> str:
    """MLX's default device, on which everything runs: "cpu" or "gpu"."""
    return str(mx.default_device().type).rpartition(".")[2]


class MlxTarget:
    """A causal language model of mlx-lm, ready for block decoding. The model is only ever read.

    Attributes:
        model: mlx-lm's module.
        tokenizer: its transformers tokenizer.
        name: for messages.
        together: whether several rows go through one forward; otherwise one after the other, behind the same calls.
        kv_bits, kv_group_size: how keys and values of full attention are quantized; None leaves them as they are.
    """

    backend = "mlx"

    def __init__(
        self, model: nn.Module, tokenizer: Any, name: str, config: Mapping[str, Any], *more: Mapping[str, Any]
    ) -> None:
        """
        Args:
            config: the model's ``config.json``; ``more`` are others that name tokens which end an answer.

        Raises:
            UnsupportedTarget: a layer kind whose cache cannot be rolled back.
        """
        self.anatomy: Anatomy = dissect(model)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.together = not self.anatomy.recurrent
        self.kv_bits: int | None = None
        self.kv_group_size = 64
        self.vocab_size = self.anatomy.vocab_size
        self.num_layers = len(self.anatomy.layers)
        self.hidden_size = self.anatomy.hidden_size
        self.context_length = context_length(config)
        self.eos_ids = eos_ids([config, *more], tokenizer)
        self.device = default_device()
        self._by_hand: tuple[Sampler, Sequence[Processor]] | None = None

    @property
    def dtype(self) -> str:
        """What its layers compute in: "float32", "bfloat16" ..."""
        return str(self.anatomy.dtype).rpartition(".")[2]

    def __iter__(self) -> Iterator[Any]:
        """``model, tokenizer = load(...)``. The first is this target, which ``stream_generate`` takes."""
        return iter((self, self.tokenizer))

    def sampled_by(self, sampler: Sampler, processors: Sequence[Processor]) -> MlxTarget:
        """The same target, whose single rows are sampled by hand: by callables of mlx-lm's kind."""
        own = copy.copy(self)
        own._by_hand = sampler, tuple(processors)
        return own

    def start(self, rows: int, taps: Sequence[int], step: int, chunk: int) -> Session:
        """Empty caches. Rows of a target that cannot read them together run one after the other."""
        bad = [tap for tap in taps if not 0 <= tap < self.num_layers]
        if bad:
            raise RequestError(f"tap {bad[0]} is no layer of {self.name}: valid ids are 0 to {self.num_layers - 1}")
        if self.model.training:
            raise RequestError(f"{self.name} is in training mode, where answers are random: call model.eval() first")
        if rows > 1 and not self.together:
            single = [MlxSession(self, 1, tuple(taps), step, chunk) for _ in range(rows)]
            return RowByRow(single, chunk, mx.concatenate, lambda v, more: mx.pad(v, [(0, 0), (0, more), (0, 0)]))
        return MlxSession(self, rows, tuple(taps), step, chunk)

    def verifier(
        self, sampling: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], verification: str
    ) -> Verifier:
        """See ``protocols.Target``."""
        if self._by_hand is None:
            return MlxVerifier(sampling, prompts, verification, self.vocab_size)
        if verification != "match" or len(prompts) > 1:
            raise RequestError("a sampler or logits processor handed in verifies one row, by match: leave it out")
        return SamplerVerifier(*self._by_hand, prompts[0])

    def peak_memory(self) -> float:
        """Peak memory in GB (1e9 bytes): of MLX on a GPU, else of the process."""
        return mx.get_peak_memory() / 1e9 if self.device == "gpu" else process_peak()


class MlxSession:
    """The caches of some rows of one target, advanced together in one forward."""

    def __init__(self, target: MlxTarget, rows: int, taps: tuple[int, ...], step: int, chunk: int) -> None:
        self.target = target
        self.taps = taps
        self.chunk = chunk
        anatomy = target.anatomy
        self.cache = anatomy.new_cache(rows, max(step, chunk), target.kv_bits, target.kv_group_size)
        self._model = reader(anatomy, taps, self.cache)
        self._since_cleared = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        return self.cache.rows.lengths

    def prefill(
        self, prompts: Sequence[Sequence[int]], absorb: Callable[[list[list[int]], Features], None]
    ) -> mx.array:
        """Read prompts of any lengths, padded on the right chunk by chunk. See ``protocols.Session``."""
        last: list[mx.array | None] = [None] * len(prompts)
        for start in range(0, max(map(len, prompts)), self.chunk):
            parts = [list(prompt[start : start + self.chunk]) for prompt in prompts]
            counts = [len(part) for part in parts]
            width = max(counts)
            # Only the last token of each prompt is scored: never the whole prompt's logits.
            ends = [len(prompt) - 1 - start for prompt in prompts]
            scored = mx.array([[min(max(end, 0), width - 1)] for end in ends])
            # Padded with tokens of the row's own: NaN in the embedding of another would reach it through the mask.
            rows = [part + [prompt[-1]] * (width - len(part)) for part, prompt in zip(parts, prompts, strict=True)]
            scores = self.forward(mx.array(rows), scored)
            self.cache.rows.advance(counts)
            features = self._features(counts, width)
            for row, end in enumerate(ends):
                if 0 <= end < width:
                    last[row] = scores[row]
            absorb(parts, features)
            # Chunk by chunk: a graph over the whole prompt would hold every chunk's hidden states.
            mx.eval(self.cache.arrays, [one for one in last if one is not None])
            mx.clear_cache()
        return mx.stack([one for one in last if one is not None])

    def forward(self, tokens: mx.array, scored: mx.array | None) -> mx.array:
        """Read tokens [rows, T] behind each row's length; the cache is ahead afterwards. Nothing is evaluated.

        Args:
            scored: which of the T positions to score: indices [rows, n], or None for all.

        Returns:
            Scores [rows, n, vocab] in the model's dtype.
        """
        self.cache.tapped.clear()
        self.cache.scored = scored
        return self._model(tokens, cache=self.cache.layers)

    @contextmanager
    def verify(self, pending: list[int], proposal: Proposal) -> Iterator[Ahead]:
        """One forward over the pending token and the proposal. See ``protocols.Session``."""
        block = mx.array(pending)[:, None]
        if proposal.width:
            block = mx.concatenate([block, self._drafted(proposal, len(pending))], axis=1)
        self.cache.mark()
        ahead = None
        try:
            ahead = Ahead(self, self.forward(block, None), block.shape[1])
            yield ahead
        finally:
            if ahead is None or not ahead.kept:
                self.cache.restore()

    def _drafted(self, proposal: Proposal, rows: int) -> mx.array:
        """Proposed tokens [rows, K]; a drafter that breaks the protocol is told so."""
        drafted = mx.array(proposal.tokens)
        if drafted.shape != (rows, proposal.width) or not mx.issubdtype(drafted.dtype, mx.integer):
            raise RequestError(
                f"the drafter must propose whole numbers [{rows} rows, {proposal.width}], not {drafted.dtype} "
                f"{list(drafted.shape)}"
            )
        if isinstance(proposal.tokens, list):  # an array's values are not read back: that would cost a sync
            bad = next((t for row in proposal.tokens for t in row if not 0 <= t < self.target.vocab_size), None)
            if bad is not None:
                raise RequestError(f"the drafter proposed token {bad}, which is outside the target's vocabulary")
        return drafted_tokens(proposal, rows)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.cache.select(rows)

    def keep(self, counts: list[int], width: int) -> Features:
        """See ``protocols.Round``."""
        self.cache.keep(counts, width)
        mx.async_eval(self.cache.arrays)  # a recurrent layer's states, of which nothing was read yet
        self._since_cleared += max(counts)
        if self._since_cleared >= CLEAR_EVERY:
            self._since_cleared = 0
            mx.clear_cache()
        return self._features(counts, width)

    def _features(self, counts: list[int], width: int) -> Features:
        """The taps of the last forward, let go of here: they live until the draft has absorbed them."""
        silent = [tap for tap in self.taps if tap not in self.cache.tapped]
        if silent:
            raise UnsupportedTarget(f"{self.target.name}: layer {silent[0]} was not run, so it cannot be tapped")
        tapped = [self.cache.tapped[tap] for tap in self.taps]
        self.cache.tapped.clear()
        for states in tapped:
            check_tap(self.target.name, states.shape, (len(counts), width, self.target.hidden_size))
        return Features(mx.concatenate(tapped, axis=-1) if tapped else None, counts)


class Ahead:
    """A verified block whose caches are ahead of what is committed."""

    def __init__(self, session: MlxSession, scores: mx.array, width: int) -> None:
        self.scores = scores
        self.kept = False
        self._session = session
        self._width = width

    def keep(self, counts: list[int]) -> Features:
        """See ``protocols.Round``."""
        check_first(self.kept)
        counts = checked_counts(counts, len(self._session.lengths), self._width)
        features = self._session.keep(counts, self._width)
        self.kept = True
        return features
