"""Our loop as a system: what it measures of the real loop, on a clock that only the parts advance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakesystem import FakeClock, TickingDrafter, TickingTarget

import tiny
from dflash.backends.torch.target import TorchTarget
from dflash.benchmark.answers import Record, Round, Split, digest
from dflash.benchmark.datasets import Dataset
from dflash.benchmark.figures import figures
from dflash.benchmark.identity import partings
from dflash.benchmark.memory import PeakMemory
from dflash.benchmark.parallel import Share
from dflash.benchmark.peers import TransformersGenerate
from dflash.benchmark.run import Journal, Run
from dflash.benchmark.systems import Asking, Loop, Talk, encode, final_text
from dflash.difference import next_scores
from dflash.drafters import NGramDrafter, NoDrafter
from dflash.errors import NonFiniteScores
from dflash.generate import generate
from dflash.limits import Output
from fakes import scripted


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    """Speaks all of the tokenizer's tokens."""
    return TorchTarget(tiny.model("llama", vocab_size=272), tiny.tokenizer(), "tiny")


def greedy(target: TorchTarget, turn: str, cap: int) -> tuple[list[int], list[int]]:
    """Prompt and plain answer."""
    ids = encode(target.tokenizer, [{"role": "user", "content": turn}], Asking())
    return ids, generate(target, None, target.tokenizer, ids, max_tokens=cap).tokens


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Host work takes 0.125 a row and round; looking at the memory takes 100, and is nobody's time."""
    clock = FakeClock()
    take, reset, peak = Output.take, PeakMemory.reset, PeakMemory.peak

    def ticking(self: Output, new: Any) -> Any:
        clock.tick(0.125)
        return take(self, new)

    monkeypatch.setattr(Output, "take", ticking)
    monkeypatch.setattr(PeakMemory, "reset", lambda self: (clock.tick(100), reset(self))[1])
    monkeypatch.setattr(PeakMemory, "peak", lambda self: (clock.tick(100), peak(self))[1])
    return clock


def records(system: Any, *turns: str) -> list[Record]:
    found = [
        Record(system.name, "set", index, turn, 0, "0.0", answer)
        for index, answers in system.converse([Talk((text,)) for text in turns])
        for turn, answer in enumerate(answers)
    ]
    assert not any(r.answer.error for r in found)
    return found


def test_the_loop_is_measured_to_the_tick(target: TorchTarget, clock: FakeClock) -> None:
    prompt, answer = greedy(target, "hello", 20)
    assert len(answer) == 20
    asking = Asking(max_new_tokens=20)
    slow: Any = TickingTarget(target, clock)
    drafter = TickingDrafter(clock, 8, [prompt + answer], scripted(3, 0, 2))
    ours = records(Loop("draft", slow, drafter, asking, clock=clock), "hello")
    plain = records(Loop("plain", slow, NoDrafter(), asking, clock=clock), "hello")

    told = ours[0].answer
    assert told.tokens == tuple(answer) and told.count == 20 and told.finish == "length"
    expected = [(4, 3, 7), (1, 0, 7), (3, 2, 7), (4, 3, 7), (1, 0, 6), (3, 2, 5), (3, 2, 2)]
    assert told.rounds == tuple(Round(*one) for one in expected)
    # Prefill 10 + verdict 0.5 + the drafter takes the prompt in 0.25 + text 0.125. A round: 2.25 + 5.5 + 0.125.
    assert (told.first, told.seconds) == (10.875, 66.0)
    assert told.split == Split(7 * 2.25, 7 * 5.5, 7 * 0.125, 7)
    assert "".join(told.pieces or ()) == told.text

    found = figures(ours, plain)
    assert found.acceptance_length == 19 / 7
    assert found.by_position == [5 / 7, 5 / 7, 2 / 6, 0.0, 0.0, 0.0, 0.0]
    assert found.histogram == [2 / 7, 0.0, 3 / 7, 2 / 7, 0.0, 0.0, 0.0, 0.0]
    assert (found.first_token, found.rate, found.decode_rate) == (10875.0, 20 / 66, 19 / 55.125)
    assert found.round_time is not None and found.speedup is not None and found.decode_speedup is not None
    assert (found.round_time.draft, found.round_time.verify, found.round_time.host) == pytest.approx((2250, 5500, 125))
    assert found.speedup.value == pytest.approx((10.625 + 19 * 5.625) / 66)
    assert found.decode_speedup.value == pytest.approx(19 * 5.625 / 55.125)
    assert found.identity is not None and found.identity.identical == found.identity.compared == 1


