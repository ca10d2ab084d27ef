"""Prompts to be answered: what a row of a file or of a data set asks, and how it opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dflash.errors import RequestError
from dflash.prompt_files import MAX_SKIPPED, Row, rows, source_of
from dflash.text import is_unicode, plain_message

Opening: TypeAlias = tuple[dict[str, str], ...]
"""Chat messages ahead of the first question, each with a ``role`` (system or developer) and a ``content``."""

CHATS = ("turns", "messages", "conversations", "conversation", "prompt")
QUESTIONS = ("prompt", "question", "instruction")
MATERIAL = ("input", "context")
"""What follows a question after a blank line, in this order, where a row has it."""
SYSTEM = ("system", "system_prompt")
NOT_CARRIED = (
    "tools", "functions", "history", "documents", "attachments", "files", "images", "image", "audios", "audio",
    "videos", "video",
)  # fmt: skip
"""What a prompt as served would have in it, beside its messages or in one, and an answer made without would not fit:
such rows are skipped."""

ROLES = {
    "user": "user", "human": "user", "system": "system", "developer": "developer",
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_call", "tool_call", "tool_response", "observation"), "tool"),
}  # fmt: skip
"""Ours for those of chat messages and of ShareGPT."""


@dataclass(frozen=True)
class Conversation:
    """One side of a conversation: all but the answers, which are the target's own.

    Attributes:
        index: line (from 0) in its source: names it whatever rows are skipped.
        turns: the user's messages, at least one, none empty.
        opening: system and developer messages ahead of them.
    """

    index: int
    source: str
    turns: tuple[str, ...]
    opening: Opening = ()


@dataclass(frozen=True)
class Prompts:
    """What could be read, and why the rest could not.

    Attributes:
        skipped: reason -> number of rows.
    """

    conversations: list[Conversation]
    skipped: dict[str, int]


def read_prompts(data: str | Path, split: str = "train", limit: int | None = None) -> Prompts:
    """Read prompts. Every command that takes a file of them reads it here.

    A row is an object with one of these, the first that it has:

    - ``turns``: the user's messages, a list of texts
    - ``messages``, or as ShareGPT has it ``conversations``: a chat, of objects with ``role`` and ``content`` or with
      ``from`` and ``value``
    - ``prompt``, ``question`` or ``instruction``: a text; a ``prompt`` may be any of the lists above

    System and developer messages that open a chat are kept, and so is a ``system`` or ``system_prompt`` beside it.
    ``input`` and ``context`` follow the question, each after a blank line. Answers in a chat are left out: the target
    answers every turn itself. Rows with tools, tool calls or tool results, or with a system message after the first
    question, or with images, documents or other attachments, are skipped and counted.

    Args:
        data: a file (JSON, text lines, csv, tsv, any of these with gzip, parquet, arrow), or the name of a data set.
        split: of a data set.
        limit: read no further than this many conversations.

    Raises:
        RequestError: nothing there, no file of prompts, or more than a tenth of the rows cannot be used.
    """
    conversations: list[Conversation] = []
    reasons: dict[str, list[str]] = {}
    source = source_of(data)
    for row in rows(data, split):
        try:
            conversations.append(_conversation(row, source))
        except RequestError as error:
            reasons.setdefault(str(error), []).append(row.where)
        if len(conversations) == limit:
            break
    bad = sum(map(len, reasons.values()))
    if not conversations and not bad:
        raise RequestError(f"{data} has no prompts: it is empty")
    if not conversations or bad > MAX_SKIPPED * (bad + len(conversations)):
        most = sorted(reasons.items(), key=lambda one: -len(one[1]))[:TOLD]
        told = "; ".join(f"{reason} ({len(at)}, first in {at[0]})" for reason, at in most)
        raise RequestError(
            f"{data}: {bad} of {bad + len(conversations)} rows cannot be used: {told}. Expected objects with 'turns', "
            "'messages', 'conversations' or 'prompt', or plain text lines"
        )
    return Prompts(conversations, {reason: len(at) for reason, at in reasons.items()})


def spread(conversations: list[Conversation], count: int | None) -> list[Conversation]:
    """``count`` of them, evenly spread over the whole, so that every source has its share."""
    if count is None or count >= len(conversations):
        return conversations
    return [conversations[i * len(conversations) // count] for i in range(count)]


# --- rows: a RequestError is the reason why one cannot be used ------------------------------------------


def _conversation(found: Row, source: str) -> Conversation:
    row = found.value
    if found.fault:
        raise RequestError(found.fault)
    if not isinstance(row, dict):
        raise RequestError("not an object")
    if not any(key in row for key in (*CHATS, *QUESTIONS)):
        has = ", ".join(repr(str(key)[:LONGEST_NAME]) for key in list(row)[:TOLD]) or "none"
        raise RequestError(f"none of the fields {', '.join((*CHATS, *QUESTIONS[1:]))}; it has {has}{found.hint}")
    _check_carried(row)
    opening: list[dict[str, str]] = []
    turns: list[str] = []
    for message in map(_message, _chat(row)):
        if message["role"] == "user":
            turns.append(message["content"])
        elif message["role"] in ("system", "developer"):
            if turns:
                raise RequestError("a system or developer message after the first question")
            opening.append(message)
    system = next((row[key] for key in SYSTEM if row.get(key) not in (None, "")), None)
    if system is not None and not any(message["role"] == "system" for message in opening):
        opening.insert(0, _message({"role": "system", "content": system}))
    if not turns:
        raise RequestError("no user turn")
    if not all(turn.strip() for turn in turns):
        raise RequestError(_NO_TEXT)
    named = source if row.get("source") is None else str(row["source"])
    # JSON can spell half a pair: "\ud83d"
    if not all(is_unicode(text) for text in (*turns, named, *(message["content"] for message in opening))):
        raise RequestError("text that is not valid Unicode (half a surrogate pair)")
    return Conversation(found.index, named, tuple(turns), tuple(opening))


_NO_TEXT = "an empty turn, or one that is no text"

TOLD = 6
"""Reasons, and names of fields, that are told at most."""

LONGEST_NAME = 40
"""Characters of a field's name that are told."""


