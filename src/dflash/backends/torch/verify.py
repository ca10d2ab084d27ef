"""Verification on PyTorch: which proposed tokens stand, exactly as the target alone would have it.

match: the target samples at every position given the drafted prefix; the drafted tokens stand as
    long as they are what it sampled. Every emitted token is the target's own sample.
rejection: speculative sampling (Leviathan et al. 2023, arXiv 2211.17192): a token x drawn from q
    stands with probability min(1, p(x)/q(x)); the first that falls is replaced by a sample of the
    normalised positive part of p - q, and after a full block the bonus is a sample of p.

Randomness is tied to the position in the answer: position i uses the i-th numbers of the request's
own generator, whatever was drafted. So with match, a seeded answer is the same with every drafter,
block size and company, and with none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash.errors import NonFiniteScores, RequestError
from dflash.protocols import Proposal, Verdict
from dflash.sampling import SamplingParams

VERIFICATIONS = ("match", "rejection")
_BANNED, _NAN = 1, 2
"""Faults of a position, the worse the greater."""


class TorchVerifier:
    """Verifies the rows of one batch, each with its own sampling parameters, history and generator."""

    def __init__(
        self,
        sampling: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        verification: str,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """
        Raises:
            RequestError: an unknown verification, or a biased token outside the vocabulary.
        """
        if verification not in VERIFICATIONS:
            raise RequestError(f"verification must be one of {', '.join(VERIFICATIONS)}, not {verification!r}")
        self.rejection = verification == "rejection"
        self.rows = [_Row(s, p, vocab_size, device) for s, p in zip(sampling, prompts, strict=True)]

    @torch.inference_mode()
    def __call__(self, proposal: Proposal, scores: Tensor) -> Verdict:
        """See ``protocols.Verifier``.

        Raises:
            NonFiniteScores: the scores of a row's first position hold NaN.
            RequestError: every token is banned there.
        """
        rows, width = scores.shape[0], proposal.width
        drafted = torch.as_tensor(proposal.tokens if width else [[]] * rows, dtype=torch.long, device=scores.device)
        greatest = scores.argmax(dim=-1)
        # A NaN counts as the greatest: looking at the greatest finds it without reading all scores again.
        best = scores.gather(-1, greatest[..., None])[..., 0]
        if all(row.sampling.plain for row in self.rows):
            chosen, accepted = greatest, _agreeing(greatest, drafted)
        else:
            adjusted = [row.adjust(scores[i].float(), drafted[i]) for i, row in enumerate(self.rows)]
            verdicts = [
                self._verify_row(row, adjusted[i], drafted[i], None if proposal.q is None else proposal.q[i])
                for i, row in enumerate(self.rows)
            ]
            chosen = torch.stack([tokens for tokens, _ in verdicts]).to(scores.device)
            accepted = torch.stack([count for _, count in verdicts]).to(scores.device)
            best = torch.where(best.isnan(), best.float(), torch.stack([row.amax(dim=-1) for row in adjusted]))
        fault = best.isnan() * _NAN + best.isneginf() * _BANNED
        # Behind the first rejected token nothing counts. Where drafts stand up to a fault, the block ends before it:
        # if the answer ends there too, nobody ever asks; otherwise the next round begins with the fault.
        sound = (fault == 0).long().cumprod(dim=1).sum(dim=1)
        accepted = torch.minimum(accepted, (sound - 1).clamp(min=0))
        summary = torch.cat([chosen, accepted[:, None], fault[:, :1]], dim=1).tolist()  # the round's one host sync
        _raise(max(line[-1] for line in summary))
        counts = [line[width + 1] for line in summary]
        tokens = [line[: count + 1] for line, count in zip(summary, counts, strict=True)]
        for row, new in zip(self.rows, tokens, strict=True):
            row.commit(new)
        return Verdict(tokens, counts)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.rows = [self.rows[row] for row in rows]

    def _verify_row(self, row: _Row, scores: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens [K + 1], of which the first accepted + 1 count, and how many were accepted."""
        if row.sampling.greedy:
            own = scores.argmax(dim=-1)
            return own, _agreeing(own[None], drafted[None])[0]
        p = probabilities(scores, row.sampling)
        sampling_noise, accepting_noise = row.noise.peek(len(p)).to(p.device).unbind(dim=1)
        if not self.rejection:
            own = draw(p, sampling_noise)
            return own, _agreeing(own[None], drafted[None])[0]
        return reject(p, drafted, q, sampling_noise, accepting_noise)


