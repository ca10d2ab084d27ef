"""The contract of every backend: whatever the draft, the text is the target's own and the caches are right.

O1: float32 tokens equal the framework's own greedy answer. O2: after every round the cache equals a
fresh prefill of the committed tokens. O3: token counts agree. D14: the drafter's context keeps pace.
Every case also says how many rounds there were, and what was proposed and accepted in each: an answer alone is
just as right when nothing is drafted.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS

import fakes
import tiny
from dflash.decode import Emission, Request, decode
from dflash.drafters import NGramDrafter, NoDrafter
from dflash.limits import Output
from dflash.protocols import NOTHING, Drafter, Features, Proposal
from dflash.sampling import SamplingParams

# The kinds of cache, each by one architecture.
KINDS = {"full": "qwen3", "sliding": "gemma3", "delta": "qwen3-next", "conv": "lfm2", "moe": "qwen3-moe"}
OTHERS = sorted(set(tiny.ARCHITECTURES) - set(KINDS.values()))
CASES = [(backend, name) for backend in BACKENDS for name in OTHERS if name in backend.architectures]

ROUNDS = [(backend, block) for backend in BACKENDS for block in backend.blocks]
TOKENS = 26
PROMPTS = [
    (11, 3, 60, 7, 22),  # shorter than the window of 8, crossed while answering
    (5, 5, 9, 33, 2, 17, 40, 8, 61, 12, 30, 4, 19),
    (2,),
]


def outputs(count: int, max_tokens: int = TOKENS) -> list[Output]:
    return [Output(lambda ids: "", max_tokens) for _ in range(count)]


def script(name: str, block: int) -> list[int] | None:
    """How many proposals are right, round by round and then from the start again; None where chance or text decides."""
    scripts = {"perfect": [block - 1], "hostile": [0], "scripted": [0, block - 1, 1, 0, block - 1, 2]}
    return scripts.get(name)


def drafter(name: str, block: int, texts: list[list[int]]) -> Any:
    choose = {
        "perfect": fakes.perfect,
        "hostile": fakes.hostile,
        "scripted": fakes.scripted(*(script("scripted", block) or ())),
        "random": fakes.at_random(block),
    }
    if name == "ngram":
        return NGramDrafter(block_size=block, min_ngram=1)
    return fakes.OracleDrafter(block, texts, choose[name])


def check_caches(backend: Any, target: Any, session: Any, texts: list[list[int]]) -> None:
    """O2, for every row of a session."""
    for row, text in enumerate(texts):
        fresh = target.start(1, (), 16, 512)
        fresh.prefill([text], lambda tokens, features: None)
        assert session.lengths[row] == len(text)
        for have, want in zip(backend.states(session, row), backend.states(fresh, 0), strict=True):
            np.testing.assert_allclose(have, want, atol=2e-4, rtol=2e-3)


class Recorded:
    """Any drafter, with the proposals it made."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.block_size = drafter.block_size
        self.taps = drafter.taps
        self.proposals: list[Proposal] = []

    def start(self, *arguments: Any) -> Recorded:
        self.drafting = self.drafter.start(*arguments)
        return self

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        self.drafting.extend(tokens, features)

    def propose(self, pending: list[int], room: int) -> Proposal:
        self.proposals.append(self.drafting.propose(pending, room))
        return self.proposals[-1]

    def select(self, rows: list[int]) -> None:
        self.drafting.select(rows)


def agreeing(proposed: list[int], truth: list[int]) -> int:
    """The proposals before the first wrong one."""
    return next((i for i, (p, t) in enumerate(zip(proposed, truth)) if p != t), min(len(proposed), len(truth)))


Row = list[tuple[int, int]]
"""A row's rounds after the prefill's: (accepted, proposed)."""


def check_round(emitted: list[Emission], proposals: list[Proposal], truth: list[list[int]], done: list[Output]) -> None:
    """O3: of what was proposed exactly the right ones stand, and one token of the target's own follows."""
    proposal = proposals[0] if proposals else NOTHING
    for i, e in enumerate(emitted):
        rest = truth[e.row][len(done[e.row].tokens) - len(e.tokens) :]
        right = agreeing(proposal.tokens[i], rest) if proposal.width else 0
        assert e.tokens == rest[: right + 1]
        assert (e.accepted, e.proposed) == (right, proposal.width)


