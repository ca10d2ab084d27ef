"""Every figure of a benchmark, each defined here and computed here only. docs/benchmark.md says the same in words.

Answers that failed are counted and are in no other figure. Where a system cannot say what a figure needs, it is None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash.benchmark.answers import Answer, Record, Round
from dflash.difference import Difference

RESAMPLES = 2000
"""Of the bootstrap."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Parting:
    """Where a record's answer parts from the baseline's.

    Attributes:
        difference: None where nobody can tell the margin.
    """

    system: str
    key: tuple[str, int, int, int]
    position: int
    difference: Difference | None


@dataclass(frozen=True)
class Identity:
    """How many answers are, token for token, the baseline's answers to the same prompt.

    Attributes:
        compared: pairs of answers to equal prompts. After two answers of a conversation part, its later prompts differ.
        identical: of these.
        ties: that part where rounding explains it: the target's best two scores are as good as equal there.
    """

    compared: int
    identical: int
    ties: int

    @property
    def different(self) -> int:
        """That part elsewhere, or where nobody can tell."""
        return self.compared - self.identical - self.ties


@dataclass(frozen=True)
class Ratio:
    """How much faster, over the pairs of answers to the same prompts.

    Attributes:
        value: the system's tokens per second over the baseline's.
        low, high: of the bootstrap's 95% interval over prompts; None with a single prompt.
        prompts: that were answered by both.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of one forward of the target and what belongs to it."""

    draft: float
    verify: float
    host: float


@dataclass(frozen=True)
class Figures:
    """All figures of one system on one set of prompts.

    Attributes:
        answers, failures: that came, and that did not.
        tokens: of the answers; ``mean_tokens``: of one answer, on average.
        length_ratio: tokens over the baseline's, for what both answered. None for the baseline itself.
        rounds: decode rounds, the prefill's not among them.
        acceptance_length: tokens of the decode rounds over decode rounds.
        by_position: for k = 1, 2, ... the share of the rounds that tested a k-th proposal in which it stood.
        histogram: the share of the rounds that gave 1, 2, ... tokens.
        first_token: median milliseconds to the first token; ``first_token_95``: the 95th percentile.
        decode_rate: tokens after the first of their answer, per second between first token and end.
        rate: tokens per second, from the beginning to the end.
        round_time: where the time of a round goes.
        speedup: of ``rate``; ``decode_speedup``: of ``decode_rate``. None for the baseline itself.
        peak_memory: GB, the largest of any answer.
        identity: None for the baseline itself and where answers cannot be compared.
        server_length: tokens a round as the server counts them; ``server_by_position``: likewise.
    """

    answers: int
    failures: int
    tokens: int
    mean_tokens: float | None
    length_ratio: float | None
    rounds: int | None
    acceptance_length: float | None
    by_position: list[float]
    histogram: list[float]
    first_token: float | None
    first_token_95: float | None
    decode_rate: float | None
    rate: float | None
    round_time: RoundTime | None
    speedup: Ratio | None
    decode_speedup: Ratio | None
    peak_memory: float | None
    identity: Identity | None
    server_length: float | None
    server_by_position: list[float]


def figures(
    records: Sequence[Record], baseline: Sequence[Record], partings: Iterable[Parting] = (), comparable: bool = True
) -> Figures:
    """The figures of one system.

    Args:
        records: of the system on these prompts.
        baseline: records of the system it is compared with, on the same prompts; empty where there is none.
        partings: where answers part, as far as known.
        comparable: whether answers should be the baseline's, token for token.
    """
    good = [record for record in records if record.answer.error is None]
    answers = [record.answer for record in good]
    known = [answer.rounds for answer in answers if answer.rounds is not None]
    rounds = [one for answer in known for one in answer]
    itself = bool(records) and bool(baseline) and records[0].system == baseline[0].system
    pairs = [] if itself else _pairs(good, baseline)
    counted = [record.answer.counted for record in records if record.answer.counted is not None]
    passes = sum(one.rounds for one in counted)
    lengths = [one.length for one in counted if one.length is not None]
    by_server = 1 + sum(one.accepted for one in counted) / passes if passes else None
    waits = [1000 * answer.first for answer in answers]
    peaks = [answer.peak_memory for answer in answers if answer.peak_memory is not None]
    return Figures(
        answers=len(answers),
        failures=len(records) - len(answers),
        tokens=sum(answer.count for answer in answers),
        mean_tokens=sum(answer.count for answer in answers) / len(answers) if answers else None,
        length_ratio=length_ratio(pairs),
        rounds=len(rounds) if known else None,
        acceptance_length=acceptance_length(rounds),
        by_position=by_position(rounds),
        histogram=histogram(rounds),
        first_token=float(np.median(waits)) if waits else None,
        first_token_95=float(np.percentile(waits, 95)) if waits else None,
        decode_rate=rate(good, decoding=True),
        rate=rate(good),
        round_time=round_time(answers),
        speedup=ratio(pairs),
        decode_speedup=ratio(pairs, decoding=True),
        peak_memory=max(peaks, default=None),
        identity=identity(pairs, {(p.system, p.key): p for p in partings}) if comparable and not itself else None,
        server_length=lengths[-1] if lengths else by_server,
        server_by_position=_server_positions([one.by_position for one in counted], passes),
    )


# --- acceptance -------------------------------------------------------------------------------------


def acceptance_length(rounds: Sequence[Round]) -> float | None:
    """Tokens a decode round, the target's own included. None without a round (answers of one token)."""
    return sum(one.tokens for one in rounds) / len(rounds) if rounds else None


