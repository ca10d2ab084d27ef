"""One run at a time on one output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import RequestError


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Inside, no other run that asks for this writes the output: two would ruin it.

    The lock is the system's, on a hidden file beside the output, which stays there: a run that was killed holds none.

    Raises:
        RequestError: another run is at work on it.
    """
    import filelock  # here: it takes a while to import

    place = output.expanduser().resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(place.with_name(f".{place.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RequestError(
            f"another run is writing {output}: wait until it has ended, or give another --output"
        ) from error
    try:
        yield
    finally:
        lock.release()
