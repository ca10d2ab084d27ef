"""What the decode loop needs of a backend and of a drafter, and the values that pass between them.

The loop (``decode.py``) imports neither torch nor mlx: arrays are opaque to it. It only moves
them from the one that made them to the one that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dflash.sampling import SamplingParams

Array: TypeAlias = Any
"""A backend's array: ``torch.Tensor`` or ``mlx.core.array``."""


@dataclass(frozen=True)
class Features:
    """Tapped hidden states of positions the target has committed.

    Attributes:
        values: [rows, T, taps * hidden_size] in the target's dtype, or None when nothing is tapped.
        counts: how many of the T positions are real, per row; the rest is padding.
    """

    values: Array | None
    counts: list[int]


@dataclass(frozen=True)
class Proposal:
    """The tokens a drafter proposes after the pending one.

    Attributes:
        tokens: [rows, K] whole numbers, a backend array or lists. K = 0 proposes nothing.
        width: K.
        q: [rows, K, vocab] float32, the distribution each token was really drawn from;
            None when the tokens are not random (argmax, n-grams): then q is one-hot.
    """

    tokens: Array | list[list[int]]
    width: int
    q: Array | None = None


NOTHING = Proposal(tokens=[], width=0)
"""Plain decoding, and the prefill: a round that proposes nothing."""


@dataclass(frozen=True)
class Verdict:
    """What the target makes of a proposal, per row.

    Attributes:
        tokens: the accepted tokens and one of the target's own: replacement or bonus.
        accepted: how many of them the drafter had right; ``len(tokens) - 1``.
    """

    tokens: list[list[int]]
    accepted: list[int]


class Round(Protocol):
    """One target forward over ``[pending, proposal]``; the cache is ahead until ``keep``."""

    scores: Array
    """[rows, 1 + K, vocab]: what follows the pending token and each proposed one."""

    def keep(self, counts: list[int]) -> Features:
        """Roll every cache back to the first ``counts[r]`` positions of row r's block.

        Returns the tapped hidden states of the kept positions.
        """
        ...


class Session(Protocol):
    """The target's caches for some rows. Between rounds they hold every committed token but the pending one."""

    @property
    def lengths(self) -> list[int]:
        """Tokens in the cache, per row."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], absorb: Callable[[list[list[int]], Features], None]) -> Array:
        """Read the prompts in chunks; hand each chunk's tokens and features to ``absorb``.

        Returns the scores after each row's last token, [rows, 1, vocab].
        """
        ...

    def verify(self, pending: list[int], proposal: Proposal) -> AbstractContextManager[Round]:
        """Run the block. Leaving the context without ``keep`` restores the caches."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        ...


class Verifier(Protocol):
    """Decides, for rows of one batch, which proposed tokens stand. Holds their generators and histories."""

    def __call__(self, proposal: Proposal, scores: Array) -> Verdict:
        """The only host sync of a round."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        ...


@runtime_checkable
class Target(Protocol):
    """A loaded target model. Also unpacks as ``model, tokenizer``."""

    name: str
    backend: str
    device: Any
    model: Any
    tokenizer: Any
    vocab_size: int
    num_layers: int
    hidden_size: int
    context_length: int | None
    eos_ids: frozenset[int]

    @property
    def dtype(self) -> str:
        """What its layers compute in: "float32", "bfloat16" ..."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """The target itself, then its tokenizer: ``model, tokenizer = load(...)``."""
        ...

    def start(self, rows: int, taps: Sequence[int], step: int, chunk: int) -> Session:
        """Empty caches for ``rows`` rows.

        Args:
            taps: ids of the layers whose outputs the drafter reads.
            step: the largest block that will be verified.
            chunk: how many prompt tokens one prefill forward reads.
        """
        ...

    def verifier(
        self, sampling: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], verification: str
    ) -> Verifier:
        """``verification`` is ``"match"`` or ``"rejection"``."""
        ...

    def peak_memory(self) -> float:
        """Peak memory of the device (of the process on CPU), in GB."""
        ...


class Drafting(Protocol):
    """A drafter at work on the rows of one batch. It knows exactly the tokens the target's cache holds."""

    def extend(self, tokens: list[list[int]], features: Features) -> None:
        """Take in newly committed tokens, ``features.counts[r]`` of them in row r."""
        ...

    def propose(self, pending: list[int], room: int) -> Proposal:
        """At most ``room`` tokens to follow ``pending``."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Something that proposes blocks: a DFlash draft, prompt lookup, nothing at all."""

    @property
    def block_size(self) -> int:
        """Default block: the pending token and ``block_size - 1`` proposals."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Ids of the target layers it reads; empty when it reads tokens only."""
        ...

    def start(self, target: Target, sampling: Sequence[SamplingParams], verification: str, step: int) -> Drafting:
        """Begin work for rows with these sampling parameters.

        Args:
            step: the largest number of positions one ``extend`` or ``propose`` handles.

        Raises:
            IncompatibleDraft: this drafter was made for another target.
        """
        ...
