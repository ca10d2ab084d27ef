"""Hooks on a model: what our own forward leaves with the cache it was given. For any other forward they do nothing.

Sessions with different taps, in different threads, do not see each other.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dflash.backends.torch.architectures import Anatomy, seams
from dflash.backends.torch.cache import RollbackCache, record


def attach_hooks(model: nn.Module, anatomy: Anatomy) -> None:
    """Tap the layers of a model and record the inputs of its recurrent modules. Once, however often it is wrapped."""
    for index, layer in enumerate(anatomy.layers):
        _attach(layer, _Tap(index))
    _attach_brackets(model)
    for index, mixer in anatomy.mixers.items():
        _attach_recorders(index, mixer)


class _Running(threading.local):
    """The caches of the forwards that run in this thread, the innermost last; None for one that is not ours.

    Not every model hands the cache to its layers. There are several where a hook of the user's asks a model something.
    """

    def __init__(self) -> None:
        self.caches: list[RollbackCache | None] = []

    @property
    def cache(self) -> RollbackCache | None:
        return self.caches[-1] if self.caches else None


running = _Running()


@dataclass(frozen=True)
class _Begin:
    """A forward of the whole model begins, ours or the user's own: the cache it was given tells."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache")
        running.caches.append(cache if isinstance(cache, RollbackCache) else None)


@dataclass(frozen=True)
class _End:
    """It is over, or failed."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        running.caches.pop()


@dataclass(frozen=True)
class _Tap:
    """Leaves a tapped layer's output (before any final norm) with the cache of the running forward."""

    layer: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        cache = running.cache
        if cache is not None and self.layer in cache.taps:
            cache.tapped[self.layer] = output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class _RecordInput:
    """Records the input of a recurrent module."""

    layer: int

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        record(running.cache, self.layer, "hidden_states", args[0] if args else kwargs["hidden_states"])


@dataclass(frozen=True)
class _RecordOutput:
    """Records the output of one of its input projections."""

    layer: int
    name: str

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        record(running.cache, self.layer, self.name, output)


def _attach(module: nn.Module, hook: _Tap | _RecordOutput) -> None:
    """Once, however often a model is wrapped; a copy of a model has its hooks already."""
    if hook not in module._forward_hooks.values():
        module.register_forward_hook(hook)


def _attach_brackets(model: nn.Module) -> None:
    """Around a whole forward: the first is put before a user's hooks, which may fail, and the last is always called."""
    begin, end = _Begin(), _End()
    if begin not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)


def _attach_recorders(layer: int, mixer: nn.Module) -> None:
    enter = _RecordInput(layer)
    if enter not in mixer._forward_pre_hooks.values():
        mixer.register_forward_pre_hook(enter, with_kwargs=True)
    for name in seams(mixer).inputs:
        _attach(mixer.get_submodule(name), _RecordOutput(layer, name))