def histogram(rounds: Sequence[Round]) -> list[float]:
    """The share of the rounds that gave 1, 2, ... tokens, up to the most that any could give."""
    if not rounds:
        return []
    widest = max(max(one.tokens, 1 + (one.proposed or 0)) for one in rounds)
    counts = [0] * widest
    for one in rounds:
        counts[one.tokens - 1] += 1
    return [count / len(rounds) for count in counts]


def by_position(rounds: Iterable[Round]) -> list[float]:
    """For k = 1, 2, ...: of the rounds that tested a k-th proposal, the share in which it and all before it stood.

    A round that the answer's end cut (all its tokens were drafted ones) tested no proposal beyond the cut.
    """
    tested: list[int] = []
    stood: list[int] = []
    for one in rounds:
        if one.proposed is None:
            continue
        reach = one.accepted if one.tokens == one.accepted else one.proposed
        tested += [0] * (reach - len(tested))
        stood += [0] * (reach - len(stood))
        for k in range(reach):
            tested[k] += 1
            stood[k] += k < one.accepted
    return [right / tests for right, tests in zip(stood, tested)]


def _server_positions(counts: Sequence[Sequence[float]], rounds: float) -> list[float]:
    if not rounds:
        return []
    width = max((len(one) for one in counts), default=0)
    return [sum(one[k] for one in counts if k < len(one)) / rounds for k in range(width)]


# --- time -------------------------------------------------------------------------------------------


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals: answers made at the same time share it."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def rate(records: Sequence[Record], decoding: bool = False) -> float | None:
    """Tokens per second that the system was busy, of one process.

    Args:
        decoding: only the tokens after the first of each answer, and the time between first token and end.
    """
    lanes: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        answer = record.answer
        begin = answer.began + (answer.first if decoding else 0.0)
        lanes.setdefault(record.lane, []).append((begin, answer.began + answer.seconds))
    tokens = sum(record.answer.count - decoding for record in records)
    seconds = sum(busy(intervals) for intervals in lanes.values())
    return tokens / seconds if seconds > 0 and tokens else None


def round_time(answers: Sequence[Answer]) -> RoundTime | None:
    """Milliseconds a forward of the target, over all answers."""
    splits = [answer.split for answer in answers if answer.split is not None]
    passes = sum(one.passes for one in splits)
    if not passes:
        return None
    each = 1000 / passes
    return RoundTime(
        each * sum(one.draft for one in splits),
        each * sum(one.verify for one in splits),
        each * sum(one.host for one in splits),
    )


# --- against the baseline ---------------------------------------------------------------------------

Pair = tuple[Record, Record]
"""The same prompt answered by a system and by the baseline."""


def _pairs(records: Iterable[Record], baseline: Iterable[Record]) -> list[Pair]:
    others = {record.key: record for record in baseline if record.answer.error is None}
    return [(record, others[record.key]) for record in records if record.key in others]


def ratio(pairs: Sequence[Pair], decoding: bool = False, seed: int = 0) -> Ratio | None:
    """Tokens per second of one over the other, each over all pairs; the times are those of the single answers.

    The interval: prompts are drawn again with replacement, all turns and repeats of a prompt together.
    """
    by_prompt: dict[tuple[str, int], list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair[0].key[:2], []).append(pair)
    sums = np.array([[_sums(pairs, i, decoding) for i in (0, 1)] for pairs in by_prompt.values()])
    if not len(sums) or not sums.sum(axis=0).all():
        return None
    value = _over(sums.sum(axis=0))
    if len(sums) == 1:
        return Ratio(float(value), None, None, 1)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = _over(sums[drawn].sum(axis=1))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values[np.isfinite(values)], [tail, 100 - tail])
    return Ratio(float(value), float(low), float(high), len(sums))


def length_ratio(pairs: Sequence[Pair]) -> float | None:
    """Tokens of a system over the baseline's. Far from 1, their speeds are of texts of different length."""
    tokens, others = (sum(pair[which].answer.count for pair in pairs) for which in (0, 1))
    return tokens / others if others else None


def _sums(pairs: Sequence[Pair], which: int, decoding: bool) -> tuple[float, float]:
    """Tokens and seconds of one side of a prompt's pairs."""
    answers = [pair[which].answer for pair in pairs]
    return (
        float(sum(answer.count - decoding for answer in answers)),
        sum(answer.seconds - (answer.first if decoding else 0.0) for answer in answers),
    )


def _over(sums: np.ndarray) -> np.ndarray:
    """[..., side, (tokens, seconds)] -> the rate of the first side over that of the second."""
    rates = sums[..., 0] / sums[..., 1]
    return np.asarray(rates[..., 0] / rates[..., 1])


def identity(pairs: Iterable[Pair], partings: dict[tuple[str, tuple[str, int, int, int]], Parting]) -> Identity | None:
    """None where tokens are not known."""
    compared = identical = ties = 0
    for record, other in pairs:
        if record.answer.tokens is None or record.answer.prompt_digest != other.answer.prompt_digest:
            continue
        compared += 1
        if record.answer.tokens == other.answer.tokens:
            identical += 1
            continue
        parting = partings.get((record.system, record.key))
        ties += parting is not None and parting.difference is not None and parting.difference.tie
    return Identity(compared, identical, ties) if compared else None


def parted(records: Sequence[Record], baseline: Sequence[Record], systems: Collection[str]) -> list[tuple[Pair, int]]:
    """Pairs of answers of these systems to equal prompts that part, and the index of the first other token."""
    found = []
    for pair in _pairs([r for r in records if r.system in systems and r.answer.error is None], baseline):
        one, other = pair[0].answer, pair[1].answer
        if one.tokens is None or other.tokens is None or one.prompt_digest != other.prompt_digest:
            continue
        if one.tokens != other.tokens:
            shared = min(len(one.tokens), len(other.tokens))
            position = next((i for i in range(shared) if one.tokens[i] != other.tokens[i]), shared)
            found.append((pair, position))
    return found
