"""Event streams by the rules of the standard, whatever the portions they come in; and pages within bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx2
import pytest
from openai_server import State, running

from dflash.benchmark import counters, reading
from dflash.benchmark.answers import Answer, Counted
from dflash.benchmark.http import Server
from dflash.benchmark.systems import Asking, Talk


def read(portions: Sequence[bytes], content_type: str = "text/event-stream") -> list[str]:
    """The events of a response that comes in these portions."""

    async def body() -> AsyncIterator[bytes]:
        for portion in portions:
            yield portion

    async def collect() -> list[str]:
        request = httpx2.Request("POST", "http://server/v1")
        response = httpx2.Response(200, headers={"Content-Type": content_type}, content=body(), request=request)
        return [event async for event in reading.events(response)]

    return asyncio.run(collect())


OTHERS = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1ee"
CASES = {
    "other line ends in the text": (f"data: {OTHERS}\n\n", [OTHERS]),
    "two lines of data": ("data: {\ndata: }\n\ndata:x\ndata\ndata:y\n\n", ["{\n}", "x\n\ny"]),
    "a byte order mark": ("\ufeffdata: a\n\ndata: \ufeffb\n\n", ["a", "\ufeffb"]),
    "all kinds of line ends": ("data: a\r\n\r\ndata: b\r\rdata: c\n\ndata: d\r\n\ndata: e\n\r\n\n\n", list("abcde")),
    "one space is not of the data": ("data:a\n\ndata: b\n\ndata:  c \n\n", ["a", "b", " c "]),
    "comments and other fields": (": hi\n\nevent: x\nid: 1\nretry: 5\ndata: a\n:\nfoo: b\nDATA: c\n\nid: 2\n\n", ["a"]),
    "without an empty line it is no event": ("data: a\n\ndata: b\n", ["a"]),
    "single newlines": ('data: {"a": 1}\ndata: {\ndata: }\n\ndata: [DONE]\n', ['{"a": 1}', "{\n}", "[DONE]"]),
    "the last one is whole": ('data: {\ndata: "b": 2}', ['{\n"b": 2}']),
    "the last one is cut off": ('data: {"a": 1}\n\ndata: {"b"', ['{"a": 1}']),
    "other letters": ("data: 日本語 é 😀\n\n", ["日本語 é 😀"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "events"), CASES.values(), ids=CASES)
def test_the_portions_do_not_matter(text: str, events: list[str]) -> None:
    """Cut at every place, inside characters and between CR and LF too, and byte by byte."""
    data = text.encode()
    assert read([data]) == events
    assert read([data[i : i + 1] for i in range(len(data))]) == events
    for at in range(1, len(data)):
        assert read([data[:at], data[at:]]) == events


@pytest.mark.parametrize("content_type", ["text/plain; charset=latin-1", "text/event-stream; charset=ascii", ""])
def test_an_event_stream_is_utf_8_whatever_its_header_says(content_type: str) -> None:
    assert read(["data: 日本語\n\n".encode()], content_type) == ["日本語"]
    assert read([b"data: \xff\n\n"], content_type) == ["\ufffd"], "and what is not is replaced"


@pytest.mark.parametrize("portion", [b"x" * 1000, b"data: " + b"x" * 1000 + b"\n"], ids=["a line", "an event"])
def test_what_never_ends_is_refused(portion: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_EVENT", 10_000)
    assert len(read([portion] * 5 + [b"\n\n"])) == (b"data" in portion)
    with pytest.raises(httpx2.HTTPError, match="10000 byte"):
        read([portion] * 12)


# --- from a server ----------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[tuple[str, State]]:
    """No model behind it: it sends what it is told."""
    with running(None) as server:
        yield server


def ask(served: tuple[str, State], *portions: bytes) -> Answer:
    url, state = served
    state.portions = list(portions)
    [(_, [answer])] = Server("server", url, "tiny", Asking(max_new_tokens=3), timeout=20).converse([Talk(("hi",))])
    return answer


def test_an_answer_in_any_language_and_layout_is_read(served: tuple[str, State]) -> None:
    text = "première\u2028deuxième\u2029troisième\u0085"
    delta = json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}, ensure_ascii=False)
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}, indent=1)
    whole = f"\ufeff: welcome\r\n\r\ndata: {delta}\r\n\r\n"
    whole += "".join(f"data: {line}\n" for line in usage.splitlines()) + "\ndata: [DONE]\n\n"
    data = whole.encode()
    answer = ask(served, *(data[i : i + 7] for i in range(0, len(data), 7)))
    assert (answer.error, answer.text, answer.count) == (None, text, 7)


def test_a_line_without_an_end_is_a_failed_answer(served: tuple[str, State]) -> None:
    answer = ask(served, *[b"x" * 2**16] * 20)
    assert "exceeded the 1048576 byte limit" in str(answer.error)


ENDED = (
    b'data: {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}'
)


def test_nothing_after_the_end_is_waited_for(served: tuple[str, State]) -> None:
    """The connection stays open, and what is still sent is no answer."""
    served[1].after = "wait"
    answer = ask(served, ENDED + b"\n\ndata: [DONE]\n\ndata: {not json\n\n")
    assert (answer.error, answer.text, answer.count) == (None, "yes", 2)


def test_a_connection_that_breaks_after_the_end_loses_no_answer(served: tuple[str, State]) -> None:
    served[1].after = "break"
    answer = ask(served, ENDED + b"\n\ndata: [DONE]\n\n")
    assert (answer.error, answer.text, answer.count) == (None, "yes", 2)
    assert ask(served, ENDED + b"\n\n").error is not None, "without the end"


@pytest.mark.parametrize("end", [b"\n", b""])
def test_single_newlines_will_do(served: tuple[str, State], end: bytes) -> None:
    """Each event is read, and timed, as its line ends."""
    first = b'data: {"choices": [{"delta": {"content": "oh "}}]}\n'
    answer = ask(served, first, ENDED + b"\n", b"data: [DONE]" + end)
    assert (answer.error, answer.text, answer.count) == (None, "oh yes", 2)


def test_an_event_is_there_when_its_line_is() -> None:
    """Not at the end of them all, or the times of their tokens would be wrong."""
    sent = []

    async def body() -> AsyncIterator[bytes]:
        for portion in (b'data: {"a": 1}\n', b'data: {"a": 2}\n'):
            sent.append(portion)
            yield portion

    async def collect() -> list[int]:
        request = httpx2.Request("POST", "http://server/v1")
        response = httpx2.Response(200, content=body(), request=request)
        return [len(sent) async for _ in reading.events(response)]

    assert asyncio.run(collect()) == [1, 2]


PAGE = (
    '\ufeffvllm:spec_decode_num_drafts_total{model_name="a\u2028b"} 5\r\nvllm:spec_decode_num_accepted_tokens_total 7\n'
)


def test_pages_are_read_alike(served: tuple[str, State], monkeypatch: pytest.MonkeyPatch) -> None:
    url, state = served
    server = Server("server", url, "tiny", Asking())
    state.page = PAGE
    assert server.counters() == Counted(rounds=5.0, accepted=7.0)
    assert counters.from_metrics('vllm:spec_decode_num_drafts{model_name="a\u2028b\x85c"} 5\n') == Counted(rounds=5.0)
    monkeypatch.setattr(reading, "LARGEST_PAGE", 100)
    assert server.counters() is None, "larger than any page"
    assert server.first_model() == "tiny"
