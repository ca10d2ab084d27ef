"""Sampling is distribution-exact: chi-square of joint multi-token answers over a small vocabulary.

The expected distribution is enumerated with transformers' own processors over the target's scores.
A deliberately broken verifier fails the same test.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import tiny
from dflash.backends.torch import verify
from dflash.backends.torch.draft import DFlashDrafting
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.drafters import BothDrafters, NGramDrafter, NoDrafter
from dflash.errors import RequestError
from dflash.limits import Output
from dflash.protocols import NOTHING, Features, Proposal
from dflash.sampling import SamplingParams

VOCAB, LENGTH, SAMPLES = 5, 3, 3000
PROMPT = [1, 3, 1, 0, 2, 1, 3]


@functools.cache
def model() -> Any:
    """The tiny model, by transformers: what the expected distributions are computed from."""
    made = tiny.model("llama", vocab_size=VOCAB, seed=3, num_hidden_layers=2)
    made.lm_head.weight.data *= 0.6  # spread out, so that every processor has something to do
    return made


@pytest.fixture(scope="module")
def torch_target() -> TorchTarget:
    return TorchTarget(model(), tiny.tokenizer(), "tiny llama")


@pytest.fixture(scope="module", params=["torch", "mlx"])
def target(request: Any, torch_target: TorchTarget, tmp_path_factory: Any) -> Any:
    """The same model on each backend."""
    if request.param == "torch":
        return torch_target
    pytest.importorskip("mlx_lm")
    import tiny_mlx

    return tiny_mlx.converted(model(), "llama", tmp_path_factory.mktemp("target"))


def draft_for(target: Any, folder: Path, **overrides: Any) -> Any:
    """The same random draft on each backend."""
    if target.backend == "torch":
        return tiny.draft(target, **overrides)
    import tiny_mlx

    return tiny_mlx.draft(target, folder / "draft", **overrides)


class GuessDrafter:
    """Proposes fixed tokens, or with ``samples`` draws them from a q unlike the target's p, and says so."""

    block_size = 3
    taps: tuple[int, ...] = ()

    def __init__(self, samples: bool) -> None:
        self.samples = samples

    def start(self, target: Any, sampling: Sequence[SamplingParams], verification: str, step: int) -> GuessDrafter:
        self.generator = torch.Generator().manual_seed(5)
        self.backend = target.backend
        return self

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass

    def propose(self, pending: list[int], room: int) -> Proposal:
        if room == 0:
            return NOTHING
        if not self.samples:
            return Proposal([[3, 1, 2, 0][:room]] * len(pending), room)
        q = torch.tensor([[0.1, 0.5, 0.05, 0.3, 0.05], [0.3, 0.1, 0.4, 0.1, 0.1]])[:room].repeat(len(pending), 1, 1)
        drawn = torch.multinomial(q.flatten(0, 1), 1, generator=self.generator).view(len(pending), room)
        if self.backend == "mlx":
            import mlx.core as mx

            return Proposal(mx.array(drawn.numpy()), room, mx.array(q.numpy()))
        return Proposal(drawn, room, q)


PARAMS = {
    "temperature": SamplingParams(temperature=1.3),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.6),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 1.5, 3: float("-inf")}),
    "all": SamplingParams(0.8, 0.9, 4, 0.05, 1.2, {2: 0.5}),
}


