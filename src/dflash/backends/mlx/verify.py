"""Verification on MLX: which proposed tokens stand, exactly as the target alone would have it.

match: the target samples at every position given the drafted prefix; the drafted tokens stand as
    long as they are what it sampled. Every emitted token is the target's own sample.
rejection: speculative sampling (Leviathan et al. 2023, arXiv 2211.17192): a token x drawn from q
    stands with probability min(1, p(x)/q(x)); the first that falls is replaced by a sample of the
    normalised positive part of p - q, and after a full block the bonus is a sample of p.

Randomness is tied to the position in the answer, as on PyTorch: position i uses the i-th numbers of the
request's own generator. All rows are computed at once, lazily; a round is evaluated in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dflash.errors import NonFiniteScores, RequestError
from dflash.protocols import Proposal, Verdict
from dflash.sampling import SamplingParams

VERIFICATIONS = ("match", "rejection")


class MlxVerifier:
    """Verifies the rows of one batch, each with its own sampling parameters, history and generator."""

    def __init__(
        self,
        sampling: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        verification: str,
        vocab_size: int,
    ) -> None:
        """
        Raises:
            RequestError: an unknown verification, or a biased token outside the vocabulary.
        """
        if verification not in VERIFICATIONS:
            raise RequestError(f"verification must be one of {', '.join(VERIFICATIONS)}, not {verification!r}")
        self.rejection = verification == "rejection"
        self.processors = Processors(sampling, vocab_size)
        self.noise = [Noise(one.seed) for one in sampling]
        self._seen: mx.array | None = None
        if any(one.repetition_penalty != 1.0 for one in sampling):
            seen = np.zeros((len(prompts), vocab_size), dtype=bool)
            for row, prompt in zip(seen, prompts, strict=True):
                row[list(prompt)] = True
            self._seen = mx.array(seen)

    def __call__(self, proposal: Proposal, scores: mx.array) -> Verdict:
        """See ``protocols.Verifier``.

        Raises:
            NonFiniteScores: the scores of a row's first position hold NaN.
            RequestError: every token is banned there.
        """
        drafted = drafted_tokens(proposal, scores.shape[0])
        nan = mx.isnan(scores).any(axis=-1)
        if not self.processors.plain:
            scores = self.processors.adjust(scores.astype(mx.float32), self._prefixes(drafted))
        greatest = mx.argmax(scores, axis=-1)
        # Looked up, not sought again: every pass over the vocabulary is time.
        banned = mx.take_along_axis(scores, greatest[..., None], axis=-1)[..., 0] == -mx.inf
        chosen, accepted = self._choose(scores, greatest.astype(mx.int32), drafted, proposal.q)
        verdict = read_verdict(chosen, accepted, nan, banned)
        for row, new in enumerate(verdict.tokens):
            if not self.processors.greedy_everywhere:
                self.noise[row].advance(len(new))
            if self._seen is not None:
                self._seen[row, mx.array(new)] = True
        self._settle()
        return verdict

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.noise = [self.noise[row] for row in rows]
        self.processors.select(rows)
        if self._seen is not None:
            self._seen = self._seen[mx.array(rows)]
        self._settle()

    def _settle(self) -> None:
        """Set going what outlives the round: the next one may run in another thread (see ``cache``)."""
        if self._seen is not None:
            mx.async_eval(self._seen)

    def _prefixes(self, drafted: mx.array) -> mx.array | None:
        """Bool [rows, K + 1, vocab]: the tokens before each position, if the drafted ones before it stand."""
        if self._seen is None:
            return None
        own = drafted[..., None] == mx.arange(self._seen.shape[-1])
        before = mx.concatenate([self._seen[:, None], own], axis=1).astype(mx.int32)
        return mx.cumsum(before, axis=1) > 0

    def _choose(
        self, scores: mx.array, greatest: mx.array, drafted: mx.array, q: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Tokens [rows, K + 1], of which the first accepted + 1 count, and how many were accepted [rows]."""
        if self.processors.greedy_everywhere:
            return greatest, agreeing(greatest, drafted)
        keys, uniforms = noise_of(self.noise, scores.shape[1])
        warped = self.processors.warp(scores)
        greedy = self.processors.greedy[:, None]
        own = mx.where(greedy, greatest, draw(warped, keys))
        accepted = agreeing(own, drafted)
        if not self.rejection:
            return own, accepted
        tokens, count = reject(mx.softmax(warped, axis=-1), drafted, q, keys, uniforms)
        return mx.where(greedy, own, tokens), mx.where(greedy[:, 0], accepted, count)