def _check_carried(item: dict[str, Any]) -> None:
    for key in NOT_CARRIED:
        if item.get(key) not in (None, "", "[]", [], {}):
            raise RequestError(f"'{key}', which cannot be handed on to the target")


def _chat(row: dict[str, Any]) -> list[Any]:
    """The messages of a row: texts of the user, or objects."""
    turns = row.get("turns")
    if turns is not None and not isinstance(turns, list):
        raise RequestError("no user turn")
    chat = next((row[key] for key in CHATS if isinstance(row.get(key), list)), None)
    if chat is not None:
        return list(chat)
    question = next((row[key] for key in QUESTIONS if row.get(key) is not None), None)
    parts = [question, *(row[key] for key in MATERIAL if row.get(key) is not None)]
    if question is None or not all(isinstance(part, str) for part in parts):
        raise RequestError(_NO_TEXT)
    return ["\n\n".join(part for part in parts if part.strip())]


def _message(item: Any) -> dict[str, str]:
    """A chat message in our terms."""
    if isinstance(item, str):
        return {"role": "user", "content": item}
    if not isinstance(item, dict):
        raise RequestError(_NO_TEXT)
    _check_carried(item)
    said = item.get("from") if item.get("role") is None else item["role"]
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role == "tool" or any(item.get(key) for key in ("tool_calls", "function_call")):
        raise RequestError("tool calls or tool results, which cannot be handed on to the target")
    if role is None:
        raise RequestError("a message with a role that is not known")
    if role == "assistant":
        return {"role": role, "content": ""}  # the target's own answer takes its place
    text = item.get("value") if item.get("content") is None else item["content"]
    content: str = plain_message({"role": role, "content": text})["content"]
    return {"role": role, "content": content}
