"""Two ``results.json`` side by side: the same systems on the same prompts, before and after, here and there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash.benchmark.answers import Record
from dflash.benchmark.figures import Figures, figures
from dflash.benchmark.results import ALL, Results
from dflash.benchmark.table import NOTHING, OTHER_LENGTH, failures, speedup
from dflash.errors import RequestError

Key: TypeAlias = tuple[str, int, int, int]
"""Data set, prompt, turn, repeat: of a record."""

_ANSWERS = ("system", "pairs", "same\nanswers", "tokens a round\nA -> B", "end to end tok/s\nA -> B")
_SPEEDS = ("system", "end to end\nB over A", "speed-up over\nbaseline in A", "speed-up over\nbaseline in B")
"""Two tables, so that they fit a narrow screen; with 95% intervals."""


def comparison(one: Results, other: Results, a: str, b: str) -> RenderableType:
    """Tables of what was measured in both, over the prompts that both have.

    Raises:
        RequestError: nothing was.
    """
    shared = [name for name in one.systems if name in other.systems]
    datasets = [name for name in one.datasets if name in other.datasets]
    for dataset in list(datasets):
        mine, yours = (r.settings["datasets"][dataset]["source"] for r in (one, other))
        if mine != yours:
            datasets.remove(dataset)  # the same index is another prompt
    parts: list[RenderableType] = [Text(f"A  {a}"), Text(f"B  {b}"), *_differences(one, other), Text("")]
    apart: list[str] = []
    whole: list[_Pair] = []
    """Of the last line: all data sets."""
    for dataset in [*datasets, *([ALL] if len(datasets) > 1 else [])]:
        title = "all data sets" if dataset == ALL else dataset
        pairs = [_pair(one, other, system, dataset, datasets) for system in shared]
        found = [pair for pair in pairs if pair is not None]
        whole = found or whole
        parts += [
            _table(title, _ANSWERS, [p.answers() for p in found]),
            _table("", _SPEEDS, [p.speeds() for p in found]),
        ]
        apart += [f"{pair.system} on {title}" for pair in found if pair.apart]
    if not whole:
        raise RequestError("the two results share no system that answered the same prompts: nothing to compare")
    parts += _lacking(one, other)
    parts += _lengths(one, other, whole)
    if apart:
        parts.append(Text(f"speed-ups whose intervals do not meet: {', '.join(apart)}", "bold"))
    return Group(*parts)


def _lacking(one: Results, other: Results) -> Iterable[Text]:
    """What is in no figure because it failed, or was never asked."""
    for label, results in (("A", one), ("B", other)):
        if not results.complete:
            yield Text(f"{label} is not complete: it was stopped early", "bold")
        if (failed := failures(results.records)) is not None:
            yield Text(f"{label} lacks what failed, {failed}", "bold red")


def _lengths(one: Results, other: Results, pairs: Iterable[_Pair]) -> Iterable[Text]:
    """Where answers of different length were timed."""
    caps = [results.settings.get("max_new_tokens") for results in (one, other)]
    if caps[0] != caps[1]:
        yield Text(
            f"A's answers end at {caps[0]} tokens, B's at {caps[1]}: the same answers, cut elsewhere, count as "
            "different ones, and acceptance and speed are of texts of different length",
            "bold",
        )
    for pair in pairs:
        ratio = pair.against.length_ratio
        if ratio is not None and abs(ratio - 1) > OTHER_LENGTH:
            yield Text(f"{pair.system}: B's answers have {ratio:.2f} times the tokens of A's", "bold")


def _differences(one: Results, other: Results) -> Iterable[Text]:
    """Settings and circumstances that are not the same."""
    for what, mine, yours in (
        ("setting", one.settings, other.settings),
        ("where it ran", one.environment, other.environment),
    ):
        then, now = _flat(mine), _flat(yours)
        for name in {**then, **now}:
            if then.get(name) != now.get(name):
                yield Text(f"{what} differs: {name}: {then.get(name)} -> {now.get(name)}", "yellow")


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested objects as one, with dotted names."""
    found: dict[str, Any] = {}
    for name, one in value.items():
        found.update(_flat(one, f"{before}{name}.") if isinstance(one, dict) else {before + name: one})
    return found


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    if title:
        table.title, table.title_justify = Text(title, "bold"), "left"
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[0].justify = "left"
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class _Pair:
    """A system in both results, over the prompts that both have.

    Attributes:
        then, now: A's figures and B's, each against the baseline of its own run.
        against: B's with A's answers as their baseline: the same definitions as in every table.
    """

    system: str
    pairs: int
    then: Figures
    now: Figures
    against: Figures

    @property
    def apart(self) -> bool:
        """Whether the intervals of the two speed-ups have nothing in common."""
        ratios = (self.then.speedup, self.now.speedup)
        lows = [ratio.low for ratio in ratios if ratio is not None and ratio.low is not None]
        highs = [ratio.high for ratio in ratios if ratio is not None and ratio.high is not None]
        return len(lows) == len(highs) == 2 and max(lows) > min(highs)

    def answers(self) -> list[str]:
        """In the order of ``_ANSWERS``."""
        then, now, same = self.then, self.now, self.against.identity
        return [
            self.system,
            str(self.pairs),
            NOTHING if same is None else f"{same.identical} of {same.compared}",
            _arrow(then.acceptance_length or then.server_length, now.acceptance_length or now.server_length, 3),
            _arrow(then.rate, now.rate, 1),
        ]

    def speeds(self) -> list[str]:
        """In the order of ``_SPEEDS``."""
        return [self.system, *(speedup(figures.speedup) for figures in (self.against, self.then, self.now))]


def _pair(one: Results, other: Results, system: str, dataset: str, datasets: list[str]) -> _Pair | None:
    """One system; None without a prompt that both answered."""
    chosen = datasets if dataset == ALL else [dataset]
    mine, yours = _both(one, other, system, chosen)
    if not mine:
        return None
    then, now = (
        figures(records, results.of(results.baseline, ALL), results.partings)
        for results, records in ((one, mine), (other, yours))
    )
    renamed = [replace(record, system=f"{system} in A") for record in mine]
    return _Pair(system, len(mine), then, now, figures(yours, renamed))


def _both(one: Results, other: Results, system: str, datasets: list[str]) -> tuple[list[Record], list[Record]]:
    """The answers to what both answered, in the same order.

    A file may have changed in between, so an index alone names no prompt: a conversation counts only if it began with
    the same prompt in both. Its later prompts hold the answers, and may differ.
    """
    mine, yours = (
        {r.key: r for r in results.of(system, ALL) if r.dataset in datasets and r.answer.error is None}
        for results in (one, other)
    )
    keys = [key for key in mine if key in yours and _first_prompt(mine, key) == _first_prompt(yours, key)]
    return [mine[key] for key in keys], [yours[key] for key in keys]


def _first_prompt(records: Mapping[Key, Record], key: Key) -> str | None:
    """The digest of what began the conversation of a record."""
    dataset, prompt, _, repeat = key
    first = records.get((dataset, prompt, 0, repeat))
    return None if first is None else first.answer.prompt_digest


def _arrow(then: float | None, now: float | None, digits: int) -> str:
    if then is None or now is None:
        return NOTHING
    if then == now:
        return f"{then:.{digits}f} ="
    return f"{then:.{digits}f} -> {now:.{digits}f}"
