"""Progress of long work, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash.cli import console

FIRST_WAIT, LONGEST_WAIT = 2.0, 30.0
"""Seconds between lines where there is no terminal: the first line comes at once, then each wait is twice the last."""


class Meter:
    """Shows how far a piece of work is, with figures of its own."""

    def __init__(self, bar: Progress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None, figures="")
        self._title = title
        self._began = 0.0
        self._first: int | None = None
        self._next, self._wait = 0.0, FIRST_WAIT

    def __call__(self, done: int, total: int, figures: str = "") -> None:
        """So much of the whole is done. The time left counts what was done in this run only."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = done, now
        self._bar.update(self._task, completed=done, total=total, figures=figures)
        if self._bar.disable and (now >= self._next or done == total):
            self._next, self._wait = now + self._wait, min(2 * self._wait, LONGEST_WAIT)
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
