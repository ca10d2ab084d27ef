"""The scores of a few positions on a CPU in float32, from a copy of the head's weights in the library's own layout.

A head is the widest matrix of a model (SmolLM2: 49152 by 576), and for a block's handful of rows torch hands it
to MKL, whose kernels for 4 to 15 rows rearrange the whole of it at every call: 8 rows cost 14 ms here, one row 5 and
sixteen 9 (``docs/benchmark/block_cost-float32.json``). A round scores two blocks, the draft's and the target's.
Arranged once, by oneDNN, the same 8 rows cost 7 ms. The copy is the price: as many bytes as the head has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash.errors import RequestError

HINT = 8
"""Rows the layout is chosen for. It serves any number, and is no slower than torch's own for one row or hundreds."""


class _Here(threading.local):
    arranged = False


_here = _Here()


@contextmanager
def arranged() -> Iterator[None]:
    """Where the arranged copies are used: in this thread's part of a session. Elsewhere a head is an ordinary one."""
    before, _here.arranged = _here.arranged, True
    try:
        yield
    finally:
        _here.arranged = before


class PackedHead(nn.Linear):
    """A head that shares its parameters with the one it stands for, and keeps an arranged copy of the weights.

    Every session begins with ``refresh``, so weights that were changed in between are never answered for; a user's own
    forward, training, autocast, other dtypes and devices go the usual way.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight, self.bias = head.weight, head.bias
        self.train(head.training)
        self._packed: tuple[Tensor, Tensor] | None = None

    def refresh(self) -> None:
        """Arrange the weights, if they are not those that are arranged: their bits are summed, row by row."""
        # Outside of inference mode, where a tensor is allowed to be of another layout.
        with torch.inference_mode(False), torch.no_grad():
            weight = self.weight.detach()
            if not _can_be_packed(weight):
                self._packed = None
                return
            bits = weight.view(torch.int64).sum(dim=1)  # two numbers in one; it overflows, exactly
            if self._packed is None or not torch.equal(self._packed[0], bits):
                self._packed = bits, torch.ops.mkldnn._reorder_linear_weight(weight, HINT)

    def forward(self, input: Tensor) -> Tensor:
        """Scores [..., vocab] of states [..., hidden]."""
        packed = self._packed
        if packed is None or not self._serves(input):
            return F.linear(input, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.contiguous()
        scores: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed[1], bias, "none", [], "")
        return scores

    def _serves(self, input: Tensor) -> bool:
        """Whether this call is one that the copy is kept for."""
        if not _here.arranged or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        return input.numel() > 0 and not _elsewhere(input) and not _elsewhere(self.weight)

    def __getstate__(self) -> dict[str, Any]:
        """Without the copy: its layout can be neither copied nor saved."""
        return {**self.__dict__, "_packed": None}


def _elsewhere(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.dtype != torch.float32


def _can_be_packed(weight: Tensor) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    pairs = weight.shape[-1] % 2 == 0 and weight.storage_offset() % 2 == 0  # two numbers are read as one
    return available and pairs and weight.is_contiguous() and weight.numel() > 0 and not _elsewhere(weight)


def pack_head(model: PreTrainedModel) -> None:
    """Give a model that was loaded here such a head, where it is of use: a plain linear one, in float32, on a CPU."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and _can_be_packed(head.weight):
        model.set_output_embeddings(PackedHead(head))


def rows_of(head: nn.Module, rows: Tensor) -> nn.Linear:
    """The part of a linear head that scores only these token ids, [n].

    Raises:
        RequestError: the head is of another kind (quantized, for one).
    """
    if not isinstance(head, nn.Linear):
        raise RequestError(
            f"a reduced vocabulary needs a linear head, not {type(head).__name__}: use --vocabulary full"
        )
    part = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
    part.weight = nn.Parameter(head.weight[rows], requires_grad=False)
    if head.bias is not None:
        part.bias = nn.Parameter(head.bias[rows], requires_grad=False)
    return part
