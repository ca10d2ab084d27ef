"""Generation as people call it: streams, ends, interruptions, threads."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import dflash
import fakes
import tiny
from dflash.backends.torch import cache
from dflash.backends.torch.check import check_rollback
from dflash.backends.torch.target import TorchTarget
from dflash.decode import Request, decode
from dflash.drafters import BothDrafters, NGramDrafter, NoDrafter
from dflash.errors import NonFiniteScores, PromptTooLong, RequestError
from dflash.generate import collect
from dflash.limits import Output
from dflash.protocols import Proposal
from dflash.sampling import SamplingParams

TEXT = "one two one two"
KINDS = ["qwen3", "gemma3", "qwen3-next", "lfm2", "falcon-h1"]


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    """With a vocabulary that its tokenizer fits, so that answers are text."""
    return TorchTarget(tiny.model("llama", vocab_size=272), tiny.make_tokenizer(), "tiny llama")


@pytest.fixture(scope="module")
def draft(target: TorchTarget) -> Any:
    return tiny.draft(target, mask_token_id=271)


# --- the calls people know --------------------------------------------------------------------------


def test_a_stream_adds_up(target: TorchTarget, draft: Any) -> None:
    responses = list(dflash.stream_generate(target, draft, target.tokenizer, TEXT, max_tokens=40))
    tokens = [token for r in responses for token in r.tokens]
    assert len(tokens) == responses[-1].generation_tokens == 40
    assert "".join(r.text for r in responses) == target.tokenizer.decode(tokens, skip_special_tokens=True)
    assert [r.finish_reason for r in responses] == [None] * (len(responses) - 1) + ["length"]
    assert responses[0].proposed == responses[0].accepted == 0
    assert all(r.accepted == len(r.tokens) - 1 for r in responses[1:-1])
    assert all(r.prompt_tokens == len(TEXT) and r.prompt_tps > 0 and r.peak_memory > 0 for r in responses)
    assert responses[0].generation_tps == 0.0 < responses[-1].generation_tps


def test_the_whole_answer_is_its_stream(target: TorchTarget) -> None:
    whole = dflash.generate(target, "ngram", None, TEXT, max_tokens=40)
    parts = collect(dflash.stream_generate(target, "ngram", None, TEXT, max_tokens=40))
    assert (whole.text, whole.tokens, whole.rounds) == (parts.text, parts.tokens, parts.rounds)
    assert str(whole) == whole.text
    assert 1 + sum(whole.rounds) == 40
    assert whole.acceptance_length == sum(whole.rounds) / len(whole.rounds)


def test_a_target_unpacks_as_model_and_tokenizer(target: TorchTarget) -> None:
    model, tokenizer = target
    assert dflash.generate(model, None, tokenizer, TEXT, max_tokens=3).tokens


def test_load_and_load_draft_of_folders(target: TorchTarget, draft: Any, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    tiny.save_draft(draft, tmp_path / "draft")
    model, tokenizer = dflash.load(tmp_path / "target", backend="torch", device="cpu")
    loaded = dflash.load_draft(tmp_path / "draft", sliding_window_size=None, backend="torch", device="cpu")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    answers = [
        "".join(r.text for r in dflash.stream_generate(model, d, tokenizer, prompt, max_tokens=30))
        for d in (loaded, None)
    ]
    assert answers[0] == answers[1]


def test_prompts_in_every_form_give_the_same_answer(target: TorchTarget) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = target.tokenizer(rendered)["input_ids"]
    forms = [messages, rendered, ids, tuple(ids), torch.tensor(ids), torch.tensor([ids])]
    assert len({tuple(dflash.generate(target, None, None, form, max_tokens=8).tokens) for form in forms}) == 1


@pytest.mark.parametrize("block_size", [0, -4, True, 2.0])
def test_a_block_below_one_is_refused_with_a_remedy(target: TorchTarget, draft: Any, block_size: Any) -> None:
    for any_draft in (draft, "ngram", None):
        with pytest.raises(RequestError, match=r"1 \(plain decoding\) or more, not"):
            dflash.stream_generate(target, any_draft, None, TEXT, block_size=block_size)


def test_a_block_of_one_is_plain_decoding_and_no_drafter_works(target: TorchTarget, draft: Any) -> None:
    plain = dflash.generate(target, None, None, TEXT, max_tokens=20)

    class Idle:
        """Fails where a drafter would be put to work."""

        block_size, taps = 8, (0, 1)

        def start(self, *args: Any) -> Any:
            raise AssertionError("there is nothing to draft")

    for any_draft in (draft, BothDrafters(draft), "ngram", NGramDrafter(), Idle(), None):
        for verification in ("match", "rejection"):
            got = dflash.generate(
                target, any_draft, None, TEXT, block_size=1, max_tokens=20, verification=verification
            )  # fmt: skip
            assert (got.tokens, got.rounds) == (plain.tokens, [1] * 19)
            assert (got.proposed, got.acceptance_length) == (0, 1.0)


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with n-grams"])
def test_a_block_above_the_trained_one_warns_once(target: TorchTarget, both: bool) -> None:
    """Every draft, also where another of the same size was told of before."""
    for _ in range(2):
        draft = tiny.draft(target)
        drafter = BothDrafters(draft) if both else draft
        with pytest.warns(UserWarning, match="block_size 32 is above the 8 that draft DFlashDraftModel") as told:
            first = dflash.generate(target, drafter, None, TEXT, block_size=32, max_tokens=10)
        assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = dflash.generate(target, drafter, None, TEXT, block_size=32, max_tokens=10)
        smaller = dflash.generate(target, draft, None, TEXT, block_size=3, max_tokens=10)
        ngram = dflash.generate(target, "ngram", None, TEXT, block_size=32, max_tokens=10)
    assert first.tokens == again.tokens == smaller.tokens == ngram.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"stop": [""]}, "stop must be"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [5, 272]}, "token id 272 is outside the vocabulary"),
        ({"draft": "some/draft"}, "load_draft"),
        ({"verification": "both"}, "match, rejection"),
    ],
)
def test_bad_options_are_refused(target: TorchTarget, options: dict[str, Any], message: str) -> None:
    call = {"draft": None, "prompt": TEXT, **options}
    with pytest.raises(ValueError, match=message):
        dflash.stream_generate(target, call.pop("draft"), None, call.pop("prompt"), **call)


def test_the_consumers_time_is_not_counted(target: TorchTarget) -> None:
    last = None
    for response in dflash.stream_generate(target, None, None, TEXT, max_tokens=6):
        time.sleep(0.2)
        last = response
    assert last is not None
    assert 5 / last.generation_tps < 0.2 * 5


# --- ends -------------------------------------------------------------------------------------------


PROMPT = [11, 3, 60, 7, 22]


def truth(architecture: str, count: int = 40) -> list[int]:
    ids = torch.tensor([PROMPT])
    made = tiny.target(architecture).model
    return made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)[0, 5:].tolist()


def first_seen(tokens: list[int]) -> list[int]:
    """Places whose token occurs there for the first time: it can end the answer there."""
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-next"])
def test_eos_inside_a_block_ends_the_answer_there(architecture: str) -> None:
    """E1, M1, at every place of a perfect block; the cache holds the answer without its last token."""
    own = truth(architecture)
    of = tiny.target(architecture)
    for at in first_seen(own[:17]):
        done = Output(lambda ids: "", 40, frozenset([own[at]]))
        oracle = fakes.OracleDrafter(8, [[*PROMPT, *own]], fakes.perfect)
        emitted = list(decode(of, oracle, [Request(PROMPT, SamplingParams(), done)], block_size=8))
        assert done.tokens == own[: at + 1]
        assert done.finish_reason == "stop"
        assert sum(len(e[0].tokens) for e in emitted) == at + 1
        assert all(0 <= e[0].accepted <= len(e[0].tokens) for e in emitted)


def test_eos_as_the_first_token_asks_no_drafter() -> None:
    """E2."""
    own = truth("qwen3")
    oracle = fakes.OracleDrafter(8, [[*PROMPT, *own]], fakes.perfect)
    done = Output(lambda ids: "", 40, frozenset(own[:1]))
    assert len(list(decode(tiny.target("qwen3"), oracle, [Request(PROMPT, SamplingParams(), done)], block_size=8))) == 1
    assert (done.tokens, done.finish_reason, oracle.proposals) == (own[:1], "stop", 0)


def test_rows_end_each_in_its_own_time() -> None:
    """Rows that are done leave the batch; the others go on as if alone."""
    own = truth("qwen3")
    places = [first_seen(own)[i] for i in (0, 2, 5)]
    done = [Output(lambda ids: "", 40, frozenset([own[at]])) for at in places] + [Output(lambda ids: "", 31)]
    rows = [Request(PROMPT, SamplingParams(), output) for output in done]
    oracle = fakes.OracleDrafter(6, [[*PROMPT, *own]] * 4, fakes.scripted(3, 0, 5))
    widths = [len(e) for e in decode(tiny.target("qwen3"), oracle, rows, block_size=6)]
    assert [o.tokens for o in done] == [own[: at + 1] for at in places] + [own[:31]]
    assert [o.finish_reason for o in done] == ["stop"] * 3 + ["length"]
    assert widths[0] == 4
    assert widths[-1] == 1


def test_a_stop_string_ends_text_and_tokens(target: TorchTarget) -> None:
    """E7, and the text before it is all there."""
    plain = dflash.generate(target, None, None, TEXT, max_tokens=60)
    printable = [i for i in range(8, 40) if plain.text[i : i + 3].isascii() and len(plain.text[i : i + 3]) == 3]
    stop = plain.text[printable[0] : printable[0] + 3]
    for any_draft in (None, "ngram", NGramDrafter(min_ngram=1, block_size=16)):
        got = dflash.generate(target, any_draft, None, TEXT, max_tokens=60, stop=stop)
        assert got.text == plain.text[: plain.text.index(stop)]
        assert got.finish_reason == "stop"
        assert got.tokens == plain.tokens[: len(got.tokens)]


def test_the_context_ends_the_answer(monkeypatch: Any) -> None:
    """X7: positions never pass the target's context, and the answer ends by length."""
    of = tiny.target("llama")
    monkeypatch.setattr(of, "context_length", 16)
    own = truth("llama")
    highest: list[int] = []
    forward = of.forward

    def watched(held: Any, tokens: Any, scored: Any) -> Any:
        highest.append(max(held.rows.lengths) + tokens.shape[1])
        return forward(held, tokens, scored)

    monkeypatch.setattr(of, "forward", watched)
    for choose in (fakes.perfect, fakes.hostile):
        done = Output(lambda ids: "", 40)
        oracle = fakes.OracleDrafter(8, [[*PROMPT, *own]], choose)
        list(decode(of, oracle, [Request(PROMPT, SamplingParams(), done)], block_size=8))
        assert done.tokens == own[:12]  # 16 positions hold 5 + 11; the 12th is never read
        assert done.finish_reason == "length"
    assert max(highest) == 16
    with pytest.raises(PromptTooLong, match="17 tokens, but llama has a context of 16"):
        decode(of, NoDrafter(), [Request([1] * 17, SamplingParams(), Output(str, 4))], block_size=1)


