"""Where an answer ends: stop ids, stop strings, the cap. Applied before anything is committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash.errors import RequestError
from dflash.sampling import is_whole
from dflash.text import Detokenizer, StopScanner


class Output:
    """The answer of one request so far.

    A stop inside the cap wins over the cap; one beyond it is never reached. The tokens include the
    stop id, or the token that completes a stop string; the text includes neither, nor special tokens.

    Attributes:
        tokens: emitted token ids.
        finish_reason: None while running, then "stop" (stop id or stop string) or "length" (cap or context).
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
    ) -> None:
        """
        Args:
            decode: token ids to text, as ``text.text_of`` has it.
            max_tokens: at least 1.
            stop_ids: ids that end the answer, the model's EOS ids among them.
            stop: strings that end the answer, wherever token boundaries fall.

        Raises:
            RequestError: ``max_tokens`` is not a positive whole number, or a stop string is empty.
        """
        if not is_whole(max_tokens) or max_tokens < 1:
            raise RequestError(f"max_tokens must be a whole number of at least 1, not {max_tokens!r}")
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._max_tokens = int(max_tokens)
        self._stop_ids = stop_ids
        self._detokenizer = Detokenizer(decode)
        self._scanner = StopScanner(stop)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._max_tokens - len(self.tokens) if self.finish_reason is None else 0

    def limit(self, max_tokens: int) -> None:
        """Lower the cap, for a target whose context ends earlier."""
        self._max_tokens = min(self._max_tokens, max_tokens)

    def take(self, new: Sequence[int]) -> tuple[list[int], str]:
        """Append what of ``new`` still belongs to the answer; return it, and the text now final."""
        kept: list[int] = []
        pieces: list[str] = []
        # Token by token only where a stop string may end the answer in the middle of a block.
        unread: list[int] = []
        for token in new:
            if self.finish_reason is not None:
                break
            kept.append(token)
            if token in self._stop_ids:
                self.finish_reason = "stop"
                break
            unread.append(token)
            if self._scanner.active:
                pieces.append(self._read(unread))
                unread = []
            if self.finish_reason is None and len(self.tokens) + len(kept) == self._max_tokens:
                self.finish_reason = "length"
        if unread:
            pieces.append(self._read(unread))
        if self.finish_reason is not None:
            pieces.append(self._flush())
        self.tokens += kept
        return kept, "".join(pieces)

    def _read(self, tokens: list[int]) -> str:
        piece = self._scanner.add(self._detokenizer.add(tokens))
        if self._scanner.found:
            self.finish_reason = "stop"
        return piece

    def _flush(self) -> str:
        if self._scanner.found:
            return ""
        rest = self._scanner.add(self._detokenizer.finish())
        if self._scanner.found:
            self.finish_reason = "stop"
            return rest
        return rest + self._scanner.finish()
