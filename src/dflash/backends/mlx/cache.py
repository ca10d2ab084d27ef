"""The target's cache on MLX: rows of different lengths, and how each kind of layer forgets.

The same scheme as on PyTorch: a slot knows the position it holds, and a mask is a comparison of positions.
The model's own code runs unchanged; it is handed these objects in place of mlx-lm's caches, whose calls
(``offset``, ``update_and_fetch``, ``make_mask``) they answer.

- Attention: the slot of position p is p; forgetting lowers the row's length and copies nothing.
- Sliding window: a ring with room for a block beyond the window, so that what a block overwrites is out of
  every later query's sight. mlx-lm's own rotating cache cannot be trimmed once it has wrapped; this one needs
  no trimming.
- Recurrent (GatedDeltaNet, Mamba-2, short convolution): the states before a block are kept by reference,
  verification records what the module read, and ``keep`` runs the module's own code over the kept prefix.

What outlives a round is set going before the round ends (``async_eval``): the next one may run in another thread, and
what one thread leaves unevaluated, another has no stream for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from dflash.errors import UnsupportedTarget

GROWTH = 256
"""Slots added at a time to a full-attention layer."""


class Rows:
    """The lengths of the rows of one cache, shared by its layers."""

    def __init__(self, count: int) -> None:
        self.lengths = [0] * count

    @property
    def uniform(self) -> bool:
        """Whether all rows are equally long."""
        return min(self.lengths) == max(self.lengths)

    def advance(self, counts: list[int]) -> None:
        """Commit ``counts[r]`` more tokens of row r."""
        self.lengths[:] = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def starts(self) -> mx.array:
        """[rows, 1] int32: the position of each row's next token."""
        return mx.array(self.lengths)[:, None]

    def positions(self, width: int) -> mx.array:
        """[rows, width] int32: the positions of each row's next tokens."""
        return self.starts() + mx.arange(width)

    @property
    def offset(self) -> int | mx.array:
        """Where a block begins, in the form that rotary positions take: one number, or one for each row."""
        return self.lengths[0] if self.uniform else mx.array(self.lengths)