# --- interruptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", KINDS)
def test_an_exception_inside_a_round_restores_the_caches(architecture: str) -> None:
    of = tiny.target(architecture)
    own = truth(architecture)
    session = of.start(1, (), 8, 64)
    session.prefill([PROMPT], lambda tokens, features: None)
    for right in (7, 0, 3):
        with pytest.raises(KeyboardInterrupt), session.verify([own[0]], Proposal([[9] * 7], 7)):
            raise KeyboardInterrupt
        assert session.lengths == [5]
        truthful = Proposal([own[1 : 1 + right] + [63] * (7 - right)], 7)
        with session.verify([own[0]], truthful) as ahead:
            assert ahead.scores.argmax(-1)[0, : right + 1].tolist() == own[1 : right + 2]


@pytest.mark.parametrize("architecture", ["qwen3-next", "falcon-h1"])
def test_an_exception_inside_keep_restores_the_caches_too(architecture: str, monkeypatch: Any) -> None:
    """Layers that were already replayed go back with the one that failed."""
    of = tiny.target(architecture)
    own = truth(architecture)
    session = of.start(1, (), 8, 64)
    session.prefill([PROMPT], lambda tokens, features: None)
    replay, calls = cache._replay, [0]

    def failing(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError
        replay(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_replay", failing)
        with pytest.raises(MemoryError), session.verify([own[0]], Proposal([[9] * 7], 7)) as ahead:
            ahead.keep([3])
    assert session.lengths == [5]
    with session.verify([own[0]], Proposal([own[1:8]], 7)) as ahead:
        assert ahead.scores.argmax(-1)[0].tolist() == own[1:9]


@pytest.mark.parametrize("architecture", KINDS)
def test_an_abandoned_stream_leaves_its_session_right(architecture: str) -> None:
    """CF5, D12: closed after any round, the cache is one short of what was given, and can be read on from."""
    of = tiny.target(architecture)
    own = truth(architecture)
    start = of.start
    for rounds in (1, 2, 4):
        sessions: list[Any] = []
        of.start = lambda *args, kept=sessions: kept.append(start(*args)) or kept[-1]  # type: ignore[method-assign]
        done = Output(lambda ids: "", 30)
        oracle = fakes.OracleDrafter(5, [[*PROMPT, *own]], fakes.scripted(2, 0, 4))
        stream = decode(of, oracle, [Request(PROMPT, SamplingParams(), done)], block_size=5)
        for _ in range(rounds):
            next(stream)
        stream.close()
        of.start = start  # type: ignore[method-assign]
        assert sessions[0].lengths == [5 + len(done.tokens) - 1]
        with sessions[0].verify([done.tokens[-1]], Proposal([], 0)) as ahead:
            assert int(ahead.scores[0, 0].argmax()) == own[len(done.tokens)]


def test_a_dropped_stream_frees_its_caches() -> None:
    of = tiny.target("qwen3")
    sessions: list[Any] = []
    start = of.start
    of.start = lambda *args: sessions.append(weakref.ref(s := start(*args))) or s  # type: ignore[method-assign]
    stream = decode(of, NoDrafter(), [Request(PROMPT, SamplingParams(), Output(str, 9))], block_size=1)
    next(stream)
    of.start = start  # type: ignore[method-assign]
    del stream
    gc.collect()
    assert sessions[0]() is None


def test_nan_scores_of_the_target_are_an_error() -> None:
    broken = tiny.model("llama")
    of = TorchTarget(broken, tiny.tokenizer(), "broken")
    check_rollback(of)  # while it is sound
    broken.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteScores, match="NaN"):
        list(decode(of, NoDrafter(), [Request(PROMPT, SamplingParams(), Output(str, 4))], block_size=1))


# --- company ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", KINDS)
def test_two_streams_on_one_target_interleave(architecture: str) -> None:
    of = tiny.target(architecture)
    drafts = [tiny.draft(of, target_layer_ids=(0, 1)), tiny.draft(of, target_layer_ids=(1, 2, 3), seed=1)]
    prompts = [PROMPT, PROMPT[::-1]]
    alone = [answers(of, d, p) for d, p in zip(drafts, prompts, strict=True)]
    done = [Output(lambda ids: "", 20) for _ in prompts]
    streams = [
        decode(of, d, [Request(p, SamplingParams(), o)], block_size=4)
        for d, p, o in zip(drafts, prompts, done, strict=True)
    ]
    while streams:
        streams = [stream for stream in streams if next(stream, None) is not None]
    assert [o.tokens for o in done] == alone


@pytest.mark.parametrize("architecture", KINDS)
def test_two_threads_on_one_target_do_not_touch_each_other(architecture: str) -> None:
    of = tiny.target(architecture)
    drafts = [tiny.draft(of, target_layer_ids=(0, 1)), tiny.draft(of, target_layer_ids=(1, 2, 3), seed=1)]
    prompts = [PROMPT, PROMPT[::-1]]
    alone = [answers(of, d, p) for d, p in zip(drafts, prompts, strict=True)]
    got: list[Any] = [None, None]

    def work(i: int) -> None:
        got[i] = [answers(of, drafts[i], prompts[i]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[alone[0]] * 4, [alone[1]] * 4]


def answers(of: TorchTarget, drafter: Any, prompt: list[int]) -> list[int]:
    done = Output(lambda ids: "", 20)
    for _ in decode(of, drafter, [Request(prompt, SamplingParams(), done)], block_size=4):
        pass
    return done.tokens


def test_a_forward_of_the_users_own_is_left_alone() -> None:
    """The hooks look only at our caches: transformers' generate runs as ever, before and after."""
    before = truth("qwen3-next")
    of = tiny.target("qwen3-next")
    stream = decode(of, tiny.draft(of), [Request(PROMPT, SamplingParams(), Output(str, 20))], block_size=4)
    next(stream)
    assert truth("qwen3-next") == before
    for _ in stream:
        pass
    assert truth("qwen3-next") == before


def test_one_host_sync_a_round(monkeypatch: Any) -> None:
    """All that is read back is the verdict: no other value of a device array is looked at in a greedy round."""
    of = tiny.target("qwen3")
    made = tiny.draft(of)
    calls: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, name=name, original=original: calls.append(name) or original(self, *a)
        )
    done = Output(lambda ids: "", 20)
    per_round = []
    for _ in decode(of, made, [Request(PROMPT, SamplingParams(), done)], block_size=4):
        per_round.append(list(calls))
        calls.clear()
    # The draft's finite flag is read with the next round's features, long after it was computed.
    assert all(seen in (["tolist"], ["tolist", "__bool__"]) for seen in per_round)
