"""``training.png``: loss and acceptance over a run, read from its log."""

from __future__ import annotations

from pathlib import Path

from dflash import packages
from dflash.train.loop import read_log


def plot_run(log: Path, picture: Path) -> None:
    """Draw the curves of ``log.jsonl``.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    packages.need(("matplotlib",), "to draw training.png")
    from matplotlib.figure import Figure

    records = read_log(log)
    steps = [r for r in records if "loss" in r]
    measured = [r for r in records if "measured" in r]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    at = [r["step"] for r in steps]
    left.plot(at, [r["loss"] for r in steps], color="#0072B2", linewidth=1)
    left.set(title="Loss on what is learned from", xlabel="step", ylabel="weighted loss a slot (nats)")
    middle.plot(at, [r["acceptance"] for r in steps], color="#999999", linewidth=1, label="training blocks")
    middle.plot(
        [r["step"] for r in measured],
        [r["measured"]["length"] for r in measured],
        color="#D55E00",
        marker="o",
        markersize=3,
        label="held-out answers, as decoded",
    )
    middle.set(title="Acceptance length", xlabel="step", ylabel="tokens a round")
    middle.legend(frameon=False)
    if measured:
        last = measured[-1]["measured"]["by_position"]
        right.bar(range(1, len(last) + 1), [100 * p for p in last], color="#009E73")
        right.set(title=f"Held out, at step {measured[-1]['step']}", xlabel="slot of the block", ylim=(0, 100))
        right.set_ylabel("rounds in which it stands (%)")
    for axes in (left, middle, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=130)
