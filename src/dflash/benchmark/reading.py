"""What a server sends, read within bounds: streams of events, and pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2 as httpx

LARGEST_EVENT = 2**20
"""Bytes. One event has a few tokens; what never ends must not fill the memory."""

LARGEST_PAGE = 2**24
"""Bytes. The counters of a server with many engines are some hundred thousand."""


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event of a stream, by the rules of the standard for server-sent events (WHATWG HTML).

    A line ends at LF, CR or both, and nowhere else: U+2028, U+2029 and U+0085 are part of the text. The ``data`` lines
    of an event are joined by LF. Comments, other fields, events without data and what follows the last empty line are
    left out. Bytes may come in any portions.

    Raises:
        httpx2.HTTPError: the connection broke, or an event is larger than ``LARGEST_EVENT``.
    """
    import httpx2

    # As the standard has it, whatever the header says: always UTF-8, a byte order mark in front not part of it. Some
    # servers call their stream text/plain, which the reader would refuse: what it is, its events tell.
    response.encoding = "utf-8-sig"
    response.headers["Content-Type"] = "text/event-stream"
    async for event in httpx2.EventSource(response, LARGEST_EVENT):
        if event.data:
            yield event.data


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
