"""Two ``results.json`` side by side: the same systems on the same prompts, before and after, here and there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash.benchmark.answers import Record
from dflash.benchmark.figures import Figures, Ratio, figures
from dflash.benchmark.results import ALL, Results
from dflash.benchmark.table import NOTHING, speedup
from dflash.errors import RequestError

Key: TypeAlias = tuple[str, int, int, int]
"""Data set, prompt, turn, repeat: of a record."""

_COLUMNS = (
    "system",
    "pairs",
    "tokens\na round\nA -> B",
    "end to end\ntok/s\nA -> B",
    "B over A\n(95% interval)",
    "speed-up\nover baseline\nA -> B",
    "same\nanswers",
)


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
    rows = 0
    for dataset in [*datasets, *([ALL] if len(datasets) > 1 else [])]:
        title = "all data sets" if dataset == ALL else dataset
        table = Table(*_COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False, title=Text(title, "bold"), title_justify="left")
        table.columns[0].no_wrap = True
        for column in table.columns[1:]:
            column.justify = "right"
        for system in shared:
            cells = _row(one, other, system, dataset, datasets)
            if cells is not None:
                table.add_row(*cells)
                rows += 1
        parts.append(table)
    if not rows:
        raise RequestError("the two results share no system that answered the same prompts: nothing to compare")
    return Group(*parts)


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


def _row(one: Results, other: Results, system: str, dataset: str, datasets: list[str]) -> list[str] | None:
    """One system; None without a prompt that both answered."""
    chosen = datasets if dataset == ALL else [dataset]
    mine, yours = _both(one, other, system, chosen)
    if not mine:
        return None
    # B's answers with A's as their baseline: the same definitions as in every table.
    renamed = [replace(record, system=f"{system} in A") for record in mine]
    against = figures(yours, renamed)
    then, now = (_within(results, system, records) for results, records in ((one, mine), (other, yours)))
    same = against.identity
    return [
        system,
        str(len(mine)),
        _arrow(then.acceptance_length or then.server_length, now.acceptance_length or now.server_length, 3),
        _arrow(then.rate, now.rate, 1),
        speedup(against.speedup),
        _arrow(_value(then.speedup), _value(now.speedup), 2),
        NOTHING if same is None else f"{same.identical} of {same.compared}",
    ]


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


def _within(results: Results, system: str, records: list[Record]) -> Figures:
    """The figures of these records against their own run's baseline."""
    return figures(records, results.of(results.baseline, ALL), results.partings)


def _value(ratio: Ratio | None) -> float | None:
    return None if ratio is None else ratio.value


def _arrow(then: float | None, now: float | None, digits: int) -> str:
    if then is None or now is None:
        return NOTHING
    if then == now:
        return f"{then:.{digits}f} ="
    return f"{then:.{digits}f} -> {now:.{digits}f}"