def scripted_record(rights: list[int], block: int, rows: int) -> list[Row]:
    """What rows show whose drafts are right as scripted: blocks are full until no row has use for a full one."""
    record: list[Row] = [[] for _ in range(rows)]
    remaining = [TOKENS - 1] * rows
    for right in itertools.cycle(rights):
        room = min(block - 1, max(remaining) - 1)
        for row in range(rows):
            if remaining[row]:
                accepted = min(right, room, remaining[row])
                record[row].append((accepted, room))
                remaining[row] -= min(accepted + 1, remaining[row])
        if not any(remaining):
            return record
    raise AssertionError("a script must not be empty")


def check_record(name: str, block: int, record: list[Row]) -> None:
    """How many rounds, accepts and rejects there were."""
    rights = script(name, block)
    if rights is not None:
        assert record == scripted_record(rights, block, len(record))
        return
    rounds = [each for row in record for each in row]
    accepted, proposed = (sum(counts) for counts in zip(*rounds, strict=True))
    if name == "random":
        assert 0 < accepted < proposed
        assert sum(width > 0 for _, width in rounds) >= len(rounds) - len(record)  # a row's last may have no room
    else:  # the answers of random weights repeat little, and not all of them what was right before
        assert proposed >= 5
        assert accepted or len(record) == 1


