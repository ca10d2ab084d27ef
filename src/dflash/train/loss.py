"""Losses of a block and the weights of its slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.train.mix import LossMix


def exponential_weights(slots: int, gamma: float) -> Tensor:
    """[slots]: exp(-(k - 1) / gamma) for k = 1.. (DFlash, arXiv 2602.06036)."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32) / gamma)


def dpace_weights(label_probability: Tensor) -> Tensor:
    """[..., slots]: how much each slot still matters for acceptance, from the draft's own probabilities.

    s_k = 0.5 q_k + 0.5, P_k = s_1 ... s_k, w_k = P_k + P_(k+1) + ...: the expected acceptance that hangs on slot k.
    """
    prefix = (0.5 * label_probability + 0.5).cumprod(dim=-1)
    return prefix.flip(-1).cumsum(dim=-1).flip(-1)


def slot_losses(
    scores: Tensor, labels: Tensor, teacher: Tensor | None, mix: LossMix, shift: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each slot, and, detached, the draft's probability of its label and whether that is its choice.

    Args:
        scores: [..., vocab], of any dtype; computed with in float32.
        labels: [...] indices into that vocabulary.
        teacher: [..., vocab], the target's scores there.
        shift: [vocab], added to both scores.
    """
    logits = scores.float() if shift is None else scores.float() + shift
    log_q = logits.log_softmax(dim=-1)
    label = log_q.gather(-1, labels[..., None])[..., 0]
    loss = -mix.ce * label
    if mix.needs_teacher:
        assert teacher is not None
        log_p = (teacher.float() if shift is None else teacher.float() + shift).log_softmax(dim=-1)
        if mix.kl:
            loss = loss + mix.kl * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
        if mix.l1:
            loss = loss + mix.l1 * 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)
    return loss, label.detach().exp(), logits.detach().argmax(dim=-1) == labels
