"""A small real OpenAI-compatible server: a tiny model decoded by our own loop, streamed as server-sent events.

What the question says makes it misbehave: ``slow``, ``drip`` (never ends), ``fail``, ``cut``, ``junk``, ``no usage``.
``State.events`` or ``State.portions`` are sent instead of an answer, ``State.page`` at ``/metrics`` (``drip``: no page
ever ends).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dflash.drafters import NGramDrafter
from dflash.generate import stream_generate
from dflash.protocols import Target


class State:
    """What the server counts.

    Attributes:
        flying, most: requests being served, and the most at a time.
        asked: bodies, in order.
        events: of the stream, as they are sent, whatever is asked; or its ``portions``, byte for byte.
        after: after the portions, ``wait`` leaves the connection open and ``break`` breaks it.
        page: what ``/metrics`` has.
    """

    def __init__(self, target: Target | None) -> None:
        self.target = target
        self.lock = threading.Lock()
        self.model_lock = threading.Lock()
        self.flying = self.most = 0
        self.asked: list[dict[str, Any]] = []
        self.rounds = self.proposed = self.accepted = 0
        self.positions = [0] * 8
        self.patience = threading.Event()
        self.events: list[str] | None = None
        self.portions: list[bytes] | None = None
        self.after = ""
        self.page: str | None = None

    def metrics(self) -> str:
        """In Prometheus' text format, named as vLLM names them."""
        if self.page is not None:
            return self.page
        lines = ["# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts."]
        for name, value in (
            ("drafts", self.rounds), ("draft_tokens", self.proposed), ("accepted_tokens", self.accepted)
        ):  # fmt: skip
            lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="tiny"}} {value}.0')
        for position, value in enumerate(self.positions):
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {value}.0'
            )
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args: Any) -> None:
        """Quietly."""

    def do_GET(self) -> None:
        if self.state.page == "drip":
            self._drip()
        elif self.path == "/v1/models":
            self._whole(200, json.dumps({"data": [{"id": "tiny"}]}))
        elif self.path == "/metrics":
            self._whole(200, self.state.metrics())
        else:
            self._whole(404, "nothing here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.state
        with state.lock:
            state.asked.append(body)
            state.flying += 1
            state.most = max(state.most, state.flying)
        try:
            self._serve(body, body["messages"][-1]["content"])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with state.lock:
                state.flying -= 1

    def _serve(self, body: dict[str, Any], question: str) -> None:
        if "fail" in question:
            self._whole(500, json.dumps({"error": {"message": "CUDA out of memory"}}))
            return
        if "slow" in question:
            self.state.patience.wait(30)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if "drip" in question:
            while not self.state.patience.wait(0.05):
                self._chunk(b".")  # never a whole line
        if self.state.portions is not None:
            for portion in self.state.portions:
                self._chunk(portion)
            if self.state.after == "wait":
                self.state.patience.wait(30)
            if self.state.after:
                self.close_connection = True
                return
        elif self.state.events is not None:
            for event in self.state.events:
                self._chunk(f"data: {event}\n\n".encode())
        elif "junk" in question:
            self._chunk(b"data: {not json\n\n")
        elif "cut" in question:
            self._event({"choices": [{"delta": {"content": "half an ans"}, "finish_reason": None}]})
            self.close_connection = True
            return
        else:
            self._answer(body, question)
        self._chunk(b"")

    def _answer(self, body: dict[str, Any], question: str) -> None:
        state = self.state
        assert state.target is not None
        time.sleep(0.05)  # so that requests overlap however quick the model
        with state.model_lock:
            responses = list(
                stream_generate(
                    state.target, NGramDrafter(), None, body["messages"], max_tokens=body["max_tokens"],
                    temperature=body["temperature"], top_p=body["top_p"], seed=body["seed"],
                )
            )  # fmt: skip
            for response in responses[1:]:
                state.rounds += 1
                state.proposed += response.proposed
                state.accepted += response.accepted
                for k in range(response.accepted):
                    state.positions[k] += 1
        for response in responses:  # one chunk a round: several tokens each
            self._event({"choices": [{"delta": {"content": response.text}, "finish_reason": response.finish_reason}]})
        if "no usage" not in question:
            last = responses[-1]
            usage = {"prompt_tokens": last.prompt_tokens, "completion_tokens": last.generation_tokens}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while not self.state.patience.wait(0.05):
                self._chunk(b"#")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _whole(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(value)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@contextmanager
def running(target: Target | None) -> Iterator[tuple[str, State]]:
    """Its address up to ``/v1``, and what it counts."""
    state = State(target)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"state": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", state
    finally:
        state.patience.set()
        server.shutdown()
        server.server_close()
        thread.join()