def run_and_check(
    backend: Any, architecture: str, name: str, block: int, prompts: list[tuple[int, ...]], monkeypatch: Any
) -> None:
    target = backend.target(architecture)
    truth = [backend.greedy(architecture, prompt, TOKENS) for prompt in prompts]
    made = drafter(name, block, [[*p, *t] for p, t in zip(prompts, truth, strict=True)])
    recorded = Recorded(made)
    record: list[Row] = [[] for _ in prompts]
    started: list[Any] = []
    start = target.start
    done = outputs(len(prompts))
    requests = [Request(list(p), SamplingParams(), o) for p, o in zip(prompts, done, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(target, "start", lambda *args: started.append(start(*args)) or started[-1])
        rounds = decode(target, recorded, requests, block_size=block, prefill_chunk=4)
        for number, emitted in enumerate(rounds):
            patch.setattr(target, "start", start)
            live = [e.row for e in emitted]
            check_caches(backend, target, started[0], [[*prompts[r], *done[r].tokens[:-1]] for r in live])
            if isinstance(made, fakes.OracleDrafter):
                assert [len(k) for k in made.known] == started[0].lengths
            check_round(emitted, recorded.proposals, truth, done)
            recorded.proposals.clear()
            for e in emitted if number else ():
                record[e.row].append((e.accepted, e.proposed))
    assert [o.tokens for o in done] == truth
    assert [o.finish_reason for o in done] == ["length"] * len(prompts)
    check_record(name, block, record)


@pytest.mark.parametrize(("backend", "block"), ROUNDS, ids=[f"{b.name}-{block}" for b, block in ROUNDS])
@pytest.mark.parametrize("name", ["perfect", "hostile", "scripted", "random", "ngram"])
@pytest.mark.parametrize("architecture", KINDS.values(), ids=KINDS)
class TestEveryCacheKind:
    def test_one_row(self, backend: Any, architecture: str, name: str, block: int, monkeypatch: Any) -> None:
        run_and_check(backend, architecture, name, block, PROMPTS[:1], monkeypatch)

    def test_ragged_rows(self, backend: Any, architecture: str, name: str, block: int, monkeypatch: Any) -> None:
        run_and_check(backend, architecture, name, block, PROMPTS, monkeypatch)


@pytest.mark.parametrize(("backend", "architecture"), CASES, ids=[f"{b.name}-{name}" for b, name in CASES])
@pytest.mark.parametrize(("name", "block"), [("scripted", 4), ("hostile", 3), ("perfect", 16)])
def test_every_architecture(backend: Any, architecture: str, name: str, block: int, monkeypatch: Any) -> None:
    run_and_check(backend, architecture, name, block, PROMPTS[:2], monkeypatch)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["qwen3", "mistral-sliding", "gemma3", "qwen3-next"])
def test_either_attention_implementation(architecture: str, attention: str, monkeypatch: Any) -> None:
    """CS3: masks fit the keys in both forms."""
    backend = BACKENDS[0]
    target = backend.target(architecture)
    before = target.model.config._attn_implementation
    target.model.set_attn_implementation(attention)
    try:
        run_and_check(backend, architecture, "scripted", 5, PROMPTS, monkeypatch)
    finally:
        target.model.set_attn_implementation(before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("architecture", KINDS.values(), ids=KINDS)
def test_plain_decoding_is_the_frameworks_own(backend: Any, architecture: str) -> None:
    done = outputs(len(PROMPTS))
    requests = [Request(list(p), SamplingParams(), o) for p, o in zip(PROMPTS, done, strict=True)]
    rounds = list(decode(backend.target(architecture), NoDrafter(), requests, block_size=1))
    assert len(rounds) == TOKENS
    assert [o.tokens for o in done] == [backend.greedy(architecture, p, TOKENS) for p in PROMPTS]


class CountingDrafter(fakes.OracleDrafter):
    """Reads two layers, and keeps what it is given of each row."""

    taps = (0, 3)

    def start(self, *args: Any) -> CountingDrafter:
        super().start(*args)
        self.positions = 0
        self.given: list[list[np.ndarray]] = [[] for _ in self.texts]
        return self

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        super().extend(tokens, features)
        values = np.asarray(features.values)
        self.positions += values.shape[0] * values.shape[1]
        for row, count in enumerate(features.counts):
            self.given[row].append(values[row, :count])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-next"])
def test_a_drafts_work_at_prefill_grows_with_the_rows_and_not_with_their_square(
    backend: Any, architecture: str
) -> None:
    """The second reads its rows one after the other."""
    target, chunk = backend.target(architecture), 4

    def prefilled(prompts: list[tuple[int, ...]]) -> CountingDrafter:
        drafting = CountingDrafter(4, [list(p) for p in prompts], fakes.perfect).start(target, (), "match", 4)
        session = target.start(len(prompts), drafting.taps, 4, chunk)
        session.prefill([list(p) for p in prompts], drafting.extend)
        return drafting

    assert prefilled([PROMPTS[1]] * 5).positions == 5 * len(PROMPTS[1])
    together = prefilled(PROMPTS)
    assert together.positions == len(PROMPTS) * max(map(len, PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        alone = np.concatenate(prefilled([prompt]).given[0])
        np.testing.assert_allclose(np.concatenate(together.given[row]), alone, atol=2e-4, rtol=2e-3)


def accepted(backend: Any, choose: Any, block: int, max_tokens: int = TOKENS) -> list[int]:
    """Tokens of each round after the prefill's, for one row of a dense target."""
    truth = backend.greedy("qwen3", PROMPTS[0], 40)
    made = fakes.OracleDrafter(block, [[*PROMPTS[0], *truth]], choose)
    done = outputs(1, max_tokens)
    request = Request(list(PROMPTS[0]), SamplingParams(), done[0])
    rounds = [e[0].tokens for e in decode(backend.target("qwen3"), made, [request], block_size=block)]
    assert [t for tokens in rounds for t in tokens] == done[0].tokens == truth[:max_tokens]
    return [len(tokens) for tokens in rounds[1:]]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
class TestAcceptance:
    def test_hostile_is_one_a_round(self, backend: Any) -> None:
        assert accepted(backend, fakes.hostile, 2) == [1] * (TOKENS - 1)
        assert accepted(backend, fakes.hostile, 16) == [1] * (TOKENS - 1)

    def test_perfect_is_the_block(self, backend: Any) -> None:
        assert accepted(backend, fakes.perfect, 16, 33) == [16, 16]

    def test_scripted_is_the_script_plus_the_targets_own(self, backend: Any) -> None:
        assert accepted(backend, fakes.scripted(0, 3, 1, 2), 4, 22) == [1, 4, 2, 3, 1, 4, 2, 3, 1]

    @pytest.mark.parametrize("cap", [1, 2, 3, 15, 16, 17, 31, 32, 33])
    def test_cap_is_exact(self, backend: Any, cap: int) -> None:
        assert sum(accepted(backend, fakes.perfect, 16, cap)) == cap - 1
