"""What a server sends, read within bounds: streams of events, and pages."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2 as httpx

DONE = "[DONE]"
"""The data of the event after the last one of an answer."""

LARGEST_EVENT = 2**20
"""Bytes. One event has a few tokens; what never ends must not fill the memory."""

LARGEST_PAGE = 2**24
"""Bytes. The counters of a server with many engines are some hundred thousand."""


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event of a stream, by the rules of the standard for server-sent events (WHATWG HTML).

    A line ends at LF, CR or both, and nowhere else: U+2028, U+2029 and U+0085 are part of the text. The ``data`` lines
    of an event are joined by LF. Comments, other fields and events without data are left out. Bytes may come in any
    portions, and are UTF-8 whatever the header says.

    In one thing it is laxer, as some servers are: a line that is whole by itself (a JSON object, or ``[DONE]``) is an
    event at once, without the empty line that should follow. No event that is JSON is read differently for it.

    Raises:
        httpx2.HTTPError: the connection broke, or an event is larger than ``LARGEST_EVENT``.
    """
    data: list[str] = []
    size = 0
    async for line in _lines(response):
        if not line:
            if any(data):
                yield "\n".join(data)
            data, size = [], 0
            continue
        size += len(line.encode())
        _check_size(size)
        name, _, value = line.partition(":")
        if name == "data":
            value = value.removeprefix(" ")
            if not data and _is_whole(value):
                yield value
                size = 0
            else:
                data.append(value)
    if _is_whole("\n".join(data)):
        yield "\n".join(data)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Without their ends; the last one too where it has none. A byte order mark in front is not part of the first."""
    response.encoding = "utf-8-sig"
    ends = io.IncrementalNewlineDecoder(None, translate=True)
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + ends.decode(text)).split("\n")
        for line in lines:
            yield line
        _check_size(len(rest.encode()))
    *lines, rest = (rest + ends.decode("", final=True)).split("\n")
    for line in [*lines, *([rest] if rest else [])]:
        yield line


def _check_size(size: int) -> None:
    import httpx2

    if size > LARGEST_EVENT:
        raise httpx2.SSEError(f"an event of the stream exceeded the {LARGEST_EVENT} byte limit")


def _is_whole(data: str) -> bool:
    """Whether this can be no part of a longer event."""
    if data.strip() == DONE:
        return True
    if not data.lstrip().startswith("{"):
        return False
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


async def beginning(response: httpx.Response, most: int) -> bytes:
    """The first bytes of a page, at most so many; the rest is not read."""
    read = bytearray()
    async for part in response.aiter_bytes():
        read += part
        if len(read) >= most:
            break
    return bytes(read[:most])


async def page(response: httpx.Response) -> str:
    """A whole page as text. A byte order mark is not part of it, and what is no UTF-8 is replaced.

    Raises:
        ValueError: it is larger than ``LARGEST_PAGE``.
        httpx2.HTTPError: the connection broke.
    """
    read = await beginning(response, LARGEST_PAGE + 1)
    if len(read) > LARGEST_PAGE:
        raise ValueError(f"the page has more than {LARGEST_PAGE} bytes")
    return read.decode("utf-8-sig", errors="replace")
