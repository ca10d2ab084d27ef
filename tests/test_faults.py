"""Scores that are no numbers, and bans of everything: told where plain decoding would meet them, and nowhere else."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

import fakes
import tiny
from dflash.backends.torch.check import check_rollback
from dflash.backends.torch.target import TorchTarget
from dflash.backends.torch.verify import TorchVerifier
from dflash.decode import Request, decode
from dflash.difference import first_difference
from dflash.drafters import NoDrafter
from dflash.errors import NonFiniteScores, RequestError, UnsupportedTarget
from dflash.limits import Output
from dflash.protocols import Proposal
from dflash.sampling import SamplingParams

BACKENDS = ["torch", *(["mlx"] if importlib.util.find_spec("mlx_lm") else [])]
ARCHITECTURES = ["qwen3", "gpt-oss", "qwen3-next", "falcon-h1"]
PROMPTS = [[11, 3, 60, 7, 22], [5, 5, 9, 33, 2, 17, 40, 8, 61, 12, 30, 4, 19]]
TOKENS = 24
NAN = math.nan


def target_with_nan(backend: str, architecture: str, token: int) -> Any:
    """A target that computes NaN wherever it reads one token."""
    if backend == "torch":
        made = tiny.model(architecture)
        of = TorchTarget(made, tiny.tokenizer(), architecture)
        check_rollback(of)  # while it is sound
        made.get_input_embeddings().weight.data[token] = NAN
        return of
    import tiny_mlx
    from dflash.backends.mlx.target import MlxTarget

    made = tiny_mlx.model(architecture)
    embedding = next(module for name, module in made.named_modules() if name.endswith("embed_tokens"))
    embedding.weight[token] = NAN
    return MlxTarget(made, tiny.tokenizer(), architecture, tiny_mlx.config(architecture))


def sound_target(backend: str, architecture: str) -> Any:
    if backend == "torch":
        return tiny.target(architecture)
    import tiny_mlx

    return tiny_mlx.target(architecture)


def answers(target: Any, drafter: Any, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    done = [Output(lambda ids: "", TOKENS) for _ in prompts]
    rows = [Request(prompt, params, output) for prompt, output in zip(prompts, done, strict=True)]
    for _ in decode(target, drafter, rows, block_size=max(drafter.block_size, 2)):
        pass
    return [output.tokens for output in done]


def unused(*texts: list[int]) -> int:
    """A token that is in none of the texts."""
    return next(token for token in range(1, 64) if not any(token in text for text in texts))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_whose_tokens_are_nan_to_the_target_changes_nothing(backend: str, architecture: str) -> None:
    """It spoils its whole block, and what it leaves in the caches would spoil the blocks after it."""
    plain = answers(sound_target(backend, architecture), NoDrafter(), PROMPTS, SamplingParams())
    bad = unused(*plain, *PROMPTS)
    broken = target_with_nan(backend, architecture, bad)

    def choose(truth: list[int], round_number: int) -> list[int]:
        right = round_number % 4
        return [*truth[:right], *[bad] * (len(truth) - right)] if round_number % 2 else truth

    for rows in ([0], [1], [0, 1]):
        oracle = fakes.OracleDrafter(5, [[*PROMPTS[i], *plain[i]] for i in rows], choose)
        assert answers(broken, oracle, [PROMPTS[i] for i in rows], SamplingParams()) == [plain[i] for i in rows]
        assert oracle.proposals > 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_padded_with_nothing_that_they_do_not_hold(backend: str, architecture: str) -> None:
    prompts = [[*PROMPTS[0]], [*PROMPTS[1]], [33]]
    expected = answers(sound_target(backend, architecture), NoDrafter(), prompts, SamplingParams())
    for token in {0, unused(*prompts, *expected)}:
        if any(token in text for text in expected):
            continue
        of = target_with_nan(backend, architecture, token)
        assert answers(of, NoDrafter(), prompts, SamplingParams()) == expected


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seeded_answer_stays_the_same_with_a_draft_of_nan(backend: str, verification: str) -> None:
    params = SamplingParams(temperature=0.7, repetition_penalty=1.1, seed=3)
    [plain] = answers(sound_target(backend, "qwen3"), NoDrafter(), PROMPTS[:1], params)
    bad = unused(plain, PROMPTS[0])
    oracle = fakes.OracleDrafter(4, [[*PROMPTS[0], *plain]], lambda truth, _: [bad] * len(truth))
    broken = target_with_nan(backend, "qwen3", bad)
    assert answers(broken, oracle, PROMPTS[:1], params) == [plain]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_that_plain_decoding_meets_is_met_at_the_same_token(backend: str) -> None:
    [own] = answers(sound_target(backend, "qwen3"), NoDrafter(), PROMPTS[:1], SamplingParams())
    at = next(i for i in range(6, TOKENS) if own[i] not in [*PROMPTS[0], *own[:i]])
    broken = target_with_nan(backend, "qwen3", own[at])
    for drafter in (NoDrafter(), fakes.OracleDrafter(4, [[*PROMPTS[0], *own]], fakes.perfect)):
        done = Output(lambda ids: "", TOKENS)
        rounds = decode(broken, drafter, [Request(PROMPTS[0], SamplingParams(), done)], block_size=4)
        with pytest.raises(NonFiniteScores, match="NaN"):
            list(rounds)
        assert done.tokens == own[: at + 1]
        ended = Output(lambda ids: "", TOKENS, frozenset([own[at]]))
        list(decode(broken, drafter, [Request(PROMPTS[0], SamplingParams(), ended)], block_size=4))
        assert ended.tokens == own[: at + 1], "an answer that ends there never asks what comes next"


# --- the verifiers themselves -----------------------------------------------------------------------

KINDS = {
    "greedy": SamplingParams(),
    "processors": SamplingParams(repetition_penalty=1.01, logit_bias={0: 0.5}),
    "sampled": SamplingParams(temperature=0.01, seed=1),
    "all": SamplingParams(0.01, 0.9, 3, 0.01, 1.01, {0: 0.5}, seed=1),
}
OWN = [4, 3, 2, 1]
"""What the target would say at each position."""


def judged(
    backend: str, params: SamplingParams, verification: str, drafted: list[int], spoiled: dict[int, float]
) -> Any:
    """The verdict on three drafted tokens, where the scores of some positions are one value throughout."""
    scores = [[9.0 if token == own else float(token) / 9 for token in range(5)] for own in OWN]
    for position, value in spoiled.items():
        scores[position] = [value] * 5
    if backend == "torch":
        judge: Any = TorchVerifier([params], [[1]], verification, 5, torch.device("cpu"))
        return judge(Proposal([drafted], 3), torch.tensor([scores]))
    import mlx.core as mx

    from dflash.backends.mlx.verify import MlxVerifier

    return MlxVerifier([params], [[1]], verification, 5)(Proposal([drafted], 3), mx.array([scores]))


@pytest.mark.parametrize("fault", [NAN, -math.inf], ids=["nan", "banned"])
@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
class TestFaults:
    def test_behind_the_first_rejected_token_nothing_counts(
        self, backend: str, params: SamplingParams, verification: str, fault: float
    ) -> None:
        for right in range(3):
            drafted = [*OWN[:right], *[0] * (3 - right)]
            behind = dict.fromkeys(range(right + 1, 4), fault)
            verdict = judged(backend, params, verification, drafted, behind)
            assert (verdict.tokens, verdict.accepted) == ([OWN[: right + 1]], [right])

    def test_drafts_that_stand_up_to_a_fault_end_before_it(
        self, backend: str, params: SamplingParams, verification: str, fault: float
    ) -> None:
        for at in range(1, 4):
            verdict = judged(backend, params, verification, OWN[:3], {at: fault})
            assert (verdict.tokens, verdict.accepted) == ([OWN[:at]], [at - 1])

    def test_a_fault_of_the_first_position_is_told(
        self, backend: str, params: SamplingParams, verification: str, fault: float
    ) -> None:
        with pytest.raises(NonFiniteScores if math.isnan(fault) else RequestError):
            judged(backend, params, verification, OWN[:3], {0: fault})


@pytest.mark.skipif("mlx" not in BACKENDS, reason="mlx is not installed")
def test_a_sampler_of_mlx_lms_meets_only_what_counts_and_draws_again() -> None:
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    from dflash.backends.mlx.sampler import SamplerVerifier

    scores = [[9.0 if token == own else 0.0 for token in range(5)] for own in OWN]
    for right in range(4):
        spoiled = mx.array([[*scores[: right + 1], *[[NAN] * 5] * (3 - right)]])
        drafted = [*OWN[:right], *[0] * (3 - right)]
        verdict = SamplerVerifier(make_sampler(0.01), [], [1])(Proposal([drafted], 3), spoiled)
        assert verdict.tokens == [OWN[: right + 1]]
    mx.random.seed(4)
    want = mx.random.uniform(shape=(2,)).tolist()
    mx.random.seed(4)
    with pytest.raises(NonFiniteScores):
        SamplerVerifier(make_sampler(0.01), [], [1])(Proposal([], 0), mx.full((1, 1, 5), NAN))
    assert mx.random.uniform(shape=(2,)).tolist() == want


# --- comparisons ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_passes_no_self_check(backend: str, monkeypatch: Any) -> None:
    """Only behind the rejection, which is the last of what is compared: ``max`` of Python numbers would drop it."""

    def spoiled(rows: Any, scores: Any) -> Any:
        return scores * NAN if rows.lengths == [7] else scores

    if backend == "torch":
        of: Any = TorchTarget(tiny.model("qwen3"), tiny.tokenizer(), "tiny")
        read = TorchTarget.forward
        monkeypatch.setattr(TorchTarget, "forward", lambda self, held, *a: spoiled(held.rows, read(self, held, *a)))
        check: Any = check_rollback
    else:
        import tiny_mlx
        from dflash.backends.mlx.load import check_rollback as check
        from dflash.backends.mlx.target import MlxSession

        of = tiny_mlx.target("qwen3")
        forward = MlxSession.forward
        monkeypatch.setattr(MlxSession, "forward", lambda self, *a: spoiled(self.cache.rows, forward(self, *a)))
    with pytest.raises(UnsupportedTarget, match="relative error nan"):
        check(of)


@pytest.mark.parametrize("spoiled", [0, 1, 40, 63])
def test_a_difference_where_the_target_gives_nan_cannot_be_told(spoiled: int) -> None:
    """Sorting drops a NaN or not, by where it stands."""
    made = tiny.model("qwen3")
    of = TorchTarget(made, tiny.tokenizer(), "tiny")
    check_rollback(of)  # while it is sound
    made.lm_head.weight.data[spoiled] = NAN
    with pytest.raises(NonFiniteScores, match="where the two answers part"):
        first_difference(of, "bfloat16", PROMPTS[0], [1, 2, 3], [1, 2, 4])


@pytest.mark.skipif("mlx" not in BACKENDS, reason="mlx is not installed")
def test_a_vanishing_temperature_beside_processors_of_mlx_lms_is_greedy() -> None:
    import tiny_mlx
    from dflash import model_mlx

    of = tiny_mlx.target("qwen3")
    plain = [list(r.tokens) for r in model_mlx.stream_generate(of, None, None, PROMPTS[0], max_tokens=8)]
    processors = [lambda tokens, scores: scores]
    for temperature in (1e-46, 1e-40):
        stream = model_mlx.stream_generate(
            of, None, None, PROMPTS[0], max_tokens=8, temperature=temperature, logits_processors=processors
        )
        assert [list(r.tokens) for r in stream] == plain
    with pytest.raises(RequestError, match="temperature"):
        model_mlx.stream_generate(of, None, None, PROMPTS[0], temperature=NAN, logits_processors=processors)