class AttentionCache:
    """Keys and values [rows, heads, slots, dim] of one layer; position p sits in slot ``p % slots``.

    Without a window the slots grow and never wrap. With one they are a ring of window - 1 + step.
    """

    def __init__(self, rows: Rows, window: int | None = None, step: int = 0) -> None:
        self.rows = rows
        self.window = window
        self.ring = None if window is None else window - 1 + step
        self._keys: tuple[mx.array, ...] = ()
        self._values: tuple[mx.array, ...] = ()

    # --- what a model calls

    @property
    def offset(self) -> int | mx.array:
        """Where the running block begins; it moves only when the block is kept."""
        return self.rows.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write a block [rows, heads, T, dim] behind each row's length; return all slots a query may look at."""
        width = keys.shape[2]
        used = self.slots(width)
        self._keys = self._write(self._keys, self.packed(keys), used)
        self._values = self._write(self._values, self.packed(values), used)
        seen = [tuple(part[:, :, :used] for part in store) for store in (self._keys, self._values)]
        return self.unpacked(seen[0]), self.unpacked(seen[1])

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """What each query of a block of N sees: None for all slots, "causal", or bool [rows, 1, N, slots].

        Args:
            window_size: a window that the model itself applies to a cache without one.
        """
        window = window_size if self.window is None else self.window
        end = max(self.rows.lengths) + N
        if self.rows.uniform and (window is None or end <= window) and not return_array:
            return None if N == 1 else "causal"
        return self.visible(N, window)[:, None]

    # --- what a session and a draft call

    def packed(self, x: mx.array) -> tuple[mx.array, ...]:
        """Keys or values as they are stored."""
        return (x,)

    def unpacked(self, parts: tuple[mx.array, ...]) -> Any:
        """What is stored, as attention takes it."""
        return parts[0]

    def slots(self, width: int) -> int:
        """Slots in use once a block of this width is written."""
        end = max(self.rows.lengths) + width
        return end if self.ring is None else min(end, self.ring)

    def slot_positions(self, width: int) -> mx.array:
        """[rows or 1, slots]: the position in each slot once a block is written; negative where there is none."""
        slots = mx.arange(self.slots(width))[None]
        if self.ring is None:
            return slots
        last = self.rows.starts() + (width - 1)
        return last - (last - slots) % self.ring

    def visible(self, width: int, window: int | None) -> mx.array:
        """Bool [rows, width, slots]: which slots each query of a causal block looks at."""
        key = self.slot_positions(width)[:, None]
        query = self.rows.positions(width)[:, :, None]
        seen = (key >= 0) & (key <= query)
        return seen if window is None else seen & (query - key < window)

    def committed(self, row: int) -> tuple[Any, Any]:
        """Keys and values of the committed positions still in sight, oldest first."""
        length = self.rows.lengths[row]
        first = 0 if self.window is None else max(0, length - self.window + 1)
        slots = mx.arange(first, length) % self._keys[0].shape[2]
        keys, values = (tuple(part[row][:, slots] for part in store) for store in (self._keys, self._values))
        return self.unpacked(keys), self.unpacked(values)

    @property
    def arrays(self) -> list[mx.array]:
        """All that is stored."""
        return [*self._keys, *self._values]

    def cleanse(self) -> None:
        """Zeros for what is not finite: a masked NaN would still poison the softmax's sum."""
        for store in (*self._keys, *self._values):
            store[:] = mx.where(mx.isfinite(store), store, 0).astype(store.dtype)

    def select(self, rows: mx.array) -> None:
        """Keep only these rows."""
        self._keys = tuple(part[rows] for part in self._keys)
        self._values = tuple(part[rows] for part in self._values)
        mx.async_eval(self.arrays)

    def _write(self, store: tuple[mx.array, ...], new: tuple[mx.array, ...], used: int) -> tuple[mx.array, ...]:
        store = store or tuple(mx.zeros((*part.shape[:2], 0, part.shape[3]), part.dtype) for part in new)
        if (have := store[0].shape[2]) < used:
            # Zeros, not garbage: a masked NaN would still poison the softmax's sum.
            size = self.ring or max(used + GROWTH - used % GROWTH, have + have // 2)
            store = tuple(
                mx.concatenate([old, mx.zeros((*old.shape[:2], size - have, old.shape[3]), old.dtype)], axis=2)
                for old in store
            )
        for old, part in zip(store, new, strict=True):
            self._put(old, part)
        return store

    def _put(self, store: mx.array, new: mx.array) -> None:
        """Write a block into ``store`` itself; slices while all rows are at one place, which need no index."""
        width, size = new.shape[2], store.shape[2]
        if not self.rows.uniform:
            slots = (self.rows.positions(width) % size)[:, None, :, None]
            store[:] = mx.put_along_axis(store, slots, new.astype(store.dtype), axis=2)
            return
        start = self.rows.lengths[0] % size
        before = min(width, size - start)
        store[:, :, start : start + before] = new[:, :, :before]
        if before < width:  # around the end of the ring
            store[:, :, : width - before] = new[:, :, before:]


class QuantizedAttentionCache(AttentionCache):
    """Keys and values quantized along their last axis, each token by itself, as mlx-lm's quantized cache does it.

    So an answer does not depend on how its tokens came in blocks.
    """

    def __init__(self, rows: Rows, bits: int, group_size: int) -> None:
        super().__init__(rows)
        self.bits = bits
        self.group_size = group_size

    def packed(self, x: mx.array) -> tuple[mx.array, ...]:
        """Codes, scales and biases."""
        codes, scales, biases = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        return codes, scales, biases

    def unpacked(self, parts: tuple[mx.array, ...]) -> Any:
        """mlx-lm's attention multiplies by the codes as they are."""
        return parts


class RecurrentCache(ArraysCache):  # type: ignore[misc]
    """States of a recurrent module of one row, replaced and never written in place."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.recording = False
        self._replay: Callable[[int], None] | None = None
        self._before: list[Any] = []

    def recorded(self, replay: Callable[[int], None]) -> None:
        """Take from a module that has just read a block how to read its first n positions again."""
        self._replay = replay

    def mark(self) -> None:
        """Hold on to the states, and record what comes."""
        self._before = list(self.cache)
        self.recording, self._replay = True, None

    def restore(self) -> None:
        """Back to the mark."""
        self.cache = list(self._before)
        self.recording, self._replay = False, None

    def keep(self, count: int, width: int) -> None:
        """From the states after ``width`` positions to those after the first ``count`` of them."""
        replay = self._replay
        if replay is None:
            raise UnsupportedTarget("a recurrent layer read a block without being recorded: its state cannot be kept")
        if count == width:
            self.recording, self._replay = False, None
            return
        self.restore()
        if count:
            replay(count)


class PairCache:
    """The caches of a layer with several parts (Falcon-H1)."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __getitem__(self, index: int) -> Any:
        return self.parts[index]


class RollbackCache:
    """All caches of one session, and what a running forward leaves for it.

    Attributes:
        layers: what the model is handed.
        tapped: layer id -> output [rows, T, hidden] of the last forward.
        scored: which positions the running forward scores: indices [rows, n], or None for all.
    """

    def __init__(self, layers: list[Any], rows: Rows) -> None:
        self.rows = rows
        self.layers = layers
        self.tapped: dict[int, mx.array] = {}
        self.scored: mx.array | None = None
        flat = [part for layer in layers for part in (layer.parts if isinstance(layer, PairCache) else [layer])]
        self.attention = [part for part in flat if isinstance(part, AttentionCache)]
        self.recurrent = [part for part in flat if isinstance(part, RecurrentCache)]

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that is kept between forwards."""
        states = [state for layer in self.recurrent for state in layer.cache if state is not None]
        return [array for layer in self.attention for array in layer.arrays] + states

    def mark(self) -> None:
        """Before a block."""
        for layer in self.recurrent:
            layer.mark()

    def keep(self, counts: list[int], width: int) -> None:
        """After a block of ``width``: each row keeps its first ``counts[r]`` positions."""
        for layer in self.recurrent:
            layer.keep(counts[0], width)
        self.rows.advance(counts)

    def restore(self) -> None:
        """Forget the block: attention slots behind the length are already out of sight, but for NaN in them."""
        for layer in self.recurrent:
            layer.restore()
        for held in self.attention:
            held.cleanse()
        self.tapped.clear()

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        index = mx.array(rows)
        for layer in self.attention:
            layer.select(index)
        self.rows.lengths[:] = [self.rows.lengths[row] for row in rows]
