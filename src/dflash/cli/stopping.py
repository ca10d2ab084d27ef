"""Ctrl-C: what a command has done by then is kept; it says so and how to go on, and ends with status 130.

SIGTERM is taken as Ctrl-C is: that is what a batch system sends before it kills.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import typer

from dflash.cli import console

INTERRUPTED = 130
"""Exit status, as shells have it."""


def take_sigterm_as_interrupt() -> None:
    """From now on in this process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def stopped(message: str | None) -> typer.Exit:
    """Say what is kept and how to go on. What this returns is to be raised.

    From now on further signals are ignored, where the process is the command's own: all is done, and the status stands.

    Args:
        message: None where another process speaks for all.
    """
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    if message is not None:
        console.say("stopped", message, "bold yellow")
    return typer.Exit(INTERRUPTED)


def command() -> str:
    """This one, as it was typed."""
    module = Path(sys.argv[0]).parent.name == "benchmark"
    return shlex.join([*(["python", "-m", "dflash.benchmark"] if module else ["dflash"]), *sys.argv[1:]])
