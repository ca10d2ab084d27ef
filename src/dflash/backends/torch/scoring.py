"""From last hidden states to scores by the model's own code.

The head is not the whole of it: models divide its output (Granite), multiply it (Falcon-H1, Cohere) or cap it
(Gemma). None of that is written here a second time: the model's own forward runs, with what comes before its head
stood in for by what it gave.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dflash.errors import UnsupportedTarget


class Scoring:
    """The end of a model's forward. It reads the model through shallow copies, which share all parameters.

    Attributes:
        trunk: the module whose output is the last hidden states: all of the model but its head.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Module) -> None:
        """
        Raises:
            UnsupportedTarget: the head is not beside the decoder but inside it.
        """
        decoder = model.get_decoder()
        owner: nn.Module = model
        while True:
            around = [name for name, child in owner.named_children() if _within(decoder, child)]
            if not around:
                raise UnsupportedTarget(
                    f"{type(model).__name__}: its head is a part of its decoder, so its scores cannot be computed from "
                    "hidden states: train with --loss ce"
                )
            self._trunk_name = around[0]
            self.trunk = owner.get_submodule(self._trunk_name)
            if not _within(head, self.trunk):
                break
            owner = self.trunk
        self._owner = owner
        self._head_name = next(name for name, module in owner.named_modules() if module is head)

    def __call__(self, hidden: Tensor, head: nn.Module) -> Tensor:
        """Scores [..., vocab] of last hidden states [..., hidden], through ``head`` where the model has its own."""
        given = copy.copy(self.trunk)
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        vars(given)["forward"] = lambda *args, **kwargs: _Given(last_hidden_state=flat)
        shadow = _with(_with(self._owner, self._trunk_name, given), self._head_name, head)
        scores: Tensor = type(self._owner).forward(shadow).logits
        return scores.reshape(*hidden.shape[:-1], -1)

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Inside, the last hidden states [rows, T, hidden] of every forward of the model are put on the list."""
        seen: list[Tensor] = []
        hook = self.trunk.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        try:
            yield seen
        finally:
            hook.remove()


class _Given(BaseModelOutput):
    """What the trunk gave. Models copy other fields of it to their own output, where nothing reads them here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


def _within(part: nn.Module, whole: nn.Module) -> bool:
    return any(module is part for module in whole.modules())


def _with(module: nn.Module, name: str, stand_in: nn.Module) -> nn.Module:
    """A shallow copy of a module in which the part of that dotted name is another."""
    first, _, rest = name.partition(".")
    shadow = copy.copy(module)
    part = _with(module.get_submodule(first), rest, stand_in) if rest else stand_in
    shadow._modules = {**module._modules, first: part}
    return shadow
