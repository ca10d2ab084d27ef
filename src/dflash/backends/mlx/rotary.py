"""Rotary frequencies of a draft, from its config, by the formulas that transformers uses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from dflash.draft_config import DFlashConfig


class Rotary:
    """Rotates heads [rows, heads, T, head_dim] to absolute positions."""

    def __init__(self, config: DFlashConfig) -> None:
        inverse, self.factor = frequencies(config.rope_parameters, config.head_dim)
        self.head_dim = config.head_dim
        self._periods = mx.array((1.0 / inverse).astype(np.float32))

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """``offset``: the position of the first of the T, one for all rows or one each, [rows]."""
        x = x if self.factor == 1.0 else x * self.factor
        return mx.fast.rope(
            x, self.head_dim, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


def frequencies(rope: Mapping[str, Any], dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [dim / 2] float64, and the factor on cosine and sine.

    ``rope`` was checked by ``DFlashConfig``: its type is one of these, and has what it needs.
    """
    inverse = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    kind = rope["rope_type"]
    if kind == "linear":
        return inverse / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if kind == "yarn":
        return _yarn(rope, inverse, dim)
    return inverse, 1.0


def _llama3(rope: Mapping[str, Any], inverse: np.ndarray) -> np.ndarray:
    """Long waves stretched, short ones left, those between blended."""
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * inverse / rope["factor"] + smooth * inverse


def _yarn(rope: Mapping[str, Any], inverse: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """arXiv 2309.00071."""

    def dimension(rotations: float) -> float:
        original = rope["original_max_position_embeddings"]
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    blend = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    scale: float = rope["factor"]
    return inverse / scale * blend + inverse * (1 - blend), _attention_factor(rope, scale)


def _attention_factor(rope: Mapping[str, Any], scale: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return temperature(mscale) / temperature(all_dim) if mscale and all_dim else temperature(1.0)