def test_without_a_split_the_loop_takes_the_same_time(target: TorchTarget, clock: FakeClock) -> None:
    slow: Any = TickingTarget(target, clock)
    split, whole = (
        records(Loop("plain", slow, NoDrafter(), Asking(max_new_tokens=6), split=s, clock=clock), "hello")[0].answer
        for s in (True, False)
    )
    assert whole.split is None and split.split is not None
    assert (split.first, split.seconds, split.rounds) == (whole.first, whole.seconds, whole.rounds)


def test_rows_of_a_batch_end_each_in_its_own_time(target: TorchTarget, clock: FakeClock) -> None:
    slow: Any = TickingTarget(target, clock)
    loop = Loop("plain", slow, NoDrafter(), Asking(max_new_tokens=6), at_once=2, clock=clock)
    one, two = records(loop, "hello", "a longer question")
    assert one.answer.began == two.answer.began
    assert [r.answer.tokens for r in (one, two)] == [
        tuple(greedy(target, t, 6)[1]) for t in ("hello", "a longer question")
    ]
    found = figures([one, two], [])
    assert found.round_time is not None
    assert found.round_time.verify == pytest.approx(5500)
    assert found.round_time.host == pytest.approx(250), "two rows of text each round"
    assert found.rate == pytest.approx(12 / (10.75 + 5 * 5.75)), "tokens of both over the time they share"


def test_turns_follow_each_other_and_answers_are_fed_back(target: TorchTarget) -> None:
    loop = Loop("ngram", target, NGramDrafter(), Asking(max_new_tokens=6))
    [(index, (first, second))] = loop.converse([Talk(("one", "two"))])
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": final_text(first.text)},
        {"role": "user", "content": "two"},
    ]
    assert index == 0 and second.prompt_tokens == len(encode(target.tokenizer, messages, Asking()))


def test_only_the_final_words_are_fed_back() -> None:
    assert final_text("<think>hm, 4?</think>\n\nIt is 4.") == "It is 4."
    assert final_text("thinking ...<|channel|>final<|message|>It is 4.") == "It is 4."
    assert final_text(" plain ") == "plain"


def test_what_cannot_be_asked_is_a_counted_failure(target: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tiny.make_tokenizer()
    refusing.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}x"
    own = TorchTarget(tiny.model("llama", vocab_size=272), refusing, "tiny")
    loop = Loop("plain", own, NoDrafter(), Asking(max_new_tokens=4))
    [(_, answers)] = loop.converse([Talk(("one", "two", "three"))])
    assert [answer.error is None for answer in answers] == [True, False], "the third turn is not asked"
    assert "one turn only" in str(answers[1].error)


def test_sampled_answers_of_our_loops_are_the_same(target: TorchTarget) -> None:
    asking = Asking(max_new_tokens=12, temperature=1.0)
    loops = [Loop("ngram", target, NGramDrafter(), asking), Loop("plain", target, NoDrafter(), asking)]
    one, two = (next(loop.converse([Talk(("hello",), seed=7)]))[1][0].tokens for loop in loops)
    assert one == two
    assert one != next(loops[1].converse([Talk(("hello",), seed=8)]))[1][0].tokens


# --- peers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookup", [None, 3])
def test_transformers_says_the_same_and_counts_alike(target: TorchTarget, lookup: int | None) -> None:
    peer = TransformersGenerate("transformers", target, Asking(max_new_tokens=24), lookup)
    told = records(peer, "abcabcabc")[0].answer
    assert told.tokens == tuple(greedy(target, "abcabcabc", 24)[1])
    assert told.rounds is not None and told.finish == "length"
    assert sum(one.tokens for one in told.rounds) <= told.count - 1, "the first forward may bring several"
    assert 0 < told.first < told.seconds
    if lookup is None:
        assert {one.tokens for one in told.rounds} == {1}


def test_transformers_in_batches_and_with_an_assistant(target: TorchTarget) -> None:
    turns = ("hello", "a longer question")
    peer = TransformersGenerate("transformers", target, Asking(max_new_tokens=8), at_once=2)
    assert [r.answer.tokens for r in records(peer, *turns)] == [tuple(greedy(target, t, 8)[1]) for t in turns]
    helped = TransformersGenerate("assisted", target, Asking(max_new_tokens=8), assistant=target.model)
    told = records(helped, "hello")[0].answer
    assert told.tokens == tuple(greedy(target, "hello", 8)[1])
    assert told.rounds is not None and len(told.rounds) < 7, "its own copy drafts well"


