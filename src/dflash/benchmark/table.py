"""The figures as rich tables, one for each data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash.benchmark.answers import Record
from dflash.benchmark.figures import Figures, Identity, Ratio, RoundTime
from dflash.benchmark.results import ALL, Results

NOTHING = "–"

COLUMNS = (
    "system",
    "answers",
    "mean\ntokens",
    "tokens\na round",
    "to first\ntoken ms",
    "decode\ntok/s",
    "end to end\ntok/s",
    "speed-up\n(95% interval)",
    "ms a round: draft\n+verify+host",
    "peak\nGB",
    "identical",
)


def row(name: str, found: Figures, baseline: bool) -> list[str]:
    """One system's figures as text, in the order of ``COLUMNS``."""
    failures = f" + {found.failures} FAILED" if found.failures else ""
    return [
        name,
        f"{found.answers}{failures}",
        _number(found.mean_tokens, 1),
        _acceptance(found),
        _number(found.first_token, 0),
        _number(found.decode_rate, 1),
        _number(found.rate, 1),
        "baseline" if baseline else speedup(found.speedup),
        round_time(found.round_time),
        _number(found.peak_memory, 2),
        "baseline" if baseline else identical(found.identity),
    ]


def _acceptance(found: Figures) -> str:
    if found.acceptance_length is None and found.server_length is not None:
        return f"{found.server_length:.2f}*"
    return _number(found.acceptance_length, 2)


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def speedup(ratio: Ratio | None) -> str:
    """``1.84x (1.70-2.01)``."""
    if ratio is None:
        return NOTHING
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{ratio.value:.2f}x{interval}"


def round_time(time: RoundTime | None) -> str:
    """``8.1+31.0+0.4``."""
    if time is None:
        return NOTHING
    return "+".join(f"{part:.0f}" if part >= 100 else f"{part:.1f}" for part in (time.draft, time.verify, time.host))


def identical(found: Identity | None) -> str:
    """``19 of 20, 1 tie``."""
    if found is None:
        return NOTHING
    text = f"{found.identical} of {found.compared}"
    if found.ties:
        text += f", {found.ties} {'tie' if found.ties == 1 else 'ties'}"
    return text + (f", {found.different} DIFFER" if found.different else "")


_SPEED = (0, 2, 4, 5, 6, 7)
_ROUNDS = (0, 1, 3, 8, 9, 10)
_WIDE = 146
"""Columns of text that one table of everything takes. In less, it is two tables."""


def tables(results: Results, width: int) -> RenderableType:
    """All data sets, then all together; below, what needs saying."""
    parts: list[RenderableType] = []
    for dataset, rows in results.figures().items():
        told = {name: row(name, found, name == results.baseline) for name, found in rows.items()}
        prompts = len({r.key[:2] for r in results.records if dataset in (ALL, r.dataset)})
        title = "all data sets" if dataset == ALL else dataset
        title += f", {prompts} prompt{'s' * (prompts != 1)}"
        if width >= _WIDE:
            parts.append(_table(title, list(told.values()), range(len(COLUMNS))))
        else:
            parts += [_table(title, list(told.values()), _SPEED), _table(None, list(told.values()), _ROUNDS)]
    parts += [Text(line) for line in remarks(results)]
    return Group(*parts)


