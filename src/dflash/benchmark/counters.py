"""What servers publish about their speculation.

vLLM: counters at ``/metrics``. SGLang: a running mean at ``/server_info`` (``/get_server_info`` before), and, started
with ``--enable-metrics``, a gauge at ``/metrics``. Its mean is of all that the server ever did, ours or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dflash.benchmark.answers import Counted

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+\d+)?$")
_POSITION = re.compile(r'position="([0-9]{1,4})"')  # no block is wider: another number would only fill the memory
_VLLM = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
_VLLM_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_SGLANG_LENGTH = "sglang:spec_accept_length"


def from_metrics(text: str) -> Counted | None:
    """Counters so far, of a page in Prometheus' text format; None where there are none of speculation."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    lengths: list[float] = []
    for line in text.split("\n"):  # splitlines would split inside a label that has another kind of line end
        found = _SAMPLE.match(line.strip())
        if found is None:
            continue
        name, value = found[1].removesuffix("_total"), _finite(found[3])
        if value is None:
            continue
        if name in _VLLM:  # one line for each engine of the server
            sums[_VLLM[name]] = sums.get(_VLLM[name], 0.0) + value
        elif name == _VLLM_BY_POSITION and (position := _POSITION.search(found[2] or "")):
            at = int(position[1])
            positions[at] = positions.get(at, 0.0) + value
        elif name == _SGLANG_LENGTH:
            lengths.append(value)
    if sums:
        by_position = tuple(positions.get(i, 0.0) for i in range(max(positions, default=-1) + 1))
        return Counted(**sums, by_position=by_position)
    return _mean(lengths)


def from_server_info(info: Any) -> Counted | None:
    """SGLang's own page; None where it says nothing of speculation."""
    states = info.get("internal_states") if isinstance(info, Mapping) else None
    if not isinstance(states, list):
        return None
    lengths = [state.get("avg_spec_accept_length") for state in states if isinstance(state, Mapping)]
    known = [_finite(length) for length in lengths if isinstance(length, (int, float))]
    return _mean([length for length in known if length is not None])


MOST = 2.0**63
"""No counter goes further; sums and differences of less are finite, too."""


def _finite(value: str | float) -> float | None:
    """A published value as a number; None for NaN, infinity and what is no number."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < MOST else None


def _mean(lengths: list[float]) -> Counted | None:
    known = [length for length in lengths if length > 0]
    return Counted(length=sum(known) / len(known)) if known else None


def since(before: Counted | None, after: Counted | None) -> Counted | None:
    """What was counted in between."""
    if before is None or after is None or after.length is not None:
        return after
    width = len(after.by_position)
    earlier = [*before.by_position, *[0.0] * width]
    return Counted(
        after.rounds - before.rounds,
        after.proposed - before.proposed,
        after.accepted - before.accepted,
        tuple(now - then for now, then in zip(after.by_position, earlier)),
    )