def expected(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer of LENGTH tokens."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    processors += [TopPLogitsWarper(params.top_p), MinPLogitsWarper(params.min_p)]
    bias = torch.zeros(VOCAB)
    for token, value in params.logit_bias.items():
        bias[token] = value
    result = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = list(result)
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        with torch.no_grad():
            scores = model()(ids).logits[:, -1]
        p = processors(ids, scores + bias).double().softmax(-1)
        result = {
            (*prefix, token): result[prefix] * float(p[i, token])
            for i, prefix in enumerate(prefixes)
            for token in range(VOCAB)
        }
    return {answer: p for answer, p in result.items() if p > 0}


def sample(
    target: Any, drafter: Any, params: SamplingParams, verification: str, count: int, batch: int
) -> list[tuple[int, ...]]:
    """Answers, as rows of batches, each row with a generator of its own."""
    answers = []
    for first in range(0, count, batch):
        done = [Output(lambda ids: "", LENGTH) for _ in range(batch)]
        rows = [
            Request(PROMPT, SamplingParams(**{**vars(params), "seed": first + i}), output)
            for i, output in enumerate(done)
        ]
        for _ in decode(target, drafter, rows, block_size=drafter.block_size, verification=verification):
            pass
        answers += [tuple(output.tokens) for output in done]
    return answers


def p_value(
    target: Any, drafter: Any, params: SamplingParams, verification: str, count: int = SAMPLES, batch: int = 1000
) -> float:
    """Of the chi-square test that the answers are distributed as the target's; rare answers pooled."""
    want = expected(params)
    have = Counter(sample(target, drafter, params, verification, count, batch))
    assert set(have) <= set(want), "an answer the target would never give"
    common = [answer for answer in want if want[answer] * count >= 5]
    observed = [have[answer] for answer in common]
    wanted = [want[answer] * count for answer in common]
    rest = count - sum(wanted)
    if rest > 1e-6:
        observed.append(count - sum(observed))
        wanted.append(rest)
    assert len(wanted) > 5, "too few different answers for a test"
    return float(chisquare(observed, wanted, sum_check=False).pvalue)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(
    ("verification", "samples"),
    [("match", False), ("rejection", False), ("rejection", True)],
    ids=["match", "rejection of a fixed draft", "rejection of a sampled draft"],
)
def test_joint_distribution_is_the_targets(
    target: Any, params: SamplingParams, samples: bool, verification: str
) -> None:
    assert p_value(target, GuessDrafter(samples), params, verification) > 1e-3


def test_joint_distribution_of_plain_decoding(target: Any) -> None:
    assert p_value(target, NoDrafter(), PARAMS["all"], "match") > 1e-3


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_joint_distribution_with_a_dflash_draft(target: Any, tmp_path: Path, verification: str) -> None:
    draft = draft_for(target, tmp_path, block_size=3, mask_token_id=4)
    assert p_value(target, draft, PARAMS["all"], verification) > 1e-3


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_joint_distribution_with_a_draft_of_a_part_of_the_vocabulary(
    target: Any, tmp_path: Path, verification: str
) -> None:
    draft = draft_for(target, tmp_path, block_size=3, mask_token_id=4, draft_vocab_size=3)
    assert p_value(target, draft, PARAMS["all"], verification) > 1e-3


CUT = {"verification": "rejection", "count": 1500, "batch": 1}
"""Rows of a batch share the longest of their blocks: only a single row's is really cut."""


def test_joint_distribution_where_a_draft_ends_its_blocks(torch_target: TorchTarget) -> None:
    draft = tiny.draft(torch_target, block_size=3, mask_token_id=4)
    draft.min_confidence = 0.3
    assert p_value(torch_target, draft, PARAMS["temperature"], **CUT) > 1e-3


def test_blocks_that_end_by_what_was_drawn_are_found_out(torch_target: TorchTarget, monkeypatch: Any) -> None:
    choose = DFlashDrafting._choose

    def broken(self: DFlashDrafting, scores: Tensor) -> Proposal:
        whole = choose(self, scores)
        likely = whole.q.gather(-1, whole.tokens[..., None])[0, :, 0] > 0.3
        width = int(likely.long().cumprod(0).sum())
        return Proposal(whole.tokens[:, :width], width, whole.q[:, :width])

    monkeypatch.setattr(DFlashDrafting, "_choose", broken)
    draft = tiny.draft(torch_target, block_size=3, mask_token_id=4)
    assert p_value(torch_target, draft, PARAMS["temperature"], **CUT) < 1e-9


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_joint_distribution_with_a_draft_and_n_grams(torch_target: TorchTarget, verification: str) -> None:
    both = BothDrafters(GuessDrafter(True), NGramDrafter(min_ngram=1))
    assert p_value(torch_target, both, PARAMS["all"], verification) > 1e-3


def broken_argmax_q(p: Tensor, drafted: Tensor, q: Tensor | None, *noise: Tensor) -> Any:
    """V5: the ratio of a fixed draft computed as if it had been drawn from the uniform distribution."""
    return ORIGINAL(p, drafted, torch.full_like(p[:-1], 1 / VOCAB), *noise)


def broken_residual(p: Tensor, drafted: Tensor, q: Tensor | None, *noise: Tensor) -> Any:
    """V9: the replacement drawn from p itself, not from what is left of it."""
    tokens, accepted = ORIGINAL(p, drafted, q, *noise)
    tokens[accepted] = verify.draw(p[accepted][None], noise[0][accepted][None])[0]
    return tokens, accepted


ORIGINAL = verify.reject


@pytest.mark.parametrize("broken", [broken_argmax_q, broken_residual])
def test_a_broken_verifier_is_found_out(torch_target: TorchTarget, broken: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(verify, "reject", broken)
    assert p_value(torch_target, GuessDrafter(False), PARAMS["temperature"], "rejection") < 1e-9


@pytest.mark.parametrize("emits_the_draft", [False, True])
def test_an_always_accepting_verifier_is_found_out(
    torch_target: TorchTarget, emits_the_draft: bool, monkeypatch: Any
) -> None:
    """It goes on with what it sampled after the draft's tokens, or with those tokens themselves."""
    monkeypatch.setattr(verify, "_agreeing", lambda own, drafted: torch.full((len(own),), drafted.shape[1]))
    if emits_the_draft:
        monkeypatch.setattr(verify, "draw", lambda p, noise: torch.tensor([3, 1, 2])[: len(p)])
    assert p_value(torch_target, GuessDrafter(False), PARAMS["temperature"], "match") < 1e-9


# --- seeds, rows, greedy with processors ------------------------------------------------------------


def answer(target: Any, drafter: Any, params: SamplingParams, count: int = 24, **options: Any) -> list[int]:
    done = Output(lambda ids: "", count)
    block = options.pop("block_size", drafter.block_size)
    for _ in decode(target, drafter, [Request(PROMPT, params, done)], block_size=block, **options):
        pass
    return done.tokens


def test_a_seeded_answer_is_the_same_with_every_drafter_and_block(target: Any, tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=11)
    plain = answer(target, NoDrafter(), params)
    draft = draft_for(target, tmp_path, mask_token_id=4)
    both = BothDrafters(draft, NGramDrafter(min_ngram=1))
    for drafter in (GuessDrafter(False), GuessDrafter(True), NGramDrafter(min_ngram=1), draft, both):
        assert answer(target, drafter, params) == plain
    for block in (2, 3, 5, 8):
        assert answer(target, draft, params, block_size=block) == plain
    for draft.min_confidence in (0.2, 0.4, 1.0):
        assert answer(target, draft, params) == plain
    assert answer(target, NoDrafter(), SamplingParams(temperature=1.0, seed=12)) != plain


def test_a_seeded_answer_repeats_with_rejection(target: Any, tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=4)
    draft = draft_for(target, tmp_path, mask_token_id=4)
    first = answer(target, draft, params, verification="rejection")
    answer(target, draft, SamplingParams(temperature=1.0), verification="rejection")
    assert answer(target, draft, params, verification="rejection") == first


def test_unseeded_answers_differ(target: Any) -> None:
    params = SamplingParams(temperature=1.0)
    assert len({tuple(answer(target, NoDrafter(), params)) for _ in range(4)}) > 1


def test_mixed_rows_are_each_as_if_alone(target: Any, tmp_path: Path) -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=0.7, top_k=2, logit_bias={4: 2.0}, seed=8),
    ]
    draft = draft_for(target, tmp_path, mask_token_id=4, block_size=4)
    done = [Output(lambda ids: "", 9 + i) for i in range(len(kinds))]
    rows = [Request(PROMPT[i:], params, output) for i, (params, output) in enumerate(zip(kinds, done, strict=True))]
    for _ in decode(target, draft, rows, block_size=4):
        pass
    for i, params in enumerate(kinds):
        alone = Output(lambda ids: "", 9 + i)
        for _ in decode(target, draft, [Request(PROMPT[i:], params, alone)], block_size=4):
            pass
        assert done[i].tokens == alone.tokens


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_greedy_with_a_penalty_is_transformers_own(target: Any, penalty: float) -> None:
    ids = torch.tensor([PROMPT])
    own = model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
    )
    params = SamplingParams(repetition_penalty=penalty)
    for drafter in (NoDrafter(), NGramDrafter(min_ngram=1), GuessDrafter(False)):
        assert answer(target, drafter, params) == own[0, len(PROMPT) :].tolist()


