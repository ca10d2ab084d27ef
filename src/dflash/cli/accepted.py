"""Showing which part of an answer the draft had right."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console

from dflash.cli import console
from dflash.generate import Response
from dflash.text import Detokenizer, text_of

BRACKETS = ("⟦", "⟧")
ASCII_BRACKETS = ("[", "]")


@dataclass(frozen=True)
class Piece:
    """Text of one origin: drafted and accepted, or the target's own."""

    text: str
    drafted: bool


class Splitter:
    """Splits the text of responses by origin.

    A response's text may lag behind its tokens (a half character, the possible start of a stop
    string), so every token's characters are counted and queued. A character that several tokens
    make up is the one's that completes it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(text_of(tokenizer))
        self._queue: deque[tuple[int, bool]] = deque()  # characters not yet in any response, and their origin
        self._newest = False  # origin of the newest token: of what the detokenizer still holds back

    def split(self, response: Response) -> list[Piece]:
        """The pieces of a response's text, in order; neighbours are of different origin."""
        for i, token in enumerate(response.tokens):
            self._newest = i < response.accepted
            self._queue.append((len(self._detokenizer.add([token])), self._newest))
        pieces: list[Piece] = []
        text = response.text
        while text:
            count, drafted = self._queue.popleft() if self._queue else (len(text), self._newest)
            if count > len(text):
                self._queue.appendleft((count - len(text), drafted))
            part, text = text[:count], text[count:]
            if pieces and pieces[-1].drafted == drafted:
                part = pieces.pop().text + part
            if part:
                pieces.append(Piece(part, drafted))
        return pieces


class Painter:
    """Marks drafted text: green where the stream shows colours, else in brackets."""

    def __init__(self, out: Console) -> None:
        self._colour = console.coloured(out)
        self._open, self._close = BRACKETS if console.prints_unicode(out) else ASCII_BRACKETS

    def paint(self, pieces: Iterable[Piece]) -> str:
        """The text to print."""
        return "".join(self._mark(piece.text) if piece.drafted else piece.text for piece in pieces)

    def legend(self, accepted: int, tokens: int) -> str:
        """What the marks mean, and how many of the tokens bear them."""
        return f"{self._mark('drafted and accepted')}: {accepted} of {tokens} tokens; the others are the target's own"

    def _mark(self, text: str) -> str:
        return typer.style(text, fg=typer.colors.GREEN) if self._colour else f"{self._open}{text}{self._close}"
