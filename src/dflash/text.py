"""Between text and tokens: prompts and chat templates in, incremental text and stop strings out."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dflash.errors import RequestError
from dflash.sampling import is_whole

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


def joined(text: str) -> str:
    """Text with halves of surrogate pairs joined; a half without its other one becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_unicode(text: str) -> bool:
    """False if it has half a surrogate pair, which no tokenizer, file or server takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


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
    items = _items(prompt)
    if not items:
        raise RequestError("the prompt is empty: give text, token ids or chat messages")
    if all(isinstance(item, Mapping) for item in items):
        return _encode_messages(tokenizer, items, enable_thinking)
    if all(is_whole(item) for item in items):
        return [int(item) for item in items]
    raise RequestError(_WHAT_A_PROMPT_IS)


_WHAT_A_PROMPT_IS = "the prompt must be one string, one list of token ids, or one list of chat messages"


def _items(prompt: Any) -> list[Any]:
    """The token ids or messages of a prompt that is no string; an outer list of one is taken off."""
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise RequestError("a mapping as prompt must have 'input_ids'; for one chat message pass a list of it")
        prompt = prompt["input_ids"]
    if isinstance(prompt, TokenArray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise RequestError(f"{_WHAT_A_PROMPT_IS}, not {type(prompt).__name__}")
    # NumPy's numbers and a framework's arrays of one element become Python's: True stays a bool and 1.0 a float.
    items = [item.tolist() if type(item) is not int and isinstance(item, TokenArray) else item for item in prompt]
    if len(items) == 1 and isinstance(items[0], (list, tuple)):
        return _items(items[0])
    return items


def _encode_string(tokenizer: Any, text: str) -> list[int]:
    """A rendered chat template already begins with its special tokens: adding them again would give two BOS."""
    if not text:
        raise RequestError("the prompt is empty: give text, token ids or chat messages")
    rendered = any(text.startswith(token) for token in _special_tokens(tokenizer) if token)
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=not rendered)
    except (TypeError, UnicodeError) as error:
        raise RequestError("the prompt is not valid Unicode text (it has half a surrogate pair)") from error
    if not ids:
        raise RequestError("the prompt has no tokens: give some text")
    return ids


def _special_tokens(tokenizer: Any) -> set[str]:
    """Those with a role, and those only marked as special: chat markers are often not declared otherwise."""
    core = _core(tokenizer)
    marked = () if core is None else core.get_added_tokens_decoder().values()
    return {*tokenizer.all_special_tokens, *(token.content for token in marked if token.special)}


def _core(tokenizer: Any) -> Any:
    """What a tokenizer of the ``tokenizers`` library wraps; None for one written in Python or Mistral's own."""
    return getattr(tokenizer, "backend_tokenizer", None)


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
    except (jinja2.TemplateError, *_WHAT_TEMPLATES_RAISE) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"the chat template refuses these messages: {why}") from error
    try:
        ids = _items(encoded)
    except RequestError as error:
        raise RequestError(f"the chat template gives no token ids, but {type(encoded).__name__}") from error
    if not ids or not all(is_whole(token) for token in ids):
        raise RequestError("the chat template gives no token ids for these messages")
    return [int(token) for token in ids]


_WHAT_TEMPLATES_RAISE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Besides jinja's own errors: templates, and tokenizers written in Python, compute with whatever they find."""


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
    core = _core(tokenizer)
    if core is None:
        return
    spec = json.loads(core.to_str())
    if _has_byte_level(spec.get("pre_tokenizer")) and not _has_byte_level(spec.get("decoder")):
        from tokenizers import decoders

        core.decoder = decoders.ByteLevel()


def _has_byte_level(spec: Any) -> bool:
    if not isinstance(spec, dict):
        return False
    parts = [*spec.get("pretokenizers", []), *spec.get("decoders", [])]
    return spec.get("type") == "ByteLevel" or any(_has_byte_level(part) for part in parts)


# --- out --------------------------------------------------------------------------------------------


