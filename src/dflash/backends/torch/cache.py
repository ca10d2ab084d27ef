"""The target's cache: rows of different lengths, and how each kind of layer forgets.

Every row of a batch is at its own length. A layer's slot knows the position it holds, and a
mask is a comparison of positions; so a rejected token, the padding of a shorter prompt and a row
that is already done are one and the same thing: a slot whose position is not (yet) the row's.

- Attention: the slot of position p is p; forgetting lowers the row's length and copies nothing.
- Sliding window: a ring with room for a block beyond the window, so that what a block overwrites
  is out of every later query's sight; forgetting is again only the length.
- Recurrent (GatedDeltaNet, Mamba-2, short convolution): the state mixes tokens for good. ``mark``
  holds on to the state before a block, verification records the block's projected inputs, and
  ``keep`` runs the module's own code once more over the kept prefix of them.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from dflash.backends.torch.architectures import (
    CHUNKED,
    CONV,
    DUMMY,
    FULL,
    HYBRID,
    LINEAR,
    SLIDING,
    Anatomy,
    Mixer,
    seams,
)
from dflash.errors import UnsupportedTarget

GROWTH = 256
"""Slots added at a time to a full-attention layer."""


class Rows:
    """The lengths of the rows of one cache, shared by its layers."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.lengths = [0] * count
        self.device = device

    @property
    def uniform(self) -> bool:
        """Whether all rows are equally long."""
        return min(self.lengths) == max(self.lengths)

    def advance(self, counts: list[int]) -> None:
        """Commit ``counts[r]`` more tokens of row r."""
        self.lengths[:] = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def starts(self) -> Tensor:
        """[rows, 1]: the position of each row's next token."""
        return torch.tensor(self.lengths, device=self.device)[:, None]

    def positions(self, width: int) -> Tensor:
        """[rows, width]: the positions of each row's next tokens."""
        return self.starts() + torch.arange(width, device=self.device)


