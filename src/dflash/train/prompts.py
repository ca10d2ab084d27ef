"""Prompts to be answered: a JSONL file in the shared form, plain text lines, or a data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import packages
from dflash.errors import RequestError
from dflash.text import is_unicode

MAX_SKIPPED = 0.1
"""Share of malformed rows above which a file is taken for another format."""


@dataclass(frozen=True)
class Conversation:
    """The user's side of a conversation.

    Attributes:
        index: line (from 0) in its source: names it whatever rows are skipped.
        turns: the user's messages, at least one, none empty.
    """

    index: int
    source: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Prompts:
    """What could be read, and why the rest could not."""

    conversations: list[Conversation]
    skipped: dict[str, int]


def read_prompts(data: str | Path, split: str = "train") -> Prompts:
    """Read prompts.

    Args:
        data: a ``.jsonl`` file of objects with ``turns`` (list of user messages), ``messages`` (chat), or ``prompt``;
            any other file, one prompt a line; or the name of a data set with one of these columns.
        split: of a data set.

    Raises:
        RequestError: nothing there, or more than a tenth of the rows are malformed.
    """
    path = Path(str(data)).expanduser()
    if path.is_file():
        rows = _jsonl(path) if path.suffix in (".jsonl", ".json") else _lines(path)
    else:
        rows = _dataset(str(data), split)
    conversations: list[Conversation] = []
    skipped: dict[str, int] = {}
    for index, (turns, source, reason) in enumerate(rows):
        if reason is None:
            conversations.append(Conversation(index, source, turns))
        else:
            skipped[reason] = skipped.get(reason, 0) + 1
    bad = sum(skipped.values())
    if not conversations or bad > MAX_SKIPPED * (bad + len(conversations)):
        reasons = ", ".join(f"{reason} ({count})" for reason, count in skipped.items()) or "it is empty"
        raise RequestError(
            f"{data}: {bad} of {bad + len(conversations)} rows cannot be used: {reasons}. Expected one JSON object a "
            "line with 'turns', 'messages' or 'prompt', or plain text lines"
        )
    return Prompts(conversations, skipped)


def spread(conversations: list[Conversation], count: int | None) -> list[Conversation]:
    """``count`` of them, evenly spread over the whole, so that every source has its share."""
    if count is None or count >= len(conversations):
        return conversations
    return [conversations[i * len(conversations) // count] for i in range(count)]


Row = tuple[tuple[str, ...], str, str | None]
"""Turns, source, and why the row cannot be used."""


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                yield (), "", "an empty line"
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                yield (), "", "not JSON"
                continue
            yield _row(row, path.stem)


def _lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for line in lines:
            text = line.strip()
            yield ((text,), path.stem, None) if text else ((), "", "an empty line")


def _dataset(name: str, split: str) -> Iterator[Row]:
    packages.need(("datasets",), f"to read {name}, which is no file, as the name of a data set")
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise RequestError(f"{name} is no file, and no data set that could be loaded: {error}") from error
    for row in rows:
        yield _row(row, name)


def _row(row: Any, source: str) -> Row:
    if not isinstance(row, dict):
        return (), "", "not an object"
    turns: Any = row.get("turns")
    if turns is None and isinstance(row.get("messages"), list):
        messages = [m for m in row["messages"] if isinstance(m, dict)]
        turns = [m.get("content") for m in messages if m.get("role") == "user"]
    if turns is None:
        turns = [next((row[key] for key in ("prompt", "question", "instruction") if key in row), None)]
    if not isinstance(turns, list) or not turns:
        return (), "", "no user turn"
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        return (), "", "an empty turn, or one that is no text"
    named = str(row.get("source", source))
    if not all(is_unicode(text) for text in (*turns, named)):  # JSON can spell half a pair: "\ud83d"
        return (), "", "text that is not valid Unicode (half a surrogate pair)"
    return tuple(turns), named, None
