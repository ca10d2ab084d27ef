"""Where prompts come from: sets of the hub by name, the samples that ship with this package, JSONL files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import packages
from dflash.benchmark.answers import digest
from dflash.benchmark.results import ALL
from dflash.errors import RequestError
from dflash.text import is_unicode
from dflash.train.prompts import Conversation, read_prompts, spread

SAMPLES = Path(__file__).parent / "data"
SAMPLE = "-sample"
"""A name with this ending asks for the sample that ships, whatever could be fetched."""


@dataclass(frozen=True)
class Hub:
    """A data set of the hub.

    Attributes:
        turns: the user's messages of a row.
    """

    repository: str
    config: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]


def _humaneval(row: Mapping[str, Any]) -> list[str]:
    return [f"Complete this Python function:\n```python\n{row['prompt'].strip()}\n```"]


def _mbpp(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['text']} It must pass these tests:\n" + "\n".join(row["test_list"])]


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return ["\n\n".join(part for part in (row["instruction"], row["input"]) if part)]


HUB = {
    "gsm8k": Hub("openai/gsm8k", "main", "test", lambda row: [row["question"]]),
    "math500": Hub("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"]]),
    "humaneval": Hub("openai/openai_humaneval", None, "test", _humaneval),
    "mbpp": Hub("google-research-datasets/mbpp", None, "test", _mbpp),
    "mt-bench": Hub("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
    "alpaca": Hub("tatsu-lab/alpaca", None, "train", _alpaca),
}


@dataclass(frozen=True)
class Dataset:
    """The prompts of a run.

    Attributes:
        name: in tables; the same set from elsewhere has the same name.
        source: where they were read.
        talks: turns by index in the source.
        note: what the user should know about them.
    """

    name: str
    source: str
    talks: dict[int, tuple[str, ...]]
    note: str | None = None

    def describe(self) -> dict[str, Any]:
        """For records: equal for equal prompts."""
        return {"source": self.source, "prompts": len(self.talks), "digest": digest(sorted(self.talks.items()))}


def one_prompt(text: str) -> Dataset:
    """A set of one.

    Raises:
        RequestError: it is not valid Unicode.
    """
    if not is_unicode(text):
        raise RequestError("--prompt is not valid Unicode text (it has half a surrogate pair)")
    return Dataset("prompt", "--prompt", {0: (text,)})


def read(name: str, max_samples: int | None = None) -> Dataset:
    """Prompts by name or from a file; ``max_samples`` of them, spread evenly over the whole.

    A name stands for the set of the hub where that can be fetched, else for the sample that ships.

    Raises:
        RequestError: nothing there, or it cannot be read.
    """
    sample = SAMPLES / f"{name.removesuffix(SAMPLE)}.jsonl"
    if name.endswith(SAMPLE):
        if not sample.is_file():
            shipped = ", ".join(sorted(file.stem + SAMPLE for file in SAMPLES.glob("*.jsonl")))
            raise RequestError(f"no {name} ships with this package: there are {shipped}")
        return _file(name.removesuffix(SAMPLE), sample, max_samples)
    if name not in HUB:
        return _file(Path(name).stem, Path(name), max_samples)
    try:
        return _fetched(name, HUB[name], max_samples)
    except RequestError as error:
        if not sample.is_file():
            raise
        note = f"{name}: the sample that ships is used, for the whole set could not be fetched ({error})"
        return _file(name, sample, max_samples, note)


def _file(name: str, file: Path, max_samples: int | None, note: str | None = None) -> Dataset:
    if not file.expanduser().is_file() and file.suffix:
        raise RequestError(f"{file} does not exist: give a JSONL file, or one of {', '.join(HUB)}")
    if name == ALL:
        raise RequestError(f"{file}: a data set cannot be called {ALL}, as the line over all sets is: rename the file")
    prompts = read_prompts(file)
    if prompts.skipped:
        reasons = ", ".join(f"{count} with {reason}" for reason, count in prompts.skipped.items())
        note = f"{file}: rows skipped: {reasons}"
    source = f"dflash/{file.name}" if file.parent == SAMPLES else str(file)
    return _chosen(name, source, prompts.conversations, max_samples, note)


def _chosen(
    name: str, source: str, conversations: list[Conversation], max_samples: int | None, note: str | None = None
) -> Dataset:
    return Dataset(name, source, {one.index: one.turns for one in spread(conversations, max_samples)}, note)


def _fetched(name: str, hub: Hub, max_samples: int | None) -> Dataset:
    """A set of the hub.

    Raises:
        RequestError: ``datasets`` is not installed, or it does not get it.
    """
    packages.need(("datasets",), f"to fetch {hub.repository}")
    import datasets

    try:
        rows = datasets.load_dataset(hub.repository, hub.config, split=hub.split)
    except (OSError, ValueError) as error:
        raise RequestError(f"{hub.repository} could not be fetched: {' '.join(str(error).split())}") from error
    conversations = [Conversation(i, name, tuple(hub.turns(row))) for i, row in enumerate(rows)]
    return _chosen(name, f"{hub.repository} ({hub.split})", conversations, max_samples)
