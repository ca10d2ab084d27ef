"""Servers that answer oddly, and addresses that are none: a failed answer or one sentence, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import State, running

from dflash.benchmark import counters
from dflash.benchmark import http as module
from dflash.benchmark.answers import Answer, Counted, Record
from dflash.benchmark.http import Server
from dflash.benchmark.parallel import Share
from dflash.benchmark.run import Journal
from dflash.benchmark.systems import Asking, Talk
from dflash.errors import RequestError


@pytest.fixture
def served() -> Iterator[tuple[str, State]]:
    """No model behind it: it sends what it is told."""
    with running(None) as server:
        yield server


def ask(served: tuple[str, State], *events: str, turns: tuple[str, ...] = ("hi",)) -> list[Answer]:
    url, state = served
    state.events = list(events)
    server = Server("server", url, "tiny", Asking(max_new_tokens=3), timeout=20)
    [(_, answers)] = server.converse([Talk(turns)])
    return answers


def said(content: Any, finish: Any = "stop") -> str:
    return json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": finish}]})


def usage(count: str) -> str:
    return f'{{"choices": [], "usage": {{"prompt_tokens": 3, "completion_tokens": {count}}}}}'


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        (["null"], "an event of the stream is no object: None"),
        (["[1, 2]"], "an event of the stream is no object"),
        (['"x"'], "an event of the stream is no object"),
        (["[" * 100_000], "not JSON"),
        (['{"choices": ["x"]}'], "a choice in the stream is no object: 'x'"),
        (['{"choices": {"x": 1}}'], "choices in the stream is not of the kind"),
        (['{"choices": [{"delta": "x"}]}'], "delta in the stream is not of the kind"),
        ([said(5)], "content in the stream is not of the kind the protocol has: 5"),
        ([said([{"type": "text", "text": "x"}])], "content in the stream"),
        ([said("x", {"a": 1})], "finish_reason in the stream"),
        ([said("x"), '{"usage": [1]}'], "usage in the stream"),
        *(
            ([said("x"), usage(count)], "completion_tokens in the stream is no number of tokens")
            for count in ('"2"', "2.5", "-3", "0", "true", "NaN", "1" + "0" * 400)
        ),
        (['{"error": "half a pair \\ud83d"}'], "the stream says: half a pair \ufffd"),
    ],
)
def test_an_odd_event_is_a_failed_answer_with_a_reason(
    served: tuple[str, State], events: list[str], reason: str
) -> None:
    [answer] = ask(served, *events)
    assert str(answer.error).startswith("BadAnswer: ") and reason in str(answer.error)


def test_halves_of_an_emoji_are_joined_and_a_lone_one_is_replaced(served: tuple[str, State], tmp_path: Path) -> None:
    """It is fed back, too, and goes to disk."""
    one, two = ask(served, said("a\ud83d", None), said("\ude00b\ud83d"), usage("3"), turns=("hi", "and?"))
    assert one.text == two.text == "a\U0001f600b\ufffd"
    assert served[1].asked[-1]["messages"][1]["content"] == "a\U0001f600b\ufffd"
    journal = Journal.open(tmp_path, {}, Share())
    journal.add([Record("server", "set", 0, 0, 0, "0.0", one)])
    assert Journal.open(tmp_path, {}, Share()).records == journal.records


@pytest.mark.timeout(120)
def test_a_page_that_drips_holds_nothing_up(served: tuple[str, State], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNTERS_TIMEOUT", 0.5)
    served[1].page = "drip"
    [answer] = ask(served, said("x"), usage("1"))  # unbounded, it would never come back
    assert answer.error is None and answer.counted is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300", "abc"])
def test_published_values_that_are_no_numbers_are_skipped(value: str) -> None:
    page = f"vllm:spec_decode_num_drafts_total 5\nvllm:spec_decode_num_accepted_tokens_total {value}\n"
    assert counters.from_metrics(page) == Counted(rounds=5.0)
    assert counters.from_metrics(f"sglang:spec_accept_length {value}\n") is None
    wide = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="100000000"} 5\n'
    assert counters.from_metrics(page + wide) == Counted(rounds=5.0)


@pytest.mark.parametrize("length", ["NaN", "Infinity", "1" + "0" * 400])
def test_a_mean_that_is_no_number_is_skipped(length: str) -> None:
    info = json.loads(f'{{"internal_states": [{{"avg_spec_accept_length": {length}}}]}}')
    assert counters.from_server_info(info) is None
    info["internal_states"].append({"avg_spec_accept_length": 3.0})
    assert counters.from_server_info(info) == Counted(length=3.0)
    assert counters.from_server_info({"internal_states": 5}) is None


@pytest.mark.parametrize("url", ["http://[::1", "http://x:abc/v1", "http://\x00/v1", "http://", "http://a..b/v1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="--base-url must be like http://localhost:8000/v1"):
        Server("server", url, "m", Asking())


@pytest.mark.parametrize("key", ["schl\u00fcssel", "abc\n", "\udcff"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(RequestError, match="OPENAI_API_KEY has characters") as told:
        Server("server", "http://127.0.0.1:9/v1", "m", Asking(), api_key=key)
    assert key not in str(told.value)


def test_the_list_of_models_must_come_in_time(monkeypatch: pytest.MonkeyPatch, served: tuple[str, State]) -> None:
    monkeypatch.setattr(module, "COUNTERS_TIMEOUT", 0.5)
    served[1].page = "drip"
    server = Server("server", served[0], "", Asking())
    with pytest.raises(RequestError, match=r"names no model in 0\.5 seconds"):
        server.first_model()