def test_transformers_stops_where_we_stop() -> None:
    stop = tiny.tokenizer().eos_token_id
    model = tiny.model("llama", vocab_size=272)
    with torch.no_grad():
        model.lm_head.weight[stop] = 3 * model.lm_head.weight.abs().max()
    own = TorchTarget(model, tiny.tokenizer(), "tiny")
    for i in range(6):
        turn = f"question {i}"
        ours = records(Loop("plain", own, NoDrafter(), Asking(max_new_tokens=12)), turn)[0].answer
        theirs = records(TransformersGenerate("t", own, Asking(max_new_tokens=12)), turn)[0].answer
        assert (ours.tokens, ours.finish, ours.text) == (theirs.tokens, theirs.finish, theirs.text)


def test_what_transformers_cannot_do_is_a_counted_failure(target: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example its assisted generation, of a model whose cache it cannot crop."""

    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("Assisted decoding requires a cache that can be cropped")

    monkeypatch.setattr(target.model, "generate", refuse, raising=False)
    peer = TransformersGenerate("lookup", target, Asking(max_new_tokens=6), lookup=3)
    journal = Journal(None, {}, Share())
    Run([Dataset("set", "here", {0: ("hello",)})], [peer])(journal, lambda done, total, figures: None)
    [found] = journal.records
    assert "transformers refuses: Assisted decoding requires" in str(found.answer.error)


@pytest.mark.parametrize("system", ["loop", "transformers"])
def test_a_prompt_without_room_is_a_counted_failure(system: str) -> None:
    small = TorchTarget(tiny.model("llama", vocab_size=272, max_position_embeddings=32), tiny.tokenizer(), "small")
    asking = Asking(max_new_tokens=6)
    tried: Any = TransformersGenerate("t", small, asking)
    if system == "loop":
        tried = Loop("plain", small, NoDrafter(), asking)
    [(_, [answer])] = tried.converse([Talk(("far too long " * 4,))])
    assert "PromptTooLong" in str(answer.error)


@pytest.mark.parametrize("system", ["loop", "transformers"])
def test_one_bad_prompt_does_not_fail_its_batch(system: str) -> None:
    picky = tiny.make_tokenizer()
    picky.chat_template = (
        "{% for m in messages %}{% if 'no' in m['content'] %}{{ raise_exception('not that') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    small = TorchTarget(tiny.model("llama", vocab_size=272, max_position_embeddings=32), picky, "small")
    asking = Asking(max_new_tokens=3)
    tried: Any = TransformersGenerate("t", small, asking, at_once=4)
    if system == "loop":
        tried = Loop("plain", small, NoDrafter(), asking, at_once=4)
    together: list[int] = []
    answer = tried._answer
    tried._answer = lambda asked, *rest: (together.append(len(asked)), answer(asked, *rest))[1]
    done = dict(tried.converse([Talk((turn,)) for turn in ("a", "far too long " * 4, "no", "b")]))
    errors = [str(done[i][0].error) for i in range(4)]
    assert errors[0] == errors[3] == "None" and "PromptTooLong" in errors[1] and "not that" in errors[2]
    assert together == [2], "the others are still answered together"
    assert [done[i][0].tokens for i in (0, 3)] == [tuple(greedy(small, turn, 3)[1]) for turn in ("a", "b")]


def test_a_batch_that_fails_as_a_whole_is_asked_row_by_row(target: TorchTarget) -> None:
    """For example one row's scores are not finite, which no prompt shows."""
    loop = Loop("plain", target, NoDrafter(), Asking(max_new_tokens=3), at_once=3)
    answer = loop._answer

    def fragile(asked: Any, seeds: Any, asking: Any) -> Any:
        if any(messages[0]["content"] == "bad" for messages in asked):
            raise NonFiniteScores("the scores of bad are not finite")
        return answer(asked, seeds, asking)

    loop._answer = fragile  # type: ignore[method-assign]
    done = dict(loop.converse([Talk((turn,)) for turn in ("a", "bad", "b")]))
    assert [done[i][0].error for i in range(3)] == [None, "NonFiniteScores: the scores of bad are not finite", None]
    assert done[2][0].tokens == tuple(greedy(target, "b", 3)[1])


def test_transformers_samples_when_asked(target: TorchTarget) -> None:
    peer = TransformersGenerate("t", target, Asking(max_new_tokens=12, temperature=1.0, top_p=0.9))
    one, same, other = (next(peer.converse([Talk(("hello",), seed=s)]))[1][0].tokens for s in (1, 1, 2))
    assert one == same != other


def test_mlx_lm_is_one_more_small_class(target: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for mlx-lm, which is not installed everywhere: the calls and what is made of them."""
    import sys
    from types import ModuleType, SimpleNamespace

    from dflash.benchmark.peers import MlxGenerate

    clock = FakeClock()
    asked: dict[str, Any] = {}

    def stream_generate(model: Any, tokenizer: Any, prompt: Any, max_tokens: int, sampler: Any) -> Any:
        asked.update(prompt=prompt, max_tokens=max_tokens, sampler=sampler)
        for token in (5, 6, 7):
            clock.tick(2)
            yield SimpleNamespace(token=token, text=str(token))

    for name, members in {
        "mlx": {}, "mlx.core": {"random": SimpleNamespace(seed=lambda seed: None)},
        "mlx_lm": {"stream_generate": stream_generate},
        "mlx_lm.sample_utils": {"make_sampler": lambda temp, top_p, top_k: (temp, top_p, top_k)},
    }.items():  # fmt: skip
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["mlx"].core = sys.modules["mlx.core"]  # type: ignore[attr-defined]
    told = records(MlxGenerate("mlx-lm", target, Asking(max_new_tokens=3), clock), "hello")[0].answer
    assert (told.tokens, told.first, told.seconds, told.finish) == ((5, 6, 7), 2.0, 6.0, "length")
    assert told.rounds == (Round(1, 0, 0),) * 2 and asked["sampler"] == (0.0, 1.0, 0)


def test_conversations_open_as_their_rows_do(target: TorchTarget) -> None:
    """And an answer that parts is found to its prompt again."""
    asking = Asking(max_new_tokens=6)
    opening = ({"role": "system", "content": "Be brief."}, {"role": "developer", "content": "In verse."})
    data = Dataset("set", "here", {4: ("one", "two"), 5: ("one",)}, openings={4: opening})
    journal = Journal(None, {}, Share())
    Run([data], [Loop("plain", target, NoDrafter(), asking), Loop("ngram", target, NGramDrafter(), asking)])(
        journal, lambda done, total, figures: None
    )
    first, second = (r.answer for r in journal.records if r.system == "plain" and r.prompt == 4)
    messages = [*opening, {"role": "user", "content": "one"}]
    assert first.prompt_digest == digest(encode(target.tokenizer, messages, asking))
    messages += [{"role": "assistant", "content": final_text(first.text)}, {"role": "user", "content": "two"}]
    assert second.prompt_digest == digest(encode(target.tokenizer, messages, asking))
    [other] = [r.answer for r in journal.records if r.system == "plain" and r.prompt == 5]
    assert other.prompt_digest != first.prompt_digest
    bare = replace(data, openings={})
    assert data.describe() != bare.describe()
    assert bare.describe()["digest"] == digest(sorted(data.talks.items())), "runs of earlier versions go on"

    wrong = next(r for r in journal.records if r.system == "ngram" and r.turn == 1)
    tokens = wrong.answer.tokens
    assert tokens is not None
    other_tokens = (*tokens[:3], (tokens[3] + 1) % 200, *tokens[4:])
    parted = [replace(r, answer=replace(r.answer, tokens=other_tokens)) if r is wrong else r for r in journal.records]
    [found] = partings(parted, "plain", ["ngram"], [data], target, "float32", asking)
    assert found.difference is not None, "its prompt came out as it was"


# --- where answers part -----------------------------------------------------------------------------


def test_the_margin_is_read_where_answers_part_in_the_turn_where_they_do(target: TorchTarget) -> None:
    asking = Asking(max_new_tokens=6)
    data = Dataset("set", "here", {4: ("one", "two")})
    journal = Journal(None, {}, Share())
    loops = [Loop("ngram", target, NGramDrafter(), asking), Loop("plain", target, NoDrafter(), asking)]
    Run([data], loops)(journal, lambda done, total, figures: None)
    wrong = next(r for r in journal.records if r.system == "ngram" and r.turn == 1)
    tokens = wrong.answer.tokens
    assert tokens is not None
    other = replace(wrong, answer=replace(wrong.answer, tokens=(*tokens[:3], (tokens[3] + 1) % 200, *tokens[4:])))
    records = [other if r is wrong else r for r in journal.records]
    [found] = partings(records, "plain", ["ngram"], [data], target, "float32", asking)
    assert (found.system, found.key, found.position) == ("ngram", ("set", 4, 1, 0), 3)

    first = next(r for r in journal.records if r.system == "plain" and r.turn == 0)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": final_text(first.answer.text)},
        {"role": "user", "content": "two"},
    ]
    scores = next_scores(target, [*encode(target.tokenizer, messages, asking), *tokens[:3]])
    best, second = sorted(scores)[:-3:-1]
    assert found.difference is not None and not found.difference.tie
    assert found.difference.margin == pytest.approx(best - second)
    assert partings(journal.records, "plain", ["ngram"], [data], target, "float32", asking) == []
