"""Servers over HTTP, end to end: a real one with concurrency, and one that is slow, fails, or answers nonsense."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import State, running
from typer.testing import CliRunner

import tiny
from dflash.backends.torch.target import TorchTarget
from dflash.benchmark import counters
from dflash.benchmark.answers import Counted
from dflash.benchmark.http import Server, in_background
from dflash.benchmark.results import ALL, load
from dflash.benchmark.systems import Asking, Talk
from dflash.cli.main import app
from dflash.errors import RequestError
from dflash.generate import generate


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(tiny.model("llama", vocab_size=272), tiny.tokenizer(), "tiny")


@pytest.fixture
def served(target: TorchTarget) -> Iterator[tuple[str, State]]:
    with running(target) as server:
        yield server


def converse(server: Server, *talks: Talk) -> dict[int, list[Any]]:
    return dict(server.converse(talks))


def test_a_server_gets_the_system_message_of_a_row(served: tuple[str, State], tmp_path: Path) -> None:
    url, state = served
    file = tmp_path / "chats.jsonl"
    chat = [("system", "Be brief."), ("user", "one"), ("assistant", "not this"), ("user", "two")]
    file.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) + "\n")
    command = ["benchmark", "--backend", "openai", "--base-url", url, "--dataset", str(file), "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    asked = [[(m["role"], m["content"]) for m in body["messages"]] for body in state.asked][-2:]
    assert asked[0] == chat[:2]
    assert [asked[1][0], asked[1][1], asked[1][3]] == [chat[0], chat[1], chat[3]] and asked[1][2][1] != "not this"


def test_a_server_benchmarked_from_the_command_line(
    served: tuple[str, State], target: TorchTarget, tmp_path: Path
) -> None:
    """Counted, reported, never hung: six good conversations among five kinds of bad ones, four requests in flight."""
    url, state = served
    good = [["abcabcabc"], ["hello", "and again"], ["xyzxyz"], ["one"], ["two"], ["three"]]
    bad = [["slow"], ["fail"], ["cut"], ["junk"], ["drip"]]
    questions = [*good[:3], *bad, *good[3:]]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    began = time.monotonic()
    command = ["benchmark", "--backend", "openai", "--base-url", url, "--dataset", str(file), "--concurrency", "4"]
    command += ["--max-new-tokens", "16", "--timeout", "2", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1, "five failed"
    said = result.stderr.splitlines()[-1]
    assert said.startswith("failed: 5 of 12 answers: not over after 2 seconds; 3 for other reasons")
    assert time.monotonic() - began < 20, "two requests that never end take 2 seconds each, side by side"
    assert state.most == 4, "as many in flight as were asked for, never more"

    found = load(tmp_path / "out" / "results.json")
    figures = found.figures()["questions"]["server"]
    assert (figures.answers, figures.failures) == (7, 5)
    errors = sorted(r.answer.error for r in found.records if r.answer.error)
    for error, words in zip(errors, ['HTTP 500: {"error"', "not JSON", "", "not over after 2", "not over after 2"]):
        assert words in error
    assert "7 + 5" in " ".join(result.stdout.split()) and "CUDA out of memory" in result.stdout
    # Every token is counted, though a chunk holds several (M3).
    for record in found.records:
        if record.answer.error is None and record.turn == 0:
            turn = questions[record.prompt][0]
            own = generate(target, None, None, [{"role": "user", "content": turn}], max_tokens=16)
            assert (record.answer.text, record.answer.count) == (own.text, own.generation_tokens)
            assert record.answer.prompt_tokens == own.prompt_tokens
    second = next(body for body in state.asked if body["messages"][-1]["content"] == "and again")
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"], "answers are fed back"
    # What the server counted of the warm-up is not in it: that request had a cap of its own.
    assert figures.server_length is not None and figures.server_length > 1
    assert len(figures.server_by_position) == 8
    html = (tmp_path / "out" / "report.html").read_text()
    assert "failed 1 time" in html and "data:image/png;base64," in html


def test_nothing_but_failures_is_exit_status_1(tmp_path: Path) -> None:
    command = ["benchmark", "--backend", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    result = CliRunner().invoke(app, [*command, "--prompt", "x", "--timeout", "2"])
    assert result.exit_code == 1
    assert "0 + 1 FAILED" in " ".join(result.stdout.split()) and "ConnectError" in result.stdout


def test_the_counters_are_those_of_our_own_requests(served: tuple[str, State]) -> None:
    url, state = served
    server = Server("server", url, "tiny", Asking(max_new_tokens=12), concurrency=2)
    converse(server, Talk(("abcabc",)))
    before = (state.rounds, state.proposed, state.accepted)
    answers = converse(server, Talk(("abcabcabc",)), Talk(("hello",)))
    counted = [one[-1].counted for one in answers.values() if one[-1].counted is not None]
    after = (state.rounds, state.proposed, state.accepted)
    assert [(c.rounds, c.proposed, c.accepted) for c in counted] == [tuple(b - a for a, b in zip(before, after))]
    assert sum(counted[0].by_position) == counted[0].accepted


def test_what_is_sent(served: tuple[str, State]) -> None:
    url, state = served
    asking = Asking(max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=7, enable_thinking=False)
    server = Server("server", url, "tiny", asking)
    assert server.first_model() == "tiny"
    converse(server, Talk(("hi",), seed=5))
    sent = {k: v for k, v in state.asked[-1].items() if k != "messages"}
    assert sent == {
        "model": "tiny", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


def test_an_answer_without_usage_is_not_guessed(served: tuple[str, State]) -> None:
    server = Server("server", served[0], "tiny", Asking(max_new_tokens=3))
    [[answer]] = converse(server, Talk(("no usage",))).values()
    assert "no usage" in str(answer.error)


def test_two_servers_are_compared(served: tuple[str, State], tmp_path: Path) -> None:
    url, _ = served
    command = ["benchmark", "--backend", "openai", "--base-url", f"before={url}", "--base-url", f"after={url}"]
    result = CliRunner().invoke(
        app, [*command, "--prompt", "abcabc", "--max-new-tokens", "8", "--output", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    found = load(tmp_path / "results.json")
    assert found.baseline == "before" and found.figures()["prompt"]["after"].speedup is not None
    assert ALL not in found.figures(), "one data set needs no line over all"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --base-url"),
        (["--base-url", "localhost:8000"], "must be like http://"),
        (["--base-url", "a=http://x/v1", "--base-url", "a=http://y/v1"], "another server called a"),
        (["--base-url", "http://127.0.0.1:9/v1", "--draft-model", "d"], "does not go with --backend openai"),
        (["--base-url", "http://127.0.0.1:9/v1"], "does not name a model"),
    ],
)
def test_what_cannot_be_asked_of_servers(arguments: list[str], message: str) -> None:
    model = [] if "127.0.0.1" in str(arguments) else ["--model", "m"]
    result = CliRunner().invoke(app, ["benchmark", "--backend", "openai", "--prompt", "x", *model, *arguments])
    assert result.exit_code == 2 and message in result.stderr.replace("\n", " ")


# --- counters ---------------------------------------------------------------------------------------


def test_vllm_counts_of_all_engines_are_added() -> None:
    text = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="1",model_name="m"} 1.7e9
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 70.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 2.1e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="10"} 1.0
vllm:num_requests_running{engine="0"} 2.0
"""
    counted = counters.from_metrics(text)
    assert counted == Counted(15.0, 70.0, 21.0, (9.0, *[0.0] * 9, 1.0))
    assert counters.since(Counted(5.0, 20.0, 1.0, (1.0,)), counted) == Counted(10, 50, 20, (8.0, *[0.0] * 9, 1.0))
    assert counters.since(None, counted) == counted
    assert counters.from_metrics("vllm:num_requests_running 2.0\n<html>\n") is None


