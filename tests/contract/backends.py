"""What the contract suite needs of a backend. A new backend adds one class here and to ``BACKENDS``."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import torch

import tiny
from dflash.backends.rows import RowByRow
from dflash.backends.torch.cache import AttentionLayer, RecurrentLayer
from dflash.backends.torch.target import TorchSession, TorchTarget


class TorchBackend:
    """PyTorch on the CPU, float32."""

    name = "torch"
    architectures = frozenset(tiny.ARCHITECTURES)
    blocks = (2, 3, 8, 16)

    def target(self, architecture: str) -> TorchTarget:
        """A tiny target of an architecture."""
        return tiny.target(architecture)

    @functools.cache  # noqa: B019 (one object for the whole run)
    def greedy(self, architecture: str, prompt: tuple[int, ...], count: int) -> list[int]:
        """The framework's own greedy answer, without anything of ours."""
        ids = torch.tensor([prompt])
        out = self.target(architecture).model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        return out[0, len(prompt) :].tolist()

    def states(self, session: Any, row: int) -> list[np.ndarray]:
        """Every key, value, recurrent and convolution state of a row's committed tokens."""
        if isinstance(session, RowByRow):
            return self.states(session.sessions[row], 0)
        assert isinstance(session, TorchSession)
        found: list[torch.Tensor] = []
        for layer in session.cache.layers:
            if isinstance(layer, AttentionLayer):
                found += layer.committed(row)
            if isinstance(layer, RecurrentLayer):
                found += [s for s in (*layer.conv_states.values(), *layer.recurrent_states.values()) if s is not None]
        return [state.numpy() for state in found]


BACKENDS: list[Any] = [TorchBackend()]
if all(importlib.util.find_spec(package) is not None for package in ("mlx", "mlx_lm")):
    from mlx_backend import MlxBackend

    BACKENDS.append(MlxBackend())
