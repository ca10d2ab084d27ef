"""The scores of a few positions on a CPU in float32, from a copy of the head's weights in the library's own layout.

A head is the widest matrix of a model (SmolLM2: 49152 by 576), and for a block's handful of rows torch hands it
to MKL, whose kernels for 4 to 15 rows rearrange the whole of it at every call: 8 rows cost 20 ms here, one row 6 and
sixteen 13 (``docs/benchmark/block_cost-float32.json``). A round scores two blocks, the draft's and the target's.
Arranged once, by oneDNN, the same 8 rows cost 8 ms. The copy is the price: as many bytes as the head has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

HINT = 8
"""Rows the layout is chosen for. It serves any number, and is no slower than torch's own for one row or hundreds."""


class PackedHead(nn.Linear):
    """A head that shares its parameters with the one it stands for and keeps an arranged copy of the weights.

    Training, autocast, other dtypes and devices go the usual way. The copy is made at first use, and anew when the
    weights were changed since, as far as torch counts it: what is written through ``weight.data`` it does not.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight, self.bias = head.weight, head.bias
        self.train(head.training)
        self._packed: tuple[tuple[int, int], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Scores [..., vocab] of states [..., hidden]."""
        weight = self.weight
        usual = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not input.numel()
        if usual or any(t.device.type != "cpu" or t.dtype != torch.float32 for t in (input, weight)):
            return F.linear(input, weight, self.bias)
        state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        packed = self._packed
        if packed is None or packed[0] != state:
            # Outside of inference mode, where a tensor is allowed to be of another layout.
            with torch.inference_mode(False), torch.no_grad():
                packed = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT)
            self._packed = packed
        scores: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed[1], self.bias, "none", [], "")
        return scores

    def __getstate__(self) -> dict[str, Any]:
        """Without the copy: its layout can be neither copied nor saved."""
        return {**self.__dict__, "_packed": None}


def pack_head(model: PreTrainedModel) -> None:
    """Give a model such a head, where it can be of use: a plain linear one, in float32, on a CPU with oneDNN."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    if head.weight.device.type == "cpu" and head.weight.dtype == torch.float32:
        model.set_output_embeddings(PackedHead(head))
