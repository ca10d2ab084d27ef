"""Any OpenAI-compatible server, asked over HTTP with several requests in flight.

Tokens are counted by the server's ``usage``, never by chunks: one chunk may hold several. A request that fails, or is
not over in time, is an answer that failed; nothing here waits longer than the timeout.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dflash import jsontext, packages
from dflash.benchmark import counters, reading
from dflash.benchmark.answers import Answer, Counted, digest, failed
from dflash.benchmark.clock import Clock, wall
from dflash.benchmark.systems import WARM_UP_TOKENS, Asking, Messages, Talk, final_text
from dflash.errors import RequestError
from dflash.text import joined

if TYPE_CHECKING:
    import httpx2 as httpx

ROUNDS_OF_REQUESTS = 4
"""A server is handed this many times as many conversations as it may have in flight, so that it stays busy."""

COUNTERS_TIMEOUT = 10.0
"""Seconds for all pages that may have counters, however slowly they come; and for the list of models."""

MOST_TOKENS = 2**31
"""No answer has more: a larger number was not counted."""


def _httpx() -> Any:
    """The HTTP client.

    Raises:
        MissingPackage: it is not installed.
    """
    packages.need(("httpx2",), "to benchmark a server")
    import httpx2

    return httpx2


Kind = TypeVar("Kind")


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

    def take(self, event: Any, seconds: float) -> None:
        """One event.

        Raises:
            BadAnswer: it is an error, or not as the protocol has it.
        """
        if not isinstance(event, dict):
            raise BadAnswer(f"an event of the stream is no object: {repr(event)[:80]}")
        if event.get("error"):
            raise BadAnswer(f"the stream says: {str(event['error'])[:200]}")
        self.usage = _member(event, "usage", {}) or self.usage
        choices: list[Any] = _member(event, "choices", [])
        for choice in choices:
            if not isinstance(choice, dict):
                raise BadAnswer(f"a choice in the stream is no object: {repr(choice)[:80]}")
            self._take_choice(choice, seconds)
        self.seconds = seconds

    def _take_choice(self, choice: dict[str, Any], seconds: float) -> None:
        delta: dict[str, Any] = _member(choice, "delta", {})
        thought = _member(delta, "reasoning_content", "") or _member(delta, "reasoning", "")
        said = _member(delta, "content", "")
        if thought or said:
            self.first = seconds if self.first is None else self.first
        self.text += thought + said
        self.spoken += said
        self.finish = _member(choice, "finish_reason", "") or self.finish

    def end(self) -> None:
        """Nothing more comes. Only now, for one event may end in the middle of an emoji and the next go on there."""
        self.text, self.spoken = joined(self.text), joined(self.spoken)


def _member(value: dict[str, Any], name: str, empty: Kind) -> Kind:
    """A member that must be of the kind of ``empty`` where it is there at all; else that.

    Raises:
        BadAnswer: it is of another kind.
    """
    found = value.get(name)
    if found is None:
        return empty
    if not isinstance(found, type(empty)):
        raise BadAnswer(f"{name} in the stream is not of the kind the protocol has: {repr(found)[:80]}")
    return found


def _check_address(base_url: str) -> None:
    """Whether there can be a server at this address.

    Raises:
        RequestError: it is no address of one, or the HTTP client is not installed.
    """
    httpx2 = _httpx()
    reason = ""
    try:
        host = httpx2.URL(base_url).host
        host.encode("idna")  # as the resolver will: the client itself does not look at every label
    except (httpx2.InvalidURL, UnicodeError) as error:
        host, reason = "", f" ({error})"
    if not host or not base_url.startswith(("http://", "https://")):
        raise RequestError(f"--base-url must be like http://localhost:8000/v1, not {base_url!r}{reason}")


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
            RequestError: the HTTP client is not installed, that is no address, or no header can carry the key.
        """
        _check_address(base_url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("OPENAI_API_KEY has characters that an HTTP header cannot carry: give printable ASCII")
        self.name = name
        self.model = model
        self.at_once = ROUNDS_OF_REQUESTS * concurrency
        self._base = base_url.rstrip("/")
        self._asking = asking
        self._concurrency = concurrency
        self._timeout = timeout
        self._headers = {} if not api_key else {"Authorization": f"Bearer {api_key}"}
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
        history: Messages = list(talk.opening)
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
        except TimeoutError:
            error = f"not over after {self._timeout:g} seconds"
        except (_httpx().HTTPError, BadAnswer) as failure:
            error = joined(f"{type(failure).__name__}: {failure}".strip(": "))
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
                text = " ".join((await reading.beginning(response, 2000)).decode(errors="replace").split())
                raise BadAnswer(f"HTTP {response.status_code}: {text[:200]}")
            async for data in reading.events(response):
                if data.strip() == reading.DONE:
                    break  # whether the server ends the response or not: the answer is complete
                try:
                    event = jsontext.parse(data)
                except ValueError as error:
                    raise BadAnswer(f"an event of the stream is not JSON: {data[:80]!r}") from error
                stream.take(event, self._clock() - began)
        stream.end()
        return stream

    def _measured(self, stream: _Stream, began: float, messages: Messages) -> Answer:
        if stream.finish is None:
            raise BadAnswer("the stream broke off before a finish reason")
        count = stream.usage.get("completion_tokens")
        if count is None or stream.first is None:
            raise BadAnswer("no text, or no usage, in the stream: its tokens cannot be counted")
        if type(count) is not int or not 0 < count <= MOST_TOKENS:
            raise BadAnswer(f"completion_tokens in the stream is no number of tokens: {repr(count)[:80]}")
        asked = stream.usage.get("prompt_tokens")
        return Answer(
            began=began,
            first=stream.first,
            seconds=stream.seconds,
            count=count,
            finish=joined(stream.finish),
            text=stream.text,
            prompt_tokens=asked if type(asked) is int and 0 <= asked <= MOST_TOKENS else None,
            prompt_digest=digest(messages),
        )

    def first_model(self) -> str:
        """The first model that the server names.

        Raises:
            RequestError: it names none.
        """
        address = f"{self._base}/models"
        try:
            text = asyncio.run(asyncio.wait_for(self._page_alone(address), COUNTERS_TIMEOUT))
            return joined(str(jsontext.parse(text)["data"][0]["id"]))
        except TimeoutError as error:
            raise RequestError(f"{address} names no model in {COUNTERS_TIMEOUT:g} seconds: give --model") from error
        except (_httpx().HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise RequestError(f"{address} does not name a model ({error}): give --model") from error

    def counters(self) -> Counted | None:
        """What the server publishes of its speculation; None if nothing, or not in time."""
        try:
            return asyncio.run(asyncio.wait_for(self._counters(), COUNTERS_TIMEOUT))
        except TimeoutError:  # the client's own timeout is of one read: a page that drips would never end
            return None

    async def _counters(self) -> Counted | None:
        root = self._base.removesuffix("/v1")
        async with self._client() as client:
            for page in ("/metrics", "/server_info", "/get_server_info"):
                try:
                    text = await self._page(client, root + page)
                    counted = (
                        counters.from_metrics(text)
                        if page == "/metrics"
                        else counters.from_server_info(jsontext.parse(text))
                    )
                except (_httpx().HTTPError, ValueError):  # no such page, or something else there
                    continue
                if counted is not None:
                    return counted
        return None

    async def _page(self, client: httpx.AsyncClient, address: str) -> str:
        async with client.stream("GET", address) as response:
            response.raise_for_status()
            return await reading.page(response)

    async def _page_alone(self, address: str) -> str:
        async with self._client() as client:
            return await self._page(client, address)


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
