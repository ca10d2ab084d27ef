"""Reading along in a model that has no hooks, and leaving nothing behind in it.

A session runs the model's own code on a shallow copy: the modules on the way to the decoder layers are copied
(their parameters are not), and the copies hold stand-ins for single layers and modules. The model itself is only
read, so that sessions with different taps, in different threads, do not see each other.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash.backends.mlx.architectures import MIXERS, Anatomy, class_name
from dflash.backends.mlx.cache import RecurrentCache, RollbackCache


def reader(anatomy: Anatomy, taps: tuple[int, ...], cache: RollbackCache) -> Callable[..., mx.array]:
    """The model with seams: run it with ``cache.layers`` as its cache, and it leaves ``cache.tapped``.

    Its scores are those of the positions ``cache.scored``.
    """
    layers: list[Any] = list(anatomy.layers)
    for index, path in anatomy.mixers.items():
        layers[index] = replaced(layers[index], path, _RecordedMixer)
    for index in taps:
        layers[index] = _TappedLayer(layers[index], index, cache)

    def seamed(holder: nn.Module) -> _ScoredTrunk:
        own = copy.copy(holder)
        own[anatomy.trunk[-1]] = layers
        return _ScoredTrunk(own, cache)

    return replaced(anatomy.model, anatomy.trunk[:-1], seamed)


def replaced(module: Any, path: tuple[str, ...], make: Callable[[Any], Any]) -> Any:
    """A shallow copy of a module in which ``make`` has replaced what lies at ``path``."""
    if not path:
        return make(module)
    own = copy.copy(module)
    dict.__setitem__(own, path[0], replaced(module[path[0]], path[1:], make))
    return own


_signature = functools.cache(inspect.signature)


class _StandIn:
    """Has everything that the module has, and counts as one of its class; a subclass is called in its place."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what ``isinstance`` asks, by which some models tell their layers apart
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _ScoredTrunk(_StandIn):
    """The decoder with its layers: hands on only the positions that are to be scored."""

    def __init__(self, module: Any, cache: RollbackCache) -> None:
        super().__init__(module)
        self._cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        states: mx.array = self._module(*args, **kwargs)
        scored = self._cache.scored
        return states if scored is None else mx.take_along_axis(states, scored[:, :, None], axis=1)


class _TappedLayer(_StandIn):
    """A decoder layer that leaves its output with the session."""

    def __init__(self, module: Any, index: int, cache: RollbackCache) -> None:
        super().__init__(module)
        self._index = index
        self._cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._module(*args, **kwargs)
        self._cache.tapped[self._index] = output[0] if isinstance(output, tuple) else output
        return output


class _Recorder:
    """Stands in for an input projection: gives what it gives, and remembers it."""

    def __init__(self, projection: Callable[[mx.array], mx.array]) -> None:
        self.projection = projection
        self.output: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        self.output = self.projection(x)
        return self.output


class _Recall:
    """Stands in for an input projection: gives the first positions of what it gave before."""

    def __init__(self, output: mx.array) -> None:
        self.output = output

    def __call__(self, _: mx.array) -> mx.array:
        return self.output


class _RecordedMixer(_StandIn):
    """A recurrent module that, while its cache is marked, leaves there how to read a prefix again.

    A replay runs the module's own code on a copy with recorded projections. Only states are ever computed by it:
    evaluation is lazy, and nobody asks for the output.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        kind = type(self._module)
        bound = _signature(kind.__call__).bind(self._module, *args, **kwargs).arguments
        cache = bound.get("cache")
        if not isinstance(cache, RecurrentCache) or not cache.recording:
            output: mx.array = self._module(*args, **kwargs)
            return output
        names = MIXERS[class_name(self._module)]
        recorders = {name: _Recorder(self._module[name]) for name in names}
        hidden = list(bound.values())[1]
        output = kind.__call__(_with(self._module, recorders), *args, **kwargs)
        outputs = {name: recorder.output for name, recorder in recorders.items()}
        cache.recorded(functools.partial(_replay, self._module, hidden, outputs, cache))
        return output


def _replay(
    mixer: nn.Module, hidden: mx.array, outputs: dict[str, mx.array | None], cache: RecurrentCache, count: int
) -> None:
    recalls = {name: _Recall(output[:, :count]) for name, output in outputs.items() if output is not None}
    type(mixer).__call__(_with(mixer, recalls), hidden[:, :count], mask=None, cache=cache)


def _with(mixer: nn.Module, stand_ins: dict[str, Any]) -> nn.Module:
    shadow = copy.copy(mixer)
    for name, stand_in in stand_ins.items():
        dict.__setitem__(shadow, name, stand_in)
    return shadow
