"""Acceptance of a draft on held-out answers, without decoding.

The answers are the target's own greedy text, so walking over them is decoding: at an anchor the draft's
first wrong slot ends the round, and the next anchor is the token that replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.backends.torch.draft import DFlashDraftModel
from dflash.backends.torch.target import TorchTarget
from dflash.train.blocks import Batch, block_states
from dflash.train.data import Sequence
from dflash.train.features import Features

ANCHORS = 64
"""Blocks computed at once."""


@dataclass(frozen=True)
class Acceptance:
    """Figures over all rounds of all held-out answers.

    Attributes:
        length: tokens a round, the target's own included: what decoding would give, cut at the end of the answer.
        by_position: share of rounds in which slot k stands, for k = 1..
        accuracy: share of right slots over all anchors and slots, whether or not the ones before were right.
        rounds: how many rounds that is.
    """

    length: float
    by_position: list[float]
    accuracy: float
    rounds: int


@torch.inference_mode()
def measure(
    draft: DFlashDraftModel, target: TorchTarget, sequences: SequenceOf[Sequence], features: Features, block_size: int
) -> Acceptance:
    """Walk over held-out answers. The draft's choice is over the whole vocabulary, as in decoding."""
    draft_mode = draft.training
    draft.eval()
    emitted = rounds = right = slots = 0
    standing = [0] * (block_size - 1)
    for sequence in sequences:
        correct = _correct(draft, target, sequence, features, block_size)
        right += int(correct.sum())
        slots += sum(min(block_size - 1, len(sequence.ids) - 1 - s) for s in sequence.anchors)
        at = sequence.prompt
        while at in sequence.anchors:
            left = len(sequence.ids) - 1 - at
            accepted = min(int(correct[at - sequence.prompt].long().cumprod(0).sum()), left)
            for k in range(accepted):
                standing[k] += 1
            emitted += min(accepted + 1, left)
            rounds += 1
            at += accepted + 1
    draft.train(draft_mode)
    assert rounds, "sequences have at least one anchor"
    return Acceptance(emitted / rounds, [n / rounds for n in standing], right / max(1, slots), rounds)


def _correct(
    draft: DFlashDraftModel, target: TorchTarget, sequence: Sequence, features: Features, block_size: int
) -> Tensor:
    """Bool [anchors, block_size - 1]: which slots of a block at each position are the answer's own tokens."""
    device = draft.fc.weight.device
    taps = features.of(sequence)[0].to(device)[None]
    ids = torch.tensor([sequence.ids], device=device)
    found = []
    for anchors in torch.split(torch.tensor(sequence.anchors, device=device), ANCHORS):
        batch = Batch(ids, taps, anchors[None], torch.ones(1, len(anchors), block_size - 1, device=device))
        states = block_states(draft, target.anatomy.embedding.weight, batch, block_size)
        chosen = draft.logits(states[0], target.anatomy.head).argmax(dim=-1)
        inside = anchors[:, None] + torch.arange(1, block_size, device=device) < ids.shape[1]
        found.append((chosen == batch.labels(block_size)[0]) & inside)
    return torch.cat(found).cpu()
