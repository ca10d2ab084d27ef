"""Prompts as commands get them: an argument, standard input, a file, or a handful of our own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.cli import console
from dflash.errors import RequestError
from dflash.prompts import Opening, Prompts, read_prompts
from dflash.text import Prompt


@dataclass(frozen=True)
class Question:
    """One prompt and where it comes from.

    Attributes:
        opening: system and developer messages ahead of it.
    """

    source: str
    text: str
    opening: Opening = ()


BUILT_IN = (
    Question("maths", "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost? Think step by step."),
    Question("code", "Write a Python function that returns the n-th Fibonacci number, and explain it briefly."),
    Question("facts", "Name the planets of the solar system in order, with one sentence about each."),
    Question(
        "copying",
        "Correct the spelling of this text and repeat it in full:\n\nThe libary opens at nine. Visiters may borrow "
        "five books for three weeks. Books that are returned late cost ten cents a day.",
    ),
    Question("languages", "Say 'good morning' in German, French, Greek, Russian and Japanese."),
    Question("writing", "Write a short story about a lighthouse keeper who finds a letter in a bottle."),
)
"""Answers of different kinds: some a draft guesses easily, some it does not."""


def given(prompt: str | None) -> str:
    """The prompt of an argument; ``-`` reads standard input, and so does no argument where one is piped in.

    One newline at the end of standard input is dropped: ``echo`` adds it.

    Raises:
        RequestError: no prompt, an empty one, or one that is no UTF-8 text.
    """
    if prompt is None and sys.stdin.isatty():
        raise RequestError("no prompt: give --prompt TEXT, or pipe the text in")
    try:
        if prompt is None or prompt == "-":
            text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        else:
            text = prompt.encode("utf-8").decode("utf-8")  # what was no UTF-8 comes as lone surrogates
    except UnicodeError as error:
        raise RequestError("the prompt is not UTF-8 text") from error
    if not text:
        raise RequestError("the prompt is empty: give --prompt TEXT, or pipe the text in")
    return text


def refuse_chat_options(why: str, system: str | None, enable_thinking: bool | None) -> None:
    """Say that these options need a chat template.

    Raises:
        RequestError: one of them is given.
    """
    for option, value in (("--system", system), ("--enable-thinking", enable_thinking)):
        if value is not None:
            raise RequestError(f"{option} speaks to the chat template, {why}")


def as_messages(
    tokenizer: Any, text: str, system: str | None = None, raw: bool = False, enable_thinking: bool | None = None
) -> Prompt:
    """A user's message where there is a chat template, else the text as it is.

    Raises:
        RequestError: options for a chat template that is not used.
    """
    if raw or not tokenizer.chat_template:
        why = "which --raw leaves out" if raw else "which this tokenizer does not have"
        refuse_chat_options(why, system, enable_thinking)
        return text
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def as_asked(tokenizer: Any, question: Question) -> Prompt:
    """A question as messages, or without a chat template as one text."""
    if not tokenizer.chat_template:
        return "\n\n".join([*(message["content"] for message in question.opening), question.text])
    return [*question.opening, {"role": "user", "content": question.text}]


def read_file(file: Path, limit: int | None = None) -> list[Question]:
    """The first questions of the conversations of a file, and how these open: see ``dflash.prompts.read_prompts``.

    Raises:
        RequestError: as ``read_prompts``.
    """
    read = read_prompts(file, limit=limit)
    tell_skipped(read)
    return [Question(one.source, one.turns[0], one.opening) for one in read.conversations]


def tell_skipped(read: Prompts) -> None:
    """Say which rows were left out, and why."""
    for reason, count in read.skipped.items():
        console.say("skipped", f"{count} rows: {reason}", "bold yellow")