def test_sglang_publishes_a_mean() -> None:
    assert counters.from_metrics('sglang:spec_accept_length{tp_rank="0"} 3.5\n') == Counted(length=3.5)
    info = {"internal_states": [{"avg_spec_accept_length": 3.0}, {"avg_spec_accept_length": 4.0}]}
    assert counters.from_server_info(info) == Counted(length=3.5)
    assert counters.from_server_info({"internal_states": [{"avg_spec_accept_length": None}]}) is None
    assert counters.from_server_info(["something else"]) is None
    assert counters.since(Counted(length=2.0), Counted(length=3.0)) == Counted(length=3.0)


# --- in the background ------------------------------------------------------------------------------


def test_a_slow_consumer_delays_nothing_and_leaving_early_ends_it() -> None:
    import asyncio

    produced: list[float] = []
    over = threading.Event()

    async def items() -> AsyncIterator[int]:
        try:
            for i in range(100):
                await asyncio.sleep(0.01)
                produced.append(time.monotonic())
                yield i
        finally:
            over.set()

    stream = in_background(items())
    assert next(stream) == 0
    time.sleep(0.3)
    assert len(produced) > 10, "it went on while the consumer slept"
    stream.close()
    assert over.is_set() and len(produced) < 100


def test_an_error_in_the_background_is_raised_in_front() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        raise RequestError("broken")

    stream = in_background(items())
    assert next(stream) == 1
    with pytest.raises(RequestError, match="broken"):
        next(stream)
