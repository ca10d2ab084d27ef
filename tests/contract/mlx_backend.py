"""MLX, for the contract suite. Apart from the others: MLX is not everywhere."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

import tiny_mlx
from dflash.backends.mlx.target import MlxSession, MlxTarget
from dflash.backends.rows import RowByRow


class MlxBackend:
    """MLX on its default device, float32."""

    name = "mlx"
    architectures = frozenset(tiny_mlx.ARCHITECTURES)
    blocks = (3, 16)

    def target(self, architecture: str) -> MlxTarget:
        """A tiny target of an architecture."""
        return tiny_mlx.target(architecture)

    @functools.cache  # noqa: B019 (one object for the whole run)
    def greedy(self, architecture: str, prompt: tuple[int, ...], count: int) -> list[int]:
        """mlx-lm's own greedy answer, over mlx-lm's own caches."""
        model = self.target(architecture).model
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]

    def states(self, session: Any, row: int) -> list[np.ndarray]:
        """Every key, value, recurrent and convolution state of a row's committed tokens."""
        if isinstance(session, RowByRow):
            return self.states(session.sessions[row], 0)
        assert isinstance(session, MlxSession)
        found: list[mx.array] = []
        for layer in session.cache.attention:
            found += layer.committed(row)
        for states in session.cache.recurrent:
            found += [state for state in states.cache if state is not None]
        return [np.array(state) for state in found]
