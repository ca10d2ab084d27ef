"""Progress of long work, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash.cli import console

LINE_EVERY = 30.0
"""Seconds between lines where there is no terminal."""


class Meter:
    """Shows how far a piece of work is, with figures of its own."""

    def __init__(self, bar: Progress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None, figures="")
        self._title = title
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int, figures: str = "") -> None:
        """So much of the whole is done. The time left counts what was done in this run only."""
        self._first = done if self._first is None else self._first
        self._bar.update(self._task, completed=done, total=total, figures=figures)
        now = time.monotonic()
        if self._bar.disable and (now - self._said > LINE_EVERY or done == total):
            self._said = now
            fresh = done - self._first
            left = f", {(total - done) * (now - self._began) / fresh / 60:.0f} min left" if fresh else ""
            console.stderr().print(f"{self._title}: {done} of {total}{left}  {figures}", soft_wrap=True)


@contextmanager
def meter(title: str) -> Iterator[Meter]:
    """A meter for one piece of work."""
    shown = console.stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=shown, disable=not shown.is_terminal) as bar:
        yield Meter(bar, title)