class _Row:
    """Sampling parameters, history and generator of one request."""

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.sampling = sampling
        self.noise = Noise(sampling.seed)
        self._bias: Tensor | None = None
        self._seen: Tensor | None = None
        if sampling.logit_bias:
            beyond = max(sampling.logit_bias)
            if beyond >= vocab_size:
                raise RequestError(f"logit_bias names token {beyond}; the vocabulary ends at {vocab_size - 1}")
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[list(sampling.logit_bias)] = torch.tensor(
                list(sampling.logit_bias.values()), dtype=torch.float32, device=device
            )
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[list(prompt)] = True

    def adjust(self, scores: Tensor, drafted: Tensor) -> Tensor:
        """Bias and penalty at each of the positions [K + 1, vocab], with the prefix that position would have."""
        if self._bias is not None:
            scores = scores + self._bias
        if self._seen is not None:
            seen = self._seen.repeat(len(scores), 1)
            steps = torch.arange(len(drafted), device=scores.device)
            seen[steps + 1, drafted] = True
            seen = seen.cummax(dim=0).values if len(drafted) else seen
            penalty = self.sampling.repetition_penalty
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        return scores.clamp(max=torch.finfo(scores.dtype).max)

    def commit(self, tokens: list[int]) -> None:
        """These were emitted."""
        if not self.sampling.greedy:
            self.noise.advance(len(tokens))
        if self._seen is not None:
            self._seen[tokens] = True


class Noise:
    """Two uniform numbers a position, drawn in order from one generator; what was not used up stays."""

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._ahead = torch.empty(0, 2, dtype=torch.float64)

    def peek(self, count: int) -> Tensor:
        """[count, 2] in [0, 1): the numbers of the next positions."""
        missing = count - len(self._ahead)
        if missing > 0:
            fresh = torch.rand(missing, 2, generator=self._generator, dtype=torch.float64)
            self._ahead = torch.cat([self._ahead, fresh])
        return self._ahead[:count]

    def advance(self, count: int) -> None:
        """These positions are done."""
        self.peek(count)
        self._ahead = self._ahead[count:]


def probabilities(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """[n, vocab] float64 under temperature, top-k, top-p and min-p, as transformers applies them."""
    if scores.device.type == "mps":  # has no float64
        scores = scores.cpu()
    ids = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)  # these warpers read no history
    if sampling.temperature != 1.0:
        # From the greatest down, so that the least of temperatures does not overflow.
        scores = TemperatureLogitsWarper(float(sampling.temperature))(ids, scores - scores.amax(dim=-1, keepdim=True))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores.double().softmax(dim=-1)


def draw(p: Tensor, noise: Tensor) -> Tensor:
    """One token of each distribution [n, vocab] by inversion, from uniforms [n]. Never one of probability 0."""
    cumulative = p.cumsum(dim=-1)
    points = noise[:, None] * cumulative[:, -1:]
    # Rounding can bring a point up to the total itself: the largest number below it keeps the draw inside.
    points = torch.minimum(points, torch.nextafter(cumulative[:, -1:], torch.zeros_like(points)))
    return torch.searchsorted(cumulative, points, right=True)[:, 0]


def reject(
    p: Tensor, drafted: Tensor, q: Tensor | None, sampling_noise: Tensor, accepting_noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of one row.

    Args:
        p: [K + 1, vocab], the target's distributions.
        drafted: [K], drawn from ``q`` [K, vocab]; None for tokens that were not drawn at random.

    Returns:
        Tokens [K + 1], of which the first accepted + 1 count, and the number accepted.
    """
    drafted = drafted.to(p.device)
    width = len(drafted)
    if q is None:
        q = torch.nn.functional.one_hot(drafted, p.shape[-1])
    q = q.to(p).nan_to_num()
    steps = torch.arange(width, device=p.device)
    stands = accepting_noise[:width] * q[steps, drafted] < p[steps, drafted]
    accepted = stands.long().cumprod(dim=0).sum()
    # What replaces a fallen token at each position, and the bonus behind the last.
    residual = torch.cat([(p[:width] - q).clamp(min=0.0), p[width:]])
    # Nothing is left where q is p, and then nothing falls there: but for a q that is no distribution.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
    own = draw(residual[accepted][None], sampling_noise[accepted][None])
    chosen = torch.cat([drafted, own])
    chosen[accepted] = own[0]
    return chosen, accepted


def _raise(fault: int) -> None:
    if fault == _NAN:
        raise NonFiniteScores(
            "the target's scores are not numbers (NaN): try dtype float32 or bfloat16, and check its weights"
        )
    if fault == _BANNED:
        raise RequestError("logit_bias bans every token: leave at least one")


def _agreeing(own: Tensor, drafted: Tensor) -> Tensor:
    """[rows]: how many drafted tokens in a row are the target's own, from the first on."""
    return (own[:, : drafted.shape[1]] == drafted).long().cumprod(dim=1).sum(dim=1)