def test_a_banned_token_never_comes(target: Any) -> None:
    greedy = answer(target, NoDrafter(), SamplingParams())
    banned = SamplingParams(logit_bias={greedy[0]: float("-inf")})
    assert greedy[0] not in answer(target, GuessDrafter(False), banned)


def test_a_bias_outside_the_vocabulary_is_refused(target: Any) -> None:
    with pytest.raises(RequestError, match="token 5; the vocabulary ends at 4"):
        answer(target, NoDrafter(), SamplingParams(logit_bias={5: 1.0}))


def test_an_unknown_verification_is_refused(target: Any) -> None:
    with pytest.raises(RequestError, match="match, rejection"):
        answer(target, NoDrafter(), SamplingParams(), verification="both")


# --- the pieces -------------------------------------------------------------------------------------


def test_draw_inverts_and_never_takes_an_impossible_token() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64)
    at = [0.0, 0.2, 0.25, 0.9, 1 - 2**-53]
    drawn = [int(verify.draw(p, torch.tensor([u], dtype=torch.float64))) for u in at]
    assert drawn == [1, 1, 3, 3, 3]


def test_noise_is_tied_to_the_position() -> None:
    one, two = verify.Noise(3), verify.Noise(3)
    first = one.peek(8).clone()
    two.peek(2)
    two.advance(1)
    assert torch.equal(two.peek(7), first[1:])
    two.advance(5)
    assert torch.equal(two.peek(2), first[6:])


@pytest.mark.parametrize("rejected", [0, 1, 2])
def test_the_replacement_comes_from_the_row_that_rejected(rejected: int) -> None:
    """V9: p is certain of token 4 - k in row k; the draft is right before ``rejected`` and wrong there."""
    certain = torch.eye(VOCAB, dtype=torch.float64)[[4, 3, 2, 1]]
    drafted = torch.tensor([4, 3, 2])
    drafted[rejected] = 0
    noise = torch.full((4,), 0.5, dtype=torch.float64)
    tokens, accepted = verify.reject(certain, drafted, None, noise, noise)
    assert int(accepted) == rejected
    assert int(tokens[rejected]) == 4 - rejected
