"""The run: systems interleaved prompt by prompt, so that what else the machine does hits all alike.

Every answer goes to disk at once, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dflash import jsontext
from dflash.benchmark.answers import Record
from dflash.benchmark.datasets import Dataset
from dflash.benchmark.parallel import Share
from dflash.benchmark.systems import System, Talk
from dflash.errors import DFlashError, RequestError

TalkKey: TypeAlias = tuple[str, str, int, int]
"""System, data set, prompt, repeat."""

JOURNAL = "records-{rank}.jsonl"


@dataclass
class Journal:
    """The records of a run so far, on disk where there is a folder.

    Attributes:
        records: of this run and the ones before it.
        starts: how often the run was started before.
    """

    folder: Path | None
    settings: dict[str, Any]
    share: Share
    records: list[Record] = field(default_factory=list)
    starts: int = 0

    @classmethod
    def open(cls, folder: Path | None, settings: dict[str, Any], share: Share) -> Journal:
        """Go on with what is in the folder, or begin.

        Raises:
            RequestError: the folder holds a run with other settings, or something else.
        """
        journal = cls(folder, settings, share)
        if folder is None:
            return journal
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.glob(JOURNAL.format(rank="*"))):
            journal._read(file)
        journal._write({"settings": settings})
        return journal

    @property
    def lane(self) -> str:
        """Names this process and this start."""
        return f"{self.share.rank}.{self.starts}"

    def done(self) -> set[TalkKey]:
        """Conversations that were had."""
        return {record.talk for record in self.records}

    def add(self, records: Sequence[Record]) -> None:
        """One conversation: all its answers or none."""
        self._write({"records": [record.to_json() for record in records]})
        self.records += records

    def _write(self, value: dict[str, Any]) -> None:
        if self.folder is None:
            return
        with (self.folder / JOURNAL.format(rank=self.share.rank)).open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")

    def _read(self, file: Path) -> None:
        data = file.read_bytes()
        own = file.name == JOURNAL.format(rank=self.share.rank)
        if own and not data.endswith(b"\n"):  # stopped in the middle of a line: that conversation is had again
            data = data[: data.rfind(b"\n") + 1]
            file.write_bytes(data)
        for line in data.split(b"\n")[:-1]:  # the last is empty, or being written by another process
            try:
                settings, records = _parsed(line)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise RequestError(f"{file} is no journal of a benchmark ({error!r}): give another --output") from error
            if settings is not None:
                refuse_others(file.parent, settings, self.settings)
                self.starts += own
            self.records += records


def _parsed(line: bytes) -> tuple[dict[str, Any] | None, list[Record]]:
    """The settings on a line of a journal, or the records.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: it is something else.
    """
    value = jsontext.parse(line.decode("utf-8"))
    if "settings" in value:
        return dict(value["settings"]), []
    return None, [Record.from_json(one) for one in value["records"]]


def refuse_others(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Only a run with the same settings can be gone on with.

    Raises:
        RequestError: naming what differs.
    """
    wanted = json.loads(json.dumps(wanted))
    other = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if other:
        name = other[0]
        raise RequestError(
            f"{folder} holds a run with other settings ({name} {found.get(name)!r} there, {wanted.get(name)!r} now): "
            "give another --output, or the same settings to go on"
        )


Show: TypeAlias = Callable[[int, int, str], None]
"""Conversations had, all of them, and what comes next."""


@dataclass
class Run:
    """What is to be measured.

    Attributes:
        repeats: how often each prompt is answered by each system.
        seed: of sampling. Each prompt and repeat has its own, the same for all systems.
    """

    datasets: Sequence[Dataset]
    systems: Sequence[System]
    repeats: int = 1
    seed: int = 0

    def keys(self, share: Share) -> list[TalkKey]:
        """All conversations of this process."""
        return [
            (system.name, dataset.name, index, repeat)
            for dataset, repeat, indices in self._units(share)
            for system in self.systems
            for index in indices
        ]

    def __call__(self, journal: Journal, show: Show) -> None:
        """Have all conversations that were not had yet. Interrupted, what was measured is in the journal."""
        wanted = self.keys(journal.share)
        missing = set(wanted) - journal.done()
        warm: set[str] = set()
        for number, (dataset, repeat, indices) in enumerate(self._units(journal.share)):
            for system in _rotated(self.systems, number):
                left = [i for i in indices if (system.name, dataset.name, i, repeat) in missing]
                for at in range(0, len(left), system.at_once):
                    some = left[at : at + system.at_once]
                    if system.name not in warm:
                        warm.add(system.name)
                        show(len(wanted) - len(missing), len(wanted), f"warming up {system.name}")
                        with suppress(DFlashError):  # what cannot be asked is told by the records
                            system.warm_up(dataset.talks[some[0]][0])
                    show(len(wanted) - len(missing), len(wanted), f"{dataset.name}, {system.name}")
                    for records in self._records(journal.lane, system, dataset, repeat, some):
                        journal.add(records)
                        missing -= {records[0].talk}
        show(len(wanted) - len(missing), len(wanted), "")

    def _units(self, share: Share) -> Iterator[tuple[Dataset, int, list[int]]]:
        """Prompts that all systems answer before the next ones come: as many as the widest takes at once."""
        width = max(system.at_once for system in self.systems)
        for dataset in self.datasets:
            own = list(dataset.talks)[share.rank :: share.world]
            for at in range(0, len(own), width):
                for repeat in range(self.repeats):
                    yield dataset, repeat, own[at : at + width]

    def _records(
        self, lane: str, system: System, dataset: Dataset, repeat: int, indices: list[int]
    ) -> Iterator[list[Record]]:
        talks = [
            Talk(dataset.talks[i], self._seed_of(dataset.name, i, repeat), dataset.openings.get(i, ())) for i in indices
        ]
        for at, answers in system.converse(talks):
            yield [
                Record(system.name, dataset.name, indices[at], turn, repeat, lane, answer)
                for turn, answer in enumerate(answers)
            ]

    def _seed_of(self, dataset: str, index: int, repeat: int) -> int:
        return random.Random(f"{self.seed} {dataset} {index} {repeat}").getrandbits(32)


def _rotated(systems: Sequence[System], by: int) -> list[System]:
    """Each prompt begins with another system: none always comes first."""
    by %= len(systems)
    return [*systems[by:], *systems[:by]]
