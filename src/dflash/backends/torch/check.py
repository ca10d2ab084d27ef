"""Proof, on the model at hand, that blocks can be read and rolled back, and in which way."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import transformers

from dflash.backends.torch.architectures import padding_id
from dflash.errors import DFlashError, UnsupportedTarget, one_line
from dflash.protocols import Features, Proposal

if TYPE_CHECKING:
    from dflash.backends.torch.target import Reading, TorchTarget


def check_rollback(target: TorchTarget) -> None:
    """What is read in chunks, in rows of different lengths and behind rejections must be as one forward has it.

    Releases of transformers differ here: some forgot the recurrent state when several tokens came in at once
    (huggingface/transformers PR 45513); some decoders take positions from the cache. Twelve tokens tell. The target is
    left with the first of its ways of reading (``TorchTarget.readings``) that is right.

    Raises:
        UnsupportedTarget: none is, or the model cannot be read block by block at all.
    """
    target.reading = proven_reading(target)


def proven_reading(target: TorchTarget) -> Reading:
    """The way of reading that ``check_rollback`` leaves a target with; raises as it does.

    Each is tried on a copy of the target that shares its model: sessions of other threads are none the wiser.
    """
    refusals: list[UnsupportedTarget] = []
    for way in target.readings:
        tried = copy.copy(target)
        tried.reading = way
        try:
            _check_reading(tried)
            return way
        except UnsupportedTarget as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _check_reading(target: TorchTarget) -> None:
    """The check of the way of reading that a target has; raises as ``check_rollback``."""
    name = f"{type(target.model).__name__} in transformers {transformers.__version__}"
    try:
        error = _rollback_error(target)
    except DFlashError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as failure:
        raise UnsupportedTarget(f"{name} cannot be read block by block: {one_line(failure)}") from failure
    if not error < (1e-3 if target.model.dtype == torch.float32 else 0.2):
        raise UnsupportedTarget(
            f"{name} does not read on correctly from a cache that was rolled back (relative error {error:.2g}): "
            "answers would not be the target's own"
        )


def _rollback_error(target: TorchTarget) -> float:
    """The largest relative error of scores: of two ragged rows read in chunks, and of a block behind a rejection."""
    text = [(i * 7919 + 13) % target.vocab_size for i in range(12)]
    padding = padding_id(target.anatomy.config)
    if padding is not None and 0 <= padding < target.vocab_size:
        text[4] = padding  # RoBERTa does not count it as a position, so positions would depend on what is drafted
    with torch.inference_mode():
        whole = target.model(torch.tensor([text], device=target.device)).logits.float()

    def ignore(tokens: list[list[int]], features: Features) -> None:
        return None

    rows = target.start(2, (), 8, 4)
    first = rows.prefill([text[:9], text[:2]], ignore)
    with rows.verify([text[9], text[2]], Proposal([text[10:12], text[3:5]], 2)) as ahead:
        pairs = [(first[0], whole[0, 8:9]), (first[1], whole[0, 1:2])]
        pairs += [(ahead.scores[0], whole[0, 9:12]), (ahead.scores[1], whole[0, 2:5])]
    session = target.start(1, (), 8, 8)
    session.prefill([text[:6]], ignore)
    with session.verify(text[6:7], Proposal([text[:3]], 3)) as ahead:
        ahead.keep([1])
    with session.verify(text[7:8], Proposal([text[8:]], 4)) as ahead:
        pairs.append((ahead.scores[0], whole[0, 7:]))
        ahead.keep([5])
    # The largest by torch: Python's max would drop a NaN that is not the first.
    return float(torch.stack([(have.float() - want).norm() / want.norm() for have, want in pairs]).max())
