"""Whether the distribution that kl and l1 teach is the target's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash.backends.torch.head import rows_of
from dflash.backends.torch.target import TorchTarget
from dflash.errors import UnsupportedTarget

TOKENS = 64
"""Read to compare."""


@torch.no_grad()
def check_teacher(target: TorchTarget, ids: Sequence[int], rows: Tensor | None) -> None:
    """Compare the scores that are computed from last hidden states with the model's own, on one forward.

    Args:
        ids: tokens of an answer; the first 64 are read.
        rows: the tokens of a reduced vocabulary; None for all.

    Raises:
        UnsupportedTarget: they differ by more than rounding, or cannot be computed.
        RequestError: a reduced vocabulary of a head that is not linear.
    """
    tokens = torch.tensor([list(ids[:TOKENS])], device=target.device)
    with target.scoring.watched() as last:
        own = target.model(tokens).logits
    _compare(target, last[0], None, own, "train with --loss ce")
    if rows is not None:
        advice = "train with --vocabulary full, or with --loss ce"
        _compare(target, last[0], rows_of(target.anatomy.head, rows), own[..., rows], advice)


def _compare(target: TorchTarget, hidden: Tensor, head: nn.Module | None, own: Tensor, advice: str) -> None:
    """
    Args:
        hidden: last hidden states [rows, T, hidden].
        head: for some rows of the vocabulary; None for all.
        own: the model's scores of these rows.
        advice: what to do where they differ.

    Raises:
        UnsupportedTarget: they differ by more than rounding, or cannot be computed.
    """
    share = 1e-3 if target.model.dtype == torch.float32 else 2e-2
    try:
        same = _same(target.logits(hidden, head), own, share)
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedTarget(
            f"{target.name}: its scores cannot be computed from its last hidden states "
            f"({' '.join(str(error).split()) or type(error).__name__}): {advice}"
        ) from error
    if not same:
        raise UnsupportedTarget(
            f"{target.name}: scores computed from its last hidden states are not its own, so another distribution "
            f"would be taught: {advice}"
        )


def _same(have: Tensor, want: Tensor, share: float) -> bool:
    """Up to rounding by this share of a score, or of their usual size."""
    have, want = have.float(), want.float()
    return torch.allclose(have, want, rtol=share, atol=share * float(want.abs().median()))
