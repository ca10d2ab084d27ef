"""Any OpenAI-compatible server, asked over HTTP with several requests in flight.

Tokens are counted by the server's ``usage``, never by chunks: one chunk may hold several. A request that fails, or is
not over in time, is an answer that failed; nothing here waits longer than the timeout.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dflash.benchmark import counters
from dflash.benchmark.answers import Answer, Counted, digest, failed
from dflash.benchmark.clock import Clock, wall
from dflash.benchmark.systems import WARM_UP_TOKENS, Asking, Messages, Talk, final_text
from dflash.errors import RequestError

if TYPE_CHECKING:
    import httpx2 as httpx

ROUNDS_OF_REQUESTS = 4
"""A server is handed this many times as many conversations as it may have in flight, so that it stays busy."""

COUNTERS_TIMEOUT = 10.0
"""Seconds for a page of counters, which a server may not have."""


def _httpx() -> Any:
    """The HTTP client.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import httpx2
    except ImportError as error:
        raise RequestError("to benchmark a server: pip install 'dflash[bench]'") from error
    return httpx2


class BadAnswer(Exception):
    """The server answered, but not as the protocol has it."""


@dataclass
class _Stream:
    """What came of one streamed answer so far.

    Attributes:
        first: seconds to the first piece of text.
        seconds: to the newest piece.
        spoken: the text to be fed back, thinking that the server split off left out.
    """

    first: float | None = None
    seconds: float = 0.0
    text: str = ""
    spoken: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, data: dict[str, Any], seconds: float) -> None:
        """One event."""
        if data.get("error"):
            raise BadAnswer(f"the stream says: {data['error']}")
        self.usage = data.get("usage") or self.usage
        for choice in data.get("choices") or []:
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            said = delta.get("content") or ""
            if thought or said:
                self.first = seconds if self.first is None else self.first
            self.text += thought + said
            self.spoken += said
            self.finish = choice.get("finish_reason") or self.finish
        self.seconds = seconds


