"""The plots of a report. Colours are those of Okabe and Ito, told apart by colour-blind eyes; shapes differ too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.benchmark.figures import Figures
from dflash.benchmark.results import ALL, Results

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#666666"

Rows = dict[str, dict[str, Figures]]
"""Data set -> system -> figures."""


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Write the PNGs that there is something to show in; file name -> what it shows."""
    rows = results.figures()
    drawn = {}
    plots: Sequence[tuple[str, str, Callable[[Results, Rows], Any]]] = (
        ("speedup.png", "Speed-up over the baseline, end to end, with 95% intervals", _speedup),
        ("histogram.png", "How many tokens a round gave", _histogram),
        ("positions.png", "How often the proposals of a block stood, by position", _positions),
        ("round_time.png", "Where the time of a round goes", _round_time),
        ("rates.png", "Tokens per second, end to end", _rates),
    )
    for name, title, plot in plots:
        figure = plot(results, rows)
        if figure is not None:
            figure.suptitle(title, fontsize=11)
            figure.savefig(folder / name, dpi=130)
            drawn[name] = title
    return drawn


def _style(results: Results, system: str) -> tuple[str, str]:
    """Colour and marker: the same for a system in all plots. The baseline is grey."""
    if system == results.baseline:
        return GREY, "x"
    at = [name for name in results.systems if name != results.baseline].index(system)
    return COLOURS[at % len(COLOURS)], MARKERS[at % len(MARKERS)]


def _new(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    for one in axes:
        one.grid(alpha=0.25)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _label(dataset: str) -> str:
    return "all" if dataset == ALL else dataset


def _by_dataset(results: Results, rows: Rows, systems: Sequence[str], value: Callable[[Figures], Any]) -> Any:
    """Horizontal lines of dots, a group for each data set; ``value`` gives (number, low, high) or None."""
    figure, (axes,) = _new(8, 1.2 + 0.26 * len(rows) * (len(systems) + 0.8))
    ticks = []
    for group, found in enumerate(rows.values()):
        base = group * (len(systems) + 0.8)
        ticks.append(base + (len(systems) - 1) / 2)
        for at, system in enumerate(systems):
            told = value(found[system]) if system in found else None
            if told is None:
                continue
            number, low, high = told
            colour, marker = _style(results, system)
            beside = None if low is None else [[number - low], [high - number]]
            axes.errorbar(
                number, base + at, xerr=beside, color=colour, marker=marker, markersize=7, capsize=3, linestyle="none",
                label=system if group == 0 else None,
            )  # fmt: skip
            axes.annotate(
                f"{number:.2f}" if number < 10 else f"{number:.1f}",
                (high or number, base + at), (8, 0), textcoords="offset points", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
    axes.set_yticks(ticks, [_label(name) for name in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) * (len(systems) + 0.8) - 0.8 + 0.1, -0.9)
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure, axes


def _speedup(results: Results, rows: Rows) -> Any:
    systems = [
        name
        for name in results.systems
        if name != results.baseline and any(n == name and f.speedup for r in rows.values() for n, f in r.items())
    ]
    if not systems:
        return None
    figure, axes = _by_dataset(
        results, rows, systems, lambda f: f.speedup and (f.speedup.value, f.speedup.low, f.speedup.high)
    )
    axes.axvline(1, color=GREY, linewidth=1.5, linestyle="--")
    axes.set_xlabel(f"times as fast as {results.baseline}, end to end (dashed: as fast)")
    axes.set_xlim(left=min(0.5, axes.get_xlim()[0]))
    return figure


def _rates(results: Results, rows: Rows) -> Any:
    figure, axes = _by_dataset(results, rows, list(results.systems), lambda f: f.rate and (f.rate, None, None))
    axes.set_xlabel("tokens per second, end to end")
    axes.set_xlim(left=0)
    return figure


def _drafting(rows: Rows, has: Callable[[Figures], Any]) -> dict[str, Figures]:
    """Over all data sets, the systems that draft and have something to show."""
    return {name: found for name, found in list(rows.values())[-1].items() if has(found)}


def _histogram(results: Results, rows: Rows) -> Any:
    shown = _drafting(rows, lambda f: len(f.histogram) > 1)
    if not shown:
        return None
    figure, panels = _new(3.6 * len(shown) + 0.6, 3.4, len(shown))
    for axes, (name, found) in zip(panels, shown.items()):
        colour, _ = _style(results, name)
        axes.bar(range(1, len(found.histogram) + 1), [100 * share for share in found.histogram], color=colour)
        axes.axvline(found.acceptance_length, color="black", linestyle="--", linewidth=1.2)
        axes.set_title(f"{name}: {found.acceptance_length:.2f} on average", fontsize=10)
        axes.set_xlabel("tokens of a round (dashed: average)")
        _whole_ticks(axes, len(found.histogram))
    panels[0].set_ylabel("rounds (%)")
    return figure


def _positions(results: Results, rows: Rows) -> Any:
    shown = _drafting(rows, lambda f: f.by_position or f.server_by_position)
    if not shown:
        return None
    figure, (axes,) = _new(7, 3.8)
    longest = 1
    for name, found in shown.items():
        colour, marker = _style(results, name)
        shares = found.by_position or found.server_by_position
        longest = max(longest, len(shares))
        axes.plot(range(1, len(shares) + 1), [100 * share for share in shares], color=colour, marker=marker, label=name)
    axes.set(xlabel="position in the block (1: the first proposal)", ylabel="stood, of the rounds that tested it (%)")
    axes.set_ylim(0, 100)
    _whole_ticks(axes, longest)
    axes.legend(frameon=False)
    return figure


def _whole_ticks(axes: Any, longest: int) -> None:
    step = math.ceil(longest / 16)
    axes.set_xticks(range(1, longest + 1, step))


def _round_time(results: Results, rows: Rows) -> Any:
    shown = _drafting(rows, lambda f: f.round_time)
    if not shown:
        return None
    figure, (axes,) = _new(8, 1.5 + 0.5 * len(shown))
    names = list(shown)
    left = [0.0] * len(names)
    parts = (("draft", COLOURS[0], "//"), ("verify", COLOURS[4], ""), ("host", COLOURS[2], ".."))
    for part, colour, hatch in parts:
        widths = [getattr(shown[name].round_time, part) for name in names]
        axes.barh(names, widths, left=left, color=colour, edgecolor="white", hatch=hatch, height=0.6, label=part)
        left = [a + b for a, b in zip(left, widths)]
    for at, name in enumerate(names):
        tokens = shown[name].acceptance_length
        per_token = "" if tokens is None else f", {left[at] / tokens:.1f} a token"
        axes.annotate(
            f"{left[at]:.1f} ms{per_token}", (left[at], at), (6, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds a round")
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
