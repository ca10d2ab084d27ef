"""Between text and tokens: prompts and chat templates in, incremental text and stop strings out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dflash.errors import RequestError

REPLACEMENT = "\ufffd"
"""What a decoder prints for bytes that are no (complete) UTF-8 character."""


@runtime_checkable
class TokenArray(Protocol):
    """A framework's array of token ids."""

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""
        ...


Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any] | TokenArray


# --- in ---------------------------------------------------------------------------------------------


def encode_prompt(tokenizer: Any, prompt: Prompt, *, enable_thinking: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: a string (raw, or a rendered chat template), token ids (list or array, [n] or [1, n]),
            what ``apply_chat_template(tokenize=True)`` returns, or chat messages.
        enable_thinking: handed to the chat template where given.

    Raises:
        RequestError: an empty or malformed prompt, or messages for a tokenizer without a template.
    """
    if isinstance(prompt, str):
        return _encode_string(tokenizer, prompt)
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise RequestError("a mapping as prompt must have 'input_ids'; for one chat message pass a list of it")
        ids = prompt["input_ids"]
    if isinstance(ids, TokenArray):
        ids = ids.tolist()
    items: list[Any] = list(ids)
    if len(items) == 1 and isinstance(items[0], (list, tuple)):
        items = list(items[0])
    if not items:
        raise RequestError("the prompt is empty: give text, token ids or chat messages")
    if all(isinstance(item, Mapping) for item in items):
        return _encode_messages(tokenizer, items, enable_thinking)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return items
    raise RequestError("the prompt must be one string, one list of token ids, or one list of chat messages")


def _encode_string(tokenizer: Any, text: str) -> list[int]:
    """A rendered chat template already begins with its special tokens: adding them again would give two BOS."""
    if not text:
        raise RequestError("the prompt is empty: give text, token ids or chat messages")
    rendered = any(text.startswith(token) for token in tokenizer.all_special_tokens if token)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not rendered)
    if not ids:
        raise RequestError("the prompt has no tokens: give some text")
    return ids


def _encode_messages(tokenizer: Any, messages: Sequence[Message], enable_thinking: bool | None) -> list[int]:
    if not tokenizer.chat_template:
        raise RequestError("this tokenizer has no chat template: pass the prompt as a string or as token ids")
    plain = [plain_message(message) for message in messages]
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    import jinja2

    try:
        encoded = tokenizer.apply_chat_template(
            plain, tokenize=True, add_generation_prompt=True, return_dict=True, **options
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return list(encoded["input_ids"])


def plain_message(message: Message) -> dict[str, Any]:
    """A chat message with its content as one string: text parts joined, null as the empty string.

    Raises:
        RequestError: no role, or a content part that is not text.
    """
    if not isinstance(message.get("role"), str):
        raise RequestError(f"a chat message needs a 'role' (user, assistant, system ...): {dict(message)!r}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise RequestError(f"only text content can be read; this message has a part of type {kind!r}")
        content = "".join(part["text"] for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"the content of a chat message must be text, not {type(content).__name__}")
    return {**message, "content": content}


def repair_decoder(tokenizer: Any) -> None:
    """Give a byte-level tokenizer the byte-level decoder it needs.

    Some converted tokenizers split bytes on the way in but carry a sentencepiece decoder, and would
    print "HelloĠHow". The pre-tokenizer decides (ml-explore/mlx-lm #1041). Changes only the object given.
    """
    if not tokenizer.is_fast:
        return
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    if _has_byte_level(spec.get("pre_tokenizer")) and not _has_byte_level(spec.get("decoder")):
        from tokenizers import decoders

        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()


def _has_byte_level(spec: Any) -> bool:
    if not isinstance(spec, dict):
        return False
    parts = [*spec.get("pretokenizers", []), *spec.get("decoders", [])]
    return spec.get("type") == "ByteLevel" or any(_has_byte_level(part) for part in parts)


# --- out --------------------------------------------------------------------------------------------


class Detokenizer:
    """Text of a growing list of tokens, piece by piece; the pieces joined are one decode of all tokens.

    Tokens are decoded in a window that starts a few tokens back, for a token's text may depend on the
    ones before it. A tail that later bytes may still complete is held back; bytes that never can be
    completed come out as the decoder prints them.
    """

    _WINDOW = 48  # tokens decoded at most, give or take a block
    _OVERLAP = 8  # tokens of context when the window moves on

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window
        self._given = 0  # characters of the window's text already given out

    def add(self, tokens: Sequence[int]) -> str:
        """Take in tokens; return the text that has become final."""
        self._ids += tokens
        text = self._decode(self._ids)
        piece = text[self._given : len(text) - _cut_off(text)]
        self._given += len(piece)
        if len(self._ids) > self._WINDOW and self._given == len(text):
            self._move(text)
        return piece

    def finish(self) -> str:
        """The text still held back."""
        piece = self._decode(self._ids)[self._given :]
        self._given += len(piece)
        return piece

    def _move(self, text: str) -> None:
        """Start the window later, where that leaves the text as it is (not inside a character)."""
        context = self._decode(self._ids[-self._OVERLAP :])
        if context and text.endswith(context):
            self._ids = self._ids[-self._OVERLAP :]
            self._given = len(context)


def _cut_off(text: str) -> int:
    """Length of the tail that more bytes may complete: at most 3, a character being at most 4 bytes."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), 3)


class StopScanner:
    """Finds the first stop string in a stream of text, and holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop strings must be non-empty texts")
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    @property
    def active(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stop)

    def add(self, text: str) -> str:
        """Take in text; return what is certainly before any stop string."""
        self._held += text
        hits = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if hits:
            self.found = True
            before, self._held = self._held[: min(hits)], ""
            return before
        held = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        before, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return before

    def finish(self) -> str:
        """The text held back, when the answer ended without the rest of a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