class Processors:
    """What sampling parameters do to scores, for all rows at once; each as transformers does it, in its order."""

    def __init__(self, sampling: Sequence[SamplingParams], vocab_size: int) -> None:
        """
        Raises:
            RequestError: a biased token outside the vocabulary.
        """
        self.vocab_size = vocab_size
        self._rows = list(sampling)
        self._arrays()

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self._rows = [self._rows[row] for row in rows]
        self._arrays()

    def _arrays(self) -> None:
        rows = self._rows
        self.plain = all(row.plain for row in rows)
        self.greedy_everywhere = all(row.greedy for row in rows)
        self.greedy = mx.array([row.greedy for row in rows])
        self._temperature = _column([1.0 if row.greedy else row.temperature for row in rows])
        self._penalty = _column([row.repetition_penalty for row in rows])
        self._top_p, self._min_p = _column([row.top_p for row in rows]), _column([row.min_p for row in rows])
        self._top_k = mx.array([min(row.top_k or self.vocab_size, self.vocab_size) for row in rows])[:, None, None]
        self._bias = self._biases() if any(row.logit_bias for row in rows) else None
        # They outlive the round, and the next one may run in another thread (see ``cache``).
        mx.async_eval(self.greedy, self._temperature, self._penalty, self._top_p, self._min_p, self._top_k)

    def _biases(self) -> mx.array:
        """[rows, 1, vocab]"""
        bias = np.zeros((len(self._rows), 1, self.vocab_size), dtype=np.float32)
        for row, own in zip(self._rows, bias, strict=True):
            for token, value in row.logit_bias.items():
                if token >= self.vocab_size:
                    raise RequestError(f"logit_bias names token {token}; the vocabulary ends at {self.vocab_size - 1}")
                own[0, token] = value
        return mx.array(bias)

    def adjust(self, scores: mx.array, seen: mx.array | None) -> mx.array:
        """Bias and repetition penalty [rows, n, vocab]; ``seen`` says which tokens come before each position."""
        if self._bias is not None:
            scores = scores + self._bias
        if seen is not None:
            punished = mx.where(scores < 0, scores * self._penalty, scores / self._penalty)
            scores = mx.where(seen, punished, scores)
        return mx.minimum(scores, mx.finfo(mx.float32).max)

    def warp(self, scores: mx.array) -> mx.array:
        """Log-probabilities but for a constant [rows, n, vocab], under temperature, top-k, top-p and min-p."""
        # From the greatest down, so that the least of temperatures does not overflow.
        scores = (scores - scores.max(axis=-1, keepdims=True)) / self._temperature
        if any(row.top_k for row in self._rows):
            ranked = mx.sort(scores, axis=-1)
            place = mx.broadcast_to(self.vocab_size - self._top_k, (*scores.shape[:2], 1))
            scores = mx.where(scores < mx.take_along_axis(ranked, place, axis=-1), -mx.inf, scores)
        if any(row.top_p < 1.0 for row in self._rows):
            scores = self._nucleus(scores)
        if any(row.min_p > 0.0 for row in self._rows):
            p = mx.softmax(scores, axis=-1)
            scores = mx.where(p < self._min_p * p.max(axis=-1, keepdims=True), -mx.inf, scores)
        return scores

    def _nucleus(self, scores: mx.array) -> mx.array:
        """top-p: from the least likely up, drop while what is dropped stays within 1 - p; never the last."""
        order = mx.argsort(scores, axis=-1)
        mass = mx.cumsum(mx.softmax(mx.take_along_axis(scores, order, axis=-1), axis=-1), axis=-1)
        dropped = (mass <= 1.0 - self._top_p) & (mx.arange(self.vocab_size) < self.vocab_size - 1)
        dropped = mx.put_along_axis(mx.zeros_like(dropped), order, dropped, axis=-1)
        return mx.where(dropped & (self._top_p < 1.0), -mx.inf, scores)


class Noise:
    """A random key and a uniform number for each position, drawn in order; what was not used up stays."""

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)
        self._ahead = np.empty((0, 3), dtype=np.uint32)

    def peek(self, count: int) -> np.ndarray:
        """[count, 3] uint32: the numbers of the next positions."""
        missing = count - len(self._ahead)
        if missing > 0:
            fresh = self._generator.integers(0, 2**32, size=(missing, 3), dtype=np.uint32)
            self._ahead = np.concatenate([self._ahead, fresh])
        return self._ahead[:count]

    def advance(self, count: int) -> None:
        """These positions are done."""
        self.peek(count)
        self._ahead = self._ahead[count:]


def noise_of(rows: Sequence[Noise], count: int) -> tuple[mx.array, mx.array]:
    """Keys [rows, count, 2] and uniforms in [0, 1) [rows, count], float32, of each row's next positions."""
    numbers = np.stack([noise.peek(count) for noise in rows])
    # 24 bits: all of them are float32 numbers, and none rounds up to 1.
    return mx.array(numbers[..., :2]), mx.array((numbers[..., 2] >> 8).astype(np.float32) / 2**24)


