"""What Ctrl-C must not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def whole() -> Iterator[None]:
    """A signal that ends the process is acted on when this is over, however it ends.

    In another thread than the main one nothing has to be done: signals interrupt the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    before = {one: signal.signal(one, note) for one in SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        if waiting:
            signal.raise_signal(waiting[0])


@contextmanager
def nothing_to_keep() -> Iterator[None]:
    """A signal that ends the process does so at once, even where it waits in code that is not Python's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, signal.SIG_DFL) for one in SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
