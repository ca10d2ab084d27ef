"""Drafters that break the protocol, and options at the edge: a clear error or the right answer, never a wrong one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

import tiny
from dflash.backends.torch.check import check_rollback
from dflash.backends.torch.target import Reading, TorchTarget
from dflash.decode import Request, decode
from dflash.drafters import NGramDrafter, NoDrafter
from dflash.errors import RequestError
from dflash.generate import generate
from dflash.limits import Output
from dflash.protocols import Proposal
from dflash.sampling import SamplingParams

PROMPT = [11, 3, 60, 7, 22]


class Broken:
    """A drafter that proposes whatever it is told to."""

    block_size = 4
    taps: tuple[int, ...] = ()

    def __init__(self, propose: Any) -> None:
        self._propose = propose

    def start(self, target: Any, sampling: Any, verification: str, step: int) -> Any:
        return self

    def extend(self, tokens: Any, features: Any) -> None:
        pass

    def propose(self, pending: list[int], room: int) -> Proposal:
        return self._propose(room)

    def select(self, rows: list[int]) -> None:
        pass


def answer(of: TorchTarget, drafter: Any, params: SamplingParams, count: int = 12, **options: Any) -> list[int]:
    done = Output(lambda ids: "", count)
    for _ in decode(of, drafter, [Request(PROMPT, params, done)], block_size=4, **options):
        pass
    return done.tokens


@pytest.mark.parametrize(
    ("propose", "message"),
    [
        (lambda room: Proposal([[1] * (room + 40)], room + 40), "proposed 43 tokens where there is room for 3"),
        (lambda room: Proposal([[1] * 3], 2), "must propose whole numbers"),
        (lambda room: Proposal([[1, 2], [3, 4]], 2), "must propose whole numbers"),
        (lambda room: Proposal(torch.ones(1, 2), 2), "must propose whole numbers"),
        (lambda room: Proposal(torch.ones(2, dtype=torch.long), 2), "must propose whole numbers"),
        (lambda room: Proposal([[1, 64]], 2), "token 64, which is outside"),
        (lambda room: Proposal([[-1, 2]], 2), "token -1, which is outside"),
    ],
)
def test_a_drafter_that_breaks_the_protocol_is_told(propose: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        answer(tiny.target("gemma3"), Broken(propose), SamplingParams(), prefill_chunk=1)


@pytest.mark.parametrize("q", [torch.ones(1, 2, 64), torch.full((1, 2, 64), math.nan), torch.zeros(1, 2, 64)])
def test_a_q_that_is_no_distribution_gives_tokens_of_the_vocabulary(q: torch.Tensor) -> None:
    params = SamplingParams(temperature=1.0, seed=1)
    drafter = Broken(lambda room: Proposal([[5, 6][:room]], min(room, 2), q[:, :room]))
    tokens = answer(tiny.target("qwen3"), drafter, params, verification="rejection")
    assert len(tokens) == 12
    assert all(0 <= token < 64 for token in tokens)


@pytest.mark.parametrize("bad", [5, object(), ["ngram"], NGramDrafter])
def test_what_is_no_drafter_is_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="draft must be a drafter"):
        generate(tiny.target("qwen3"), bad, tiny.tokenizer(), PROMPT)


@pytest.mark.parametrize("bad", ["llama", None, tiny.model("llama")], ids=["name", "none", "module"])
def test_what_is_no_target_is_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"model must come from dflash.load"):
        generate(bad, None, tiny.tokenizer(), PROMPT)


def test_a_bias_may_be_a_whole_number() -> None:
    params = SamplingParams(logit_bias={5: 100})
    assert answer(tiny.target("qwen3"), NoDrafter(), params) == [5] * 12


def test_a_draft_of_nan_harms_no_answer_under_rejection() -> None:
    of = tiny.target("qwen3")
    made = tiny.draft(of)
    made.fc.weight.data[0, 0] = math.nan
    with pytest.warns(UserWarning, match="not finite"):
        tokens = answer(of, made, SamplingParams(temperature=1.0, seed=1), verification="rejection")
    assert all(0 <= token < 64 for token in tokens)


EDGES = {
    "least temperature": SamplingParams(temperature=1e-38, seed=1),
    "whole temperature": SamplingParams(temperature=2, seed=1),
    "greatest temperature": SamplingParams(temperature=100, seed=1),
    "greatest bias": SamplingParams(temperature=0.5, logit_bias={5: 3e38}, seed=1),
    "least penalty": SamplingParams(temperature=1.0, repetition_penalty=1e-45, seed=1),
    "least top-p": SamplingParams(temperature=1.0, top_p=1e-12, seed=1),
    "greatest min-p": SamplingParams(temperature=1.0, min_p=1.0, seed=1),
    "top-k above the vocabulary": SamplingParams(temperature=1.0, top_k=10_000, seed=1),
    "all but one banned": SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(63), -math.inf), seed=1),
}


@pytest.mark.parametrize("params", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_parameters_at_the_edge(params: SamplingParams, verification: str) -> None:
    of = tiny.target("qwen3")
    tokens = answer(of, NGramDrafter(4, 2, 1), params, verification=verification)
    assert len(tokens) == 12
    assert all(0 <= token < 64 for token in tokens)
    if verification == "match":
        assert tokens == answer(of, NoDrafter(), params)
    if params in (EDGES["least temperature"], EDGES["least top-p"], EDGES["greatest min-p"]):
        assert tokens == answer(of, NoDrafter(), SamplingParams())
    if params is EDGES["greatest bias"]:
        assert set(tokens) == {5}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_is_an_error(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(64), -math.inf))
    with pytest.raises(RequestError, match="bans every token"):
        answer(tiny.target("qwen3"), NoDrafter(), params)


def test_a_target_in_training_mode_is_refused() -> None:
    of = TorchTarget(tiny.model("llama"), tiny.tokenizer(), "tiny")
    of.model.train()
    with pytest.raises(RequestError, match=r"training mode.*model.eval"):
        answer(of, NoDrafter(), SamplingParams())


def test_longrope_ends_where_its_angles_would_change() -> None:
    """Its factors depend on the longest position of a forward: beyond the original context a cache is wrong."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.Phi3Config(
        **{**tiny._BASE, "head_dim": 8},
        original_max_position_embeddings=32,
        rope_parameters={**rope, "original_max_position_embeddings": 32},
    )
    torch.manual_seed(0)
    of = TorchTarget(transformers.Phi3ForCausalLM(config).eval(), tiny.tokenizer(), "phi3")
    assert of.context_length == 32
    ids = torch.tensor([PROMPT])
    own = of.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=28, do_sample=False)[
        0, 5:
    ].tolist()
    for drafter in (NoDrafter(), NGramDrafter(4, 2, 1)):
        assert answer(of, drafter, SamplingParams(), 60, prefill_chunk=2) == own


def test_a_decoder_that_takes_positions_from_the_cache_reads_rows_one_after_the_other() -> None:
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=32, max_position_embeddings=128, num_hidden_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.BartForCausalLM(config).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.3)
    target = TorchTarget(made, tiny.tokenizer(), "bart")
    check_rollback(target)
    assert target.reading is Reading.ALONE