_draw_one = mx.vmap(mx.vmap(lambda scores, key: mx.random.categorical(scores, key=key)))


def draw(scores: mx.array, keys: mx.array) -> mx.array:
    """Tokens [rows, n] int32 of log-probabilities [rows, n, vocab], each with its own key [rows, n, 2]."""
    tokens: mx.array = _draw_one(scores, keys).astype(mx.int32)
    return tokens


def reject(
    p: mx.array, drafted: mx.array, q: mx.array | None, keys: mx.array, uniforms: mx.array
) -> tuple[mx.array, mx.array]:
    """Speculative sampling.

    Args:
        p: [rows, K + 1, vocab], the target's distributions.
        drafted: [rows, K], drawn from ``q`` [rows, K, vocab]; None for tokens that were not drawn at random.
        keys, uniforms: of ``noise_of``; uniforms accept, keys draw.

    Returns:
        Tokens [rows, K + 1], of which the first accepted + 1 count, and the numbers accepted [rows].
    """
    width = drafted.shape[1]
    if q is None:
        q = (drafted[..., None] == mx.arange(p.shape[-1])).astype(p.dtype)
    q = mx.nan_to_num(mx.array(q).astype(p.dtype))
    at = drafted[..., None]
    ours = mx.take_along_axis(p[:, :width], at, axis=-1)[..., 0]
    theirs = mx.take_along_axis(q, at, axis=-1)[..., 0]
    accepted = _leading(uniforms[:, :width] * theirs < ours)
    # What replaces a fallen token at each position, and the bonus behind the last.
    residual = mx.concatenate([mx.maximum(p[:, :width] - q, 0.0), p[:, width:]], axis=1)
    # Nothing is left where q is p, and then nothing falls there: but for a q that is no distribution.
    residual = mx.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p)
    own = draw(mx.log(residual), keys)
    steps = mx.arange(width + 1)
    padded = mx.concatenate([drafted, own[:, -1:]], axis=1)
    return mx.where(steps < accepted[:, None], padded, own), accepted


def drafted_tokens(proposal: Proposal, rows: int) -> mx.array:
    """The proposed tokens, [rows, K] int32."""
    if not proposal.width:
        return mx.zeros((rows, 0), mx.int32)
    return mx.array(proposal.tokens).astype(mx.int32)


def agreeing(own: mx.array, drafted: mx.array) -> mx.array:
    """[rows]: how many drafted tokens in a row are the target's own, from the first on."""
    return _leading(own[:, : drafted.shape[1]] == drafted)


def _leading(stands: mx.array) -> mx.array:
    """[rows] int32: True values from the first on."""
    if not stands.shape[1]:
        return mx.zeros(stands.shape[:1], mx.int32)
    return mx.cumprod(stands.astype(mx.int32), axis=1).sum(axis=1)


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None, None]


# --- where a round is evaluated -----------------------------------------------------------------------


def read_verdict(chosen: mx.array, accepted: mx.array, nan: mx.array, banned: mx.array) -> Verdict:
    """Chosen tokens [rows, K + 1] and accepted counts [rows], brought to the host.

    Behind the first rejected token nothing counts. Where drafts stand up to a fault, the block ends before it: if the
    answer ends there too, nobody ever asks; otherwise the next round begins with the fault.

    Raises:
        NonFiniteScores, RequestError: where ``nan`` or ``banned`` [rows, K + 1] say so of a row's first position.
    """
    accepted = before_faults(accepted, nan | banned)
    columns = [chosen, accepted[:, None], nan[:, :1], banned[:, :1]]
    return verdict_of(evaluated(mx.concatenate([column.astype(mx.int32) for column in columns], axis=1)))


def before_faults(accepted: mx.array, fault: mx.array) -> mx.array:
    """[rows] accepted counts of blocks that end before their first fault, a bool [rows, K + 1]."""
    return mx.minimum(accepted, mx.maximum(_leading(~fault) - 1, 0))


def evaluated(summary: mx.array) -> list[list[int]]:
    """The one host sync of a round."""
    mx.eval(summary)
    lines: Any = summary.tolist()
    return lines


def verdict_of(lines: list[list[int]]) -> Verdict:
    if any(line[-2] for line in lines):
        raise NonFiniteScores(
            "the target's scores are not numbers (NaN): try dtype float32 or bfloat16, and check its weights"
        )
    if any(line[-1] for line in lines):
        raise RequestError("logit_bias bans every token: leave at least one")
    counts = [line[-3] for line in lines]
    return Verdict([line[: count + 1] for line, count in zip(lines, counts, strict=True)], counts)