class Server:
    """One server.

    Attributes:
        name: in tables.
        model: the server's name for its model.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        model: str,
        asking: Asking,
        concurrency: int = 1,
        timeout: float = 600.0,
        api_key: str | None = None,
        clock: Clock = wall,
    ) -> None:
        """
        Args:
            base_url: up to and including ``/v1``.
            concurrency: requests in flight.
            timeout: seconds for one whole request.

        Raises:
            RequestError: the HTTP client is not installed, or that is no address.
        """
        _httpx()
        if not base_url.startswith(("http://", "https://")):
            raise RequestError(f"--base-url must be like http://localhost:8000/v1, not {base_url!r}")
        self.name = name
        self.model = model
        self.at_once = ROUNDS_OF_REQUESTS * concurrency
        self._base = base_url.rstrip("/")
        self._asking = asking
        self._concurrency = concurrency
        self._timeout = timeout
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._clock = clock

    def warm_up(self, turn: str) -> None:
        """A short answer. A server that cannot give it will show so in the records."""
        asking = replace(self._asking, max_new_tokens=WARM_UP_TOKENS)

        async def once() -> None:
            async with self._client() as client:
                await self._answer(client, [{"role": "user", "content": turn}], 0, asking)

        asyncio.run(once())

    def converse(self, talks: Sequence[Talk]) -> Iterator[tuple[int, list[Answer]]]:
        """See ``System``. Counters are read before and after; the last answer bears the difference."""
        before = self.counters()
        held: tuple[int, list[Answer]] | None = None
        for done in in_background(self._conversations(talks)):
            if held is not None:
                yield held
            held = done
        if held is not None:
            index, answers = held
            counted = counters.since(before, self.counters())
            yield index, [*answers[:-1], answers[-1].with_counted(counted)]

    async def _conversations(self, talks: Sequence[Talk]) -> AsyncIterator[tuple[int, list[Answer]]]:
        """All of them, as they get done."""
        free = asyncio.Semaphore(self._concurrency)
        async with self._client() as client:

            async def one(index: int) -> tuple[int, list[Answer]]:
                async with free:
                    return index, await self._talk(client, talks[index])

            running = [asyncio.create_task(one(index)) for index in range(len(talks))]
            try:
                for done in asyncio.as_completed(running):
                    yield await done
            finally:
                for task in running:
                    task.cancel()

    def _client(self) -> httpx.AsyncClient:
        limits = _httpx().Limits(max_connections=None)
        client: httpx.AsyncClient = _httpx().AsyncClient(timeout=self._timeout, headers=self._headers, limits=limits)
        return client

    async def _talk(self, client: httpx.AsyncClient, talk: Talk) -> list[Answer]:
        history: Messages = []
        answers: list[Answer] = []
        for number, turn in enumerate(talk.turns):
            history.append({"role": "user", "content": turn})
            answer, spoken = await self._answer(client, history, talk.seed + number, self._asking)
            answers.append(answer)
            if answer.error:
                break
            history.append({"role": "assistant", "content": final_text(spoken)})
        return answers

    async def _answer(
        self, client: httpx.AsyncClient, messages: Messages, seed: int, asking: Asking
    ) -> tuple[Answer, str]:
        """One request, and what to feed back of it. It ends in time whatever the server does."""
        began = self._clock()
        try:
            stream = await asyncio.wait_for(
                self._request(client, self._body(messages, seed, asking), began), self._timeout
            )
            return self._measured(stream, began, messages), stream.spoken
        except asyncio.TimeoutError:
            error = f"not over after {self._timeout:g} seconds"
        except (_httpx().HTTPError, BadAnswer) as failure:
            error = f"{type(failure).__name__}: {failure}".strip(": ")
        return failed(began, self._clock() - began, error), ""

    def _body(self, messages: Messages, seed: int, asking: Asking) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": asking.max_new_tokens,
            "temperature": asking.temperature,
            "top_p": asking.top_p,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if asking.top_k:
            body["top_k"] = asking.top_k
        if asking.enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": asking.enable_thinking}
        return body

    async def _request(self, client: httpx.AsyncClient, body: dict[str, Any], began: float) -> _Stream:
        stream = _Stream()
        async with client.stream("POST", f"{self._base}/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = " ".join((await response.aread()).decode(errors="replace").split())
                raise BadAnswer(f"HTTP {response.status_code}: {text[:200]}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                try:
                    event = json.loads(data)
                except ValueError as error:
                    raise BadAnswer(f"a line of the stream is not JSON: {data[:80]!r}") from error
                stream.take(event, self._clock() - began)
        return stream

    def _measured(self, stream: _Stream, began: float, messages: Messages) -> Answer:
        if stream.finish is None:
            raise BadAnswer("the stream broke off before a finish reason")
        count = stream.usage.get("completion_tokens")
        if not count or stream.first is None:
            raise BadAnswer("no text, or no usage, in the stream: its tokens cannot be counted")
        return Answer(
            began=began,
            first=stream.first,
            seconds=stream.seconds,
            count=count,
            finish=stream.finish,
            text=stream.text,
            prompt_tokens=stream.usage.get("prompt_tokens"),
            prompt_digest=digest(messages),
        )

    def first_model(self) -> str:
        """The first model that the server names.

        Raises:
            RequestError: it names none.
        """
        httpx2 = _httpx()
        try:
            response = httpx2.get(f"{self._base}/models", headers=self._headers, timeout=COUNTERS_TIMEOUT)
            return str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise RequestError(f"{self._base}/models does not name a model ({error}): give --model") from error

    def counters(self) -> Counted | None:
        """What the server publishes of its speculation; None if nothing."""
        root = self._base.removesuffix("/v1")
        httpx2 = _httpx()
        with httpx2.Client(timeout=COUNTERS_TIMEOUT, headers=self._headers) as client:
            for page in ("/metrics", "/server_info", "/get_server_info"):
                try:
                    response = client.get(root + page)
                    if response.status_code != 200:
                        continue
                    text = response.text
                    counted = (
                        counters.from_metrics(text)
                        if page == "/metrics"
                        else counters.from_server_info(json.loads(text))
                    )
                except (httpx2.HTTPError, ValueError):  # no such page, or something else at that address
                    continue
                if counted is not None:
                    return counted
        return None


def in_background(items: AsyncIterator[Any]) -> Iterator[Any]:
    """Iterate in a thread of its own, so that what the consumer does with an item delays no other.

    Left early (Ctrl-C, too), the iteration is cancelled and over before this returns.
    """
    done: queue.Queue[Any] = queue.Queue()
    end = object()
    loop = asyncio.new_event_loop()

    async def pump() -> None:
        async for item in items:
            done.put(item)

    task = loop.create_task(pump())

    def work() -> None:
        loop.run_until_complete(asyncio.wait([task]))  # what the task raises is raised below
        loop.run_until_complete(loop.shutdown_asyncgens())
        done.put(end)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := done.get()) is not end:
            yield item
        task.result()
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