class AttentionLayer(CacheLayerMixin):
    """Keys and values [rows, heads, slots, dim] of one layer; position p sits in slot ``p % slots``.

    Without a window the slots grow and never wrap. With one they are a ring of window - 1 + step.
    """

    is_sliding = False

    def __init__(self, rows: Rows, window: int | None = None, step: int = 0) -> None:
        super().__init__()
        self.rows = rows
        self.window = window
        self.ring = None if window is None else window - 1 + step

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate no slots yet."""
        self.keys = key_states[:, :, :0].clone()
        self.values = value_states[:, :, :0].clone()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a block behind each row's length; return all slots a query may look at.

        The length itself moves only when the block is kept.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        width = key_states.shape[2]
        used = self.slots(width)
        self._reserve(used)
        assert self.keys is not None and self.values is not None
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            self._write(store, new, width)
        return self.keys[:, :, :used], self.values[:, :, :used]

    def slots(self, width: int) -> int:
        """Slots in use once a block of this width is written."""
        end = max(self.rows.lengths) + width
        return end if self.ring is None else min(end, self.ring)

    def _write(self, store: Tensor, new: Tensor, width: int) -> None:
        start = self.rows.lengths[0]
        if self.rows.uniform and start + width <= store.shape[2]:
            store[:, :, start : start + width] = new
            return
        slots = self.rows.positions(width) % store.shape[2]
        if self.rows.uniform:
            store.index_copy_(2, slots[0], new)
        else:
            store[torch.arange(len(slots), device=store.device)[:, None], :, slots] = new.transpose(1, 2)

    def _reserve(self, slots: int) -> None:
        """Room for ``slots``. Zeros, not garbage: a masked NaN would still poison the softmax's sum."""
        assert self.keys is not None and self.values is not None
        have = self.keys.shape[2]
        if slots <= have:
            return
        size = self.ring or max(slots + GROWTH - slots % GROWTH, have + have // 2)
        self.keys, self.values = (
            torch.cat([old, old.new_zeros(*old.shape[:2], size - have, old.shape[3])], dim=2)
            for old in (self.keys, self.values)
        )

    def slot_positions(self, width: int) -> Tensor:
        """[rows or 1, slots]: the position in each slot once a block is written; negative where there is none."""
        used = self.slots(width)
        slots = torch.arange(used, device=self.rows.device)[None]
        if self.ring is None:
            return slots
        last = self.rows.starts() + width - 1
        return last - (last - slots) % self.ring

    def visible(self, width: int) -> Tensor:
        """Bool [rows, width, slots]: which slots each query of a causal block looks at."""
        key = self.slot_positions(width)[:, None]
        query = self.rows.positions(width)[:, :, None]
        seen = (key >= 0) & (key <= query)
        return seen if self.window is None else seen & (query - key < self.window)

    def committed(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, n, dim] of the committed positions still in sight, oldest first."""
        assert self.keys is not None and self.values is not None
        length = self.rows.lengths[row]
        first = 0 if self.window is None else max(0, length - self.window + 1)
        slots = torch.arange(first, length, device=self.rows.device) % self.keys.shape[2]
        return self.keys[row, :, slots], self.values[row, :, slots]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The session makes the masks itself; this is only for the library's bookkeeping."""
        return self.slots(query_length), 0

    def get_seq_length(self) -> int:
        """Length of the longest row."""
        return max(self.rows.lengths)

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    @torch.inference_mode()
    def cleanse(self) -> None:
        """Zeros for what is not finite: a masked NaN would still poison the softmax's sum."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            for store in (self.keys, self.values):
                store.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = self.keys[rows], self.values[rows]


class ChunkedLayer(AttentionLayer):
    """Looks back to the beginning of its chunk of the text only (Llama 4). All slots are kept, none is reused."""

    def __init__(self, rows: Rows, chunk: int) -> None:
        super().__init__(rows)
        self.chunk = chunk

    def visible(self, width: int) -> Tensor:
        """Bool [rows, width, slots], as ``AttentionLayer.visible``."""
        key = self.slot_positions(width)[:, None]
        query = self.rows.positions(width)[:, :, None]
        return super().visible(width) & (key // self.chunk == query // self.chunk)


class RecurrentLayer(LinearAttentionLayer):
    """States of a recurrent module of one row, replaced and never written in place.

    ``record_past`` makes the modules of transformers go through ``update_conv_state`` always, instead
    of updating the convolution's window in place for single tokens.
    """

    def __init__(self, mixer: nn.Module, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.conv_states: dict[int, Any]
        self.recurrent_states: dict[int, Any]
        self.has_previous_state: dict[int, bool]
        self.record_past = True
        self.mixer = mixer
        self.recorded: dict[str, Tensor] | None = None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Slide the window over ``conv_states`` [1, channels, T]; return old window and new inputs together."""
        if conv_kernel_size is None:
            raise UnsupportedTarget(f"{type(self.mixer).__name__} does not say how wide its convolution is")
        old = self.conv_states[state_idx]
        full = conv_states if old is None else torch.cat([old, conv_states], dim=-1)
        self.conv_states[state_idx] = full[..., -conv_kernel_size:]
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Replace the state."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return recurrent_states

    def mark(self) -> None:
        """Hold on to the state, and record the inputs of what comes."""
        self._before = self._states()
        self.recorded = {}

    def restore(self) -> None:
        """Back to the mark, which stays as it is: a replay that fails half-way comes back to it once more."""
        conv, recurrent, previous = self._before
        self.conv_states, self.recurrent_states, self.has_previous_state = dict(conv), dict(recurrent), dict(previous)
        self.recorded = None

    def _states(self) -> tuple[dict[int, Any], dict[int, Any], dict[int, bool]]:
        """References suffice: a state is replaced, never written in place."""
        return dict(self.conv_states), dict(self.recurrent_states), dict(self.has_previous_state)

    def keep(self, count: int, width: int, cache: RollbackCache) -> None:
        """From the state after ``width`` positions to the one after the first ``count`` of them."""
        recorded, self.recorded = self.recorded, None
        if recorded is None:
            raise UnsupportedTarget("a recurrent layer read a block without being recorded: its state cannot be kept")
        if count == width:
            return
        self.restore()
        if count:
            _replay(self.mixer, seams(self.mixer), {k: v[:, :count] for k, v in recorded.items()}, cache)


class HybridLayer(RecurrentLayer, AttentionLayer):
    """A layer with both (Falcon-H1)."""

    def __init__(self, rows: Rows, mixer: nn.Module, number_of_states: int = 1) -> None:
        AttentionLayer.__init__(self, rows)
        RecurrentLayer.__init__(self, mixer, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Only the attention half is set up lazily."""
        AttentionLayer.lazy_initialization(self, *args)

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1


class _Recall(nn.Module):
    """Stands in for an input projection: gives what it gave before."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: Tensor) -> Tensor:
        return self.output


def _replay(mixer: nn.Module, seam: Mixer, recorded: dict[str, Tensor], cache: RollbackCache) -> None:
    """Run a recurrent module's own code over recorded inputs, for its state only.

    A shallow copy shares all parameters with the module, which stays as it is; its projections are
    stood in for, so no large weight is read again.
    """
    shadow = copy.copy(mixer)
    stand_ins: dict[str, nn.Module] = {name: _Recall(recorded[name]) for name in seam.inputs}
    shadow._modules = {**mixer._modules, **stand_ins, seam.output: nn.Identity()}
    type(mixer).forward(shadow, recorded["hidden_states"], cache=cache, attention_mask=None)


class RollbackCache(Cache):
    """The cache handed to the model: one layer each, plus what the hooks of the target leave here.

    Attributes:
        tapped: layer id -> output [rows, T, hidden] of the running forward, for ids in ``taps``.
    """

    def __init__(self, anatomy: Anatomy, rows: Rows, taps: tuple[int, ...], step: int) -> None:
        self.rows = rows
        self.taps = frozenset(taps)
        self.tapped: dict[int, Tensor] = {}
        self.attention: dict[str, AttentionLayer] = {}
        """One layer for each attention kind: all of a kind have the same slots."""
        super().__init__(layers=[self._layer(anatomy, i, step) for i in range(len(anatomy.kinds))])
        self.recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        """The layers whose state must be replayed."""

    def _layer(self, anatomy: Anatomy, i: int, step: int) -> Any:
        kind, window, states = anatomy.kinds[i], anatomy.windows[i], anatomy.states
        if kind in (LINEAR, CONV):
            return RecurrentLayer(anatomy.mixers[i], states)
        if kind == DUMMY:
            return DummyLayer()
        if kind == HYBRID:
            layer: AttentionLayer = HybridLayer(self.rows, anatomy.mixers[i], states)
        elif kind == SLIDING:
            layer = AttentionLayer(self.rows, window, step)
        elif kind == CHUNKED:
            layer = ChunkedLayer(self.rows, cast("int", window))
        else:
            layer = AttentionLayer(self.rows)
        self.attention.setdefault(FULL if kind == HYBRID else kind, layer)
        return layer

    def mark(self) -> None:
        """Before a block."""
        for layer in self.recurrent:
            layer.mark()

    def keep(self, counts: list[int], width: int) -> None:
        """After a block of ``width``: each row keeps its first ``counts[r]`` positions."""
        for layer in self.recurrent:
            layer.keep(counts[0], width, self)
        self.rows.advance(counts)

    def restore(self) -> None:
        """Forget the block: attention slots behind the length are already out of sight, but for NaN in them."""
        for layer in self.recurrent:
            layer.restore()
        for held in self.layers:
            if isinstance(held, AttentionLayer):
                held.cleanse()

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows, device=self.rows.device)
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                layer.select(index)
        self.rows.lengths[:] = [self.rows.lengths[row] for row in rows]


def record(cache: RollbackCache | None, layer: int, name: str, value: Tensor) -> None:
    """Leave a recurrent module's input with the cache it runs for, if there is one and it wants it."""
    if cache is not None:
        recorded = cast("RecurrentLayer", cache.layers[layer]).recorded
        if recorded is not None:
            recorded[name] = value
