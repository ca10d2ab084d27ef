"""Learning rate over the steps of a run, as a share of its peak."""

from __future__ import annotations

import math

from dflash.errors import RequestError

SCHEDULES = ("wsd", "cosine", "constant")


def rate(schedule: str, step: int, steps: int, warmup: float = 0.04, decay: float = 0.2) -> float:
    """Share of the peak learning rate at a step (from 0) of ``steps``.

    Args:
        schedule: "wsd" (warm up, stay, decay linearly to 0), "cosine" or "constant".
        warmup: share of the steps that warm up linearly.
        decay: share of the steps that decay, for "wsd".
    """
    if schedule not in SCHEDULES:
        raise RequestError(f"schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
    falling = max(1, round(decay * steps))
    return min(1.0, (steps - step) / falling)
