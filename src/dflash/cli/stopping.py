"""Ctrl-C: what a command has done by then is kept; it says so and how to go on, and ends with status 130.

SIGTERM is taken as Ctrl-C is: that is what a batch system sends before it kills.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from dflash.cli import console
from dflash.errors import DFlashError

INTERRUPTED = 130
"""Exit status, as shells have it."""


_received: list[int] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def take_signals() -> None:
    """From now on in this process, both interrupt it; SIGINT not where the shell has it ignored."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def importing() -> Iterator[None]:
    """An import that a signal cuts short may end with another error: inside, that is an interrupt all the same."""
    try:
        yield
    except (DFlashError, ImportError, AttributeError, NameError, RuntimeError, TypeError) as error:
        if _received:
            raise KeyboardInterrupt from error
        raise


def stopped(message: str | None) -> typer.Exit:
    """Say what is kept and how to go on. What this returns is to be raised.

    From now on further signals are ignored, where the process is the command's own: all is done, and the status stands.

    Args:
        message: None where another process speaks for all.
    """
    if signal.getsignal(signal.SIGTERM) is _interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    if message is not None:
        console.say("stopped", message, "bold yellow")
    return typer.Exit(INTERRUPTED)


def command() -> str:
    """This one, as it was typed."""
    module = Path(sys.argv[0]).parent.name == "benchmark"
    return shlex.join([*(["python", "-m", "dflash.benchmark"] if module else ["dflash"]), *sys.argv[1:]])
