"""The two streams: answers on stdout; errors, warnings, figures and what is going on, on stderr."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


def stdout() -> Console:
    """For what was asked for."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """For what is said about it."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def coloured(console: Console) -> bool:
    """Whether it shows colours: a terminal that has them, and no NO_COLOR."""
    return console.color_system is not None and not console.no_color


def prints_unicode(console: Console) -> bool:
    """Whether bars and brackets beyond ASCII can be printed."""
    return console.encoding.startswith("utf")


def say(label: str, message: object, style: str) -> None:
    """``label: message`` on stderr, as one line."""
    line = Text(f"{label}: ", style=style).append(" ".join(str(message).split()), style="none")
    stderr().print(line, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """One object on stdout, one line, non-ASCII text as it is where the stream takes it."""
    console = stdout()
    console.file.write(json.dumps(value, ensure_ascii=not prints_unicode(console), allow_nan=False) + "\n")


@contextmanager
def plain_warnings(worded: Callable[[str], str]) -> Iterator[None]:
    """Show warnings as ``warning: ...``, worded so, instead of with the line of code that raised them."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        say("warning", worded(str(message)), "bold yellow")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def waiting(message: str, aloud: bool = False) -> Iterator[None]:
    """A spinner and the time that has passed, on stderr and only on a terminal; gone when it is over.

    Args:
        aloud: where there is no terminal, print the message as a line.
    """
    console = stderr()
    if aloud and not console.is_terminal:
        console.print(Text(message), soft_wrap=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(message, total=None)
        yield