def _table(title: str | None, rows: Sequence[list[str]], columns: Sequence[int]) -> Table:
    """Columns that no system has anything in are left out."""
    used = [i for i in columns if i == 0 or any(r[i] not in (NOTHING, "baseline") for r in rows)]
    table = Table(*(COLUMNS[i] for i in used), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    if title is not None:
        table.title, table.title_justify = Text(title, "bold"), "left"
    for at, i in enumerate(used):
        table.columns[at].justify = "left" if i == 0 else "right"
        table.columns[at].no_wrap = i == 0
    for cells in rows:
        table.add_row(*(_styled(cells[i]) for i in used))
    return table


def _styled(cell: str) -> Text:
    return Text(cell, "bold red" if "FAILED" in cell or "DIFFER" in cell else "")


BUSY = 0.8
"""Of a processor; an answer on a CPU that got less of one was not alone on the machine."""


def disturbed(results: Results) -> int:
    """Answers made on a CPU that others kept busy: their times say little."""
    if results.environment["device"] != "cpu":
        return 0
    answers = [record.answer for record in results.records if record.answer.cpu_seconds is not None]
    return sum((answer.cpu_seconds or 0.0) < BUSY * answer.seconds for answer in answers)


OTHER_LENGTH = 0.1
"""Answers that are this much shorter or longer than the baseline's, on average, are not quite the same work."""

_IF_SLOWER = {
    "draft": "Try a smaller --block-size or a larger --draft-min-confidence; with a model that thinks, the mode the "
    "draft was trained for (--enable-thinking).",
    "both": "Try a smaller --block-size or a larger --draft-min-confidence.",
    "ngram": "Try a smaller --block-size.",
}


_MOST_REASONS = 10
"""Of failures; a server may word each one otherwise."""


def failures(records: Sequence[Record]) -> str | None:
    """How many of these answers failed, and why most of them did; None if all came."""
    reasons = Counter(record.answer.error for record in records if record.answer.error).most_common()
    if not reasons:
        return None
    failed = sum(count for _, count in reasons)
    others = "" if len(reasons) == 1 else f"; {failed - reasons[0][1]} for other reasons"
    return f"{failed} of {len(records)} answers: {reasons[0][0]}{others}"


def remarks(results: Results) -> list[str]:
    """What the numbers alone do not say."""
    lines = [] if results.complete else ["NOT COMPLETE: stopped early; the same command with --output goes on."]
    if (count := disturbed(results)) > 0:
        lines.append(
            f"{count} of {len(results.records)} answers had less than {BUSY:.0%} of a processor: the machine was busy "
            "with something else, and their times say little. Acceptance and identity are not touched."
        )
    overall = list(results.figures().values())[-1]
    for name, found in overall.items():
        # Not said of what may be chance: a single prompt, or an interval that goes beyond 1.
        if found.speedup is not None and (found.speedup.high or 1) < 1 and name in _IF_SLOWER:
            lines.append(
                f"{name} is SLOWER than {results.baseline} here: a round costs more than the tokens it brings. "
                + _IF_SLOWER[name]
            )
        if found.length_ratio is not None and abs(found.length_ratio - 1) > OTHER_LENGTH:
            lines.append(
                f"{name}: its answers have {found.length_ratio:.2f} times the tokens of those of {results.baseline} to "
                "the same prompts: the speeds are of texts of different length."
            )
        if found.acceptance_length is None and found.server_length is not None:
            lines.append(f"* {name}: as the server counts it, tokens beyond the end of an answer perhaps included.")
        if found.decode_rate is None and found.answers:
            lines.append(f"{name}: no decode rate: no answer has a second token.")
    reasons = Counter(r.answer.error for r in results.records if r.answer.error).most_common()
    for error, count in reasons[:_MOST_REASONS]:
        lines.append(f"failed {count} time{'s' * (count != 1)}: {error}")
    if len(reasons) > _MOST_REASONS:
        lines.append(f"... and for {len(reasons) - _MOST_REASONS} more reasons (results.json has all)")
    for parting in results.partings[:10]:
        dataset, prompt, turn, _ = parting.key
        where = f"{parting.system} parts from {results.baseline} at token {parting.position} of {dataset} {prompt}"
        where += f", turn {turn + 1}" if turn else ""
        if (d := parting.difference) is not None:
            where += f": margin of the target's best two there {d.margin:.4g}"
            where += f", its best {d.gap:.4g} above the worse answer" if d.gap not in (None, d.margin) else ""
            where += f": {'a tie, ' if d.tie else 'NOT '}within rounding (up to {d.bound:.4g})"
        lines.append(where)
    if len(results.partings) > 10:
        lines.append(f"... and {len(results.partings) - 10} more (results.json has all)")
    return lines