def text_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """Token ids to text, special tokens left out.

    Byte tokens are read as sentencepiece reads them: a byte that is no part of a character becomes a replacement mark
    by itself. The decoder of ``tokenizers`` makes marks of the whole run of byte tokens that it stands in, so that no
    character of a run would be certain before the run ends. Where all runs are valid UTF-8, the two are the same.
    """
    byte_of = byte_tokens(tokenizer)
    id_of = {byte: token for token, byte in byte_of.items()}
    special = _marked_special(tokenizer) if byte_of else frozenset()

    def decode(ids: list[int]) -> str:
        if byte_of:
            ids = _mended([token for token in ids if token not in special], byte_of, id_of)
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return decode


def byte_tokens(tokenizer: Any) -> dict[int, int]:
    """Ids of the tokens ``<0x00>`` to ``<0xFF>`` -> their bytes; empty where the decoder does not read them so."""
    core = _core(tokenizer)
    if core is None or "ByteFallback" not in str(core.decoder):
        return {}
    ids = {byte: core.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    if any(ids[byte] is None for byte in REPLACEMENT.encode()):
        return {}
    return {token: byte for byte, token in ids.items() if token is not None}


def _marked_special(tokenizer: Any) -> frozenset[int]:
    """They leave no text, and so do not end a run of byte tokens."""
    return frozenset(i for i, token in _core(tokenizer).get_added_tokens_decoder().items() if token.special)


def _mended(ids: list[int], byte_of: dict[int, int], id_of: dict[int, int]) -> list[int]:
    """The same tokens with every run of byte tokens made valid UTF-8."""
    mended: list[int] = []
    for is_run, part in itertools.groupby(ids, key=byte_of.__contains__):
        mended += [id_of[byte] for byte in _valid(bytes(map(byte_of.__getitem__, part)))] if is_run else part
    return mended


def _valid(run: bytes) -> bytes:
    """UTF-8 in which a replacement mark stands for each byte that is no part of a character."""
    return re.sub("[\udc80-\udcff]", REPLACEMENT, run.decode("utf-8", "surrogateescape")).encode()


class Detokenizer:
    """Text of a growing list of tokens, piece by piece; the pieces joined are one decode of all tokens.

    Tokens are decoded in a window that starts a few tokens back, for a token's text may depend on the
    ones before it. A tail that later tokens may still change is held back: the bytes of a character cut
    off. Bytes that never can be completed come out as the decoder prints them.
    """

    _WINDOW = 48  # tokens decoded at most, give or take a block
    _OVERLAP = 8  # tokens of context when the window moves on

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """
        Args:
            decode: of ``text_of``.
        """
        self._decode = decode
        self._ids: list[int] = []  # the window
        self._given = 0  # characters of the window's text already given out

    def add(self, tokens: Sequence[int]) -> str:
        """Take in tokens; return the text that has become final."""
        self._ids += tokens
        text = self._decode(self._ids)
        piece = text[self._given : len(text) - _cut_off(text)]
        self._given += len(piece)
        if len(self._ids) > self._WINDOW:
            self._move(text)
        return piece

    def finish(self) -> str:
        """The text still held back."""
        piece = self._decode(self._ids)[self._given :]
        self._given += len(piece)
        return piece

    def _move(self, text: str) -> None:
        """Start the window later, if the text still held back and a character before it stay the same."""
        held = len(text) - self._given
        context = self._decode(self._ids[-self._OVERLAP :])
        if len(context) > held and context[-held - 1 :] == text[-held - 1 :]:
            del self._ids[: -self._OVERLAP]
            self._given = len(context) - held
        elif not context and self._decode(self._ids[: -self._OVERLAP]) == text:
            del self._ids[-self._OVERLAP :]  # tokens without any text


def _cut_off(text: str) -> int:
    """Length of the tail that more bytes may complete: at most 3, a character being at most 4 bytes."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), 3)


class StopScanner:
    """Finds the first stop string in a stream of text, and holds back what may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop must be a non-empty text or a list of them, not {stop!r}")
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
        # The one that is complete first ends the text, so that it does not matter in what pieces the text came.
        hits = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if hits:
            self.found = True
            before, self._held = self._held[: min(hits)[1]], ""
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
