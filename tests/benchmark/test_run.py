"""The run: interleaved, on disk at once, gone on with where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakesystem import FakeClock, FakeSystem
from typer.testing import CliRunner

from dflash.benchmark import datasets
from dflash.benchmark.answers import Answer, Record
from dflash.benchmark.datasets import Dataset
from dflash.benchmark.parallel import Share
from dflash.benchmark.run import Journal, Run
from dflash.benchmark.systems import Talk
from dflash.cli.main import app
from dflash.errors import RequestError

SETTINGS = {"model": "m", "max_new_tokens": 4}


class Recorder(FakeSystem):
    """Notes the order of all systems' work in one list."""

    def __init__(self, name: str, order: list[str], at_once: int = 1, stop_after: int | None = None) -> None:
        super().__init__(name, FakeClock(), [(1, 3)], 1, 1, 1, 1, at_once=at_once)
        self.order = order
        self.stop_after = stop_after

    def converse(self, talks: Sequence[Talk]) -> Iterator[tuple[int, list[Answer]]]:
        self.order.append(f"{self.name}: {'+'.join(talk.turns[0] for talk in talks)}")
        for done in super().converse(talks):
            if self.stop_after is not None and len(self.asked) > self.stop_after:
                raise KeyboardInterrupt
            yield done


def data(*names: str) -> Dataset:
    return Dataset("set", "here", {i: (name,) for i, name in enumerate(names)})


def quiet(done: int, total: int, figures: str) -> None:
    """Nothing is shown."""


def test_systems_take_turns_prompt_by_prompt_and_none_always_comes_first() -> None:
    order: list[str] = []
    systems = [Recorder(name, order) for name in "ABC"]
    shown: list[tuple[int, int]] = []
    Run([data("x", "y")], systems, repeats=2)(Journal(None, {}, Share()), lambda d, t, _: shown.append((d, t)))
    assert order == [
        "A: x", "B: x", "C: x", "B: x", "C: x", "A: x", "C: y", "A: y", "B: y", "A: y", "B: y", "C: y",
    ]  # fmt: skip
    assert [system.warmed for system in systems] == [1, 1, 1]
    assert shown[-1] == (12, 12)


def test_a_system_that_takes_several_at_once_is_given_several() -> None:
    order: list[str] = []
    Run([data("v", "w", "x")], [Recorder("one", order), Recorder("two", order, at_once=2)])(
        Journal(None, {}, Share()), quiet
    )
    assert order == ["one: v", "one: w", "two: v+w", "two: x", "one: x"]


def test_all_systems_and_no_two_prompts_share_a_seed() -> None:
    run = Run([data("x", "y")], [], repeats=2, seed=1)
    seeds = [run._seed_of("set", i, repeat) for i in range(2) for repeat in range(2)]
    assert len(set(seeds)) == 4
    assert seeds != [Run([], [], seed=2)._seed_of("set", i, repeat) for i in range(2) for repeat in range(2)]


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    order: list[str] = []
    run = Run([data("x", "y", "z")], [Recorder("A", order), Recorder("B", order, stop_after=1)])
    journal = Journal.open(tmp_path, SETTINGS, Share())
    with pytest.raises(KeyboardInterrupt):
        run(journal, quiet)
    assert len(journal.records) == 2
    with (tmp_path / "records-0.jsonl").open("a") as file:
        file.write('{"records": [{"system": "B", "da')  # stopped while writing

    again: list[str] = []
    journal = Journal.open(tmp_path, SETTINGS, Share())
    Run([data("x", "y", "z")], [Recorder("A", again), Recorder("B", again)])(journal, quiet)
    assert order == ["A: x", "B: x", "B: y"]
    assert again == ["B: y", "A: y", "A: z", "B: z"]
    keys = [record.talk for record in journal.records]
    assert len(keys) == len(set(keys)) == 6
    assert {record.lane for record in journal.records} == {"0.0", "0.1"}, "clocks of different starts do not compare"

    done: list[str] = []
    finished = Journal.open(tmp_path, SETTINGS, Share())
    systems = [Recorder("A", done), Recorder("B", done)]
    Run([data("x", "y", "z")], systems)(finished, quiet)
    assert done == [] and systems[0].warmed == 0
    assert [r.to_json() for r in finished.records] == [r.to_json() for r in journal.records]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Journal.open(tmp_path, SETTINGS, Share())
    with pytest.raises(RequestError, match=r"other settings \(max_new_tokens 4 there, 5 now\)"):
        Journal.open(tmp_path, {**SETTINGS, "max_new_tokens": 5}, Share())
    with pytest.raises(RequestError, match=r"other settings \(block_size None there, 8 now\)"):
        Journal.open(tmp_path, {**SETTINGS, "block_size": 8}, Share())
    (tmp_path / "records-0.jsonl").write_text("something else\n")
    with pytest.raises(RequestError, match="no journal of a benchmark"):
        Journal.open(tmp_path, SETTINGS, Share())


ANSWER = '{"began": 0, "first": 1, "seconds": 1, "count": 1}'
WHERE = '"system": "A", "dataset": "set", "prompt": 0, "turn": 0, "repeat": 0, "lane": "0.0"'


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe{}", b"[]", b"7", b"[" * 100_000, b'{"settings": "x"}', b'{"settings": 1}', b'{"records": 1}',
        b'{"records": ["x"]}', f'{{"records": [{{{WHERE}, "answer": "x"}}]}}'.encode(),
        f'{{"records": [{{{WHERE}, "answer": {ANSWER.replace("1}", "null}")}}}]}}'.encode(),
        f'{{"records": [{{{WHERE.replace("0,", "[0],")}, "answer": {ANSWER}}}]}}'.encode(),
        f'{{"records": [{{{WHERE}, "answer": {ANSWER[:-1]}, "split": 3}}}}]}}'.encode(),
    ],
)  # fmt: skip
def test_what_is_no_journal_is_refused_in_a_sentence(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "records-0.jsonl").write_bytes(line + b"\n")
    with pytest.raises(RequestError, match="no journal of a benchmark"):
        Journal.open(tmp_path, SETTINGS, Share())


def test_a_run_stopped_in_the_middle_of_a_character_goes_on(tmp_path: Path) -> None:
    Journal.open(tmp_path, SETTINGS, Share())
    with (tmp_path / "records-0.jsonl").open("ab") as file:
        file.write('{"records": [{"text": "\u00e9'.encode()[:-1])
    assert Journal.open(tmp_path, SETTINGS, Share()).starts == 1


def test_text_of_all_kinds_survives_the_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, SETTINGS, Share())
    answer = Answer(0.0, 1.0, 2.0, 1, text="a\u2028b\u0085c\nd \x00 é 𝄞", tokens=(1,))
    journal.add([Record("A", "set", 0, 0, 0, "0.0", answer)])
    assert Journal.open(tmp_path, SETTINGS, Share()).records == journal.records


def test_processes_share_the_prompts(tmp_path: Path) -> None:
    """Also when the second run has another number of them."""
    order: list[str] = []
    shares = [Share(rank, 3) for rank in range(3)]
    for share in shares[:2]:
        run = Run([data(*"abcdefg")], [Recorder("A", order)])
        run(Journal.open(tmp_path, SETTINGS, share), quiet)
    assert order == ["A: a", "A: d", "A: g", "A: b", "A: e"]
    run = Run([data(*"abcdefg")], [Recorder("A", order)])
    last = Journal.open(tmp_path, SETTINGS, Share())
    run(last, quiet)
    assert order[5:] == ["A: c", "A: f"]
    assert sorted(record.prompt for record in last.records) == list(range(7))
    assert {record.lane for record in last.records} == {"0.0", "0.1", "1.0"}


def test_a_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    share = Share.of_environment()
    assert share == Share(3, 4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    asked: list[str | None] = []

    def load(wanted: Any) -> Any:
        asked.append(wanted.device)
        raise KeyboardInterrupt

    monkeypatch.setattr("dflash.cli.benchmark.load_pair", load)
    for device in ("torch", "torch --device cuda", "torch --device cpu", "mlx"):
        arguments = ["benchmark", "--prompt", "x", "--draft-model", "d", "--backend", *device.split()]
        assert CliRunner().invoke(app, arguments).exit_code == 130
    assert asked == ["cuda:3", "cuda:3", "cpu", None], "cuda is PyTorch's name for a GPU"


# --- prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rows", "turns"), [("gsm8k", 100, 1), ("humaneval", 60, 1), ("mt-bench", 40, 2)])
def test_samples_ship(name: str, rows: int, turns: int) -> None:
    found = datasets.read(f"{name}-sample")
    assert (found.name, len(found.talks), found.note) == (name, rows, None)
    assert {len(talk) for talk in found.talks.values()} == {turns}
    some = datasets.read(f"{name}-sample", 5)
    assert list(some.talks) == [i * rows // 5 for i in range(5)], "spread over the whole"
    assert some.describe() != found.describe()


def test_without_a_hub_a_name_stands_for_its_sample_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = datasets.read("gsm8k", 3)
    assert found.source == "dflash/gsm8k.jsonl" and "the sample that ships is used" in str(found.note)
    with pytest.raises(RequestError, match="datasets is not installed"):
        datasets.read("math500")


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        ("gsm8k", {"question": "q", "answer": "a"}, ("q",)),
        ("math500", {"problem": "p"}, ("p",)),
        ("humaneval", {"prompt": "def f():\n"}, ("Complete this Python function:\n```python\ndef f():\n```",)),
        ("mbpp", {"text": "Do it.", "test_list": ["assert a", "assert b"]},
         ("Do it. It must pass these tests:\nassert a\nassert b",)),
        ("mt-bench", {"prompt": ["one", "two"]}, ("one", "two")),
        ("alpaca", {"instruction": "i", "input": "x"}, ("i\n\nx",)),
        ("alpaca", {"instruction": "i", "input": ""}, ("i",)),
    ],
)  # fmt: skip
def test_sets_of_the_hub(
    name: str, row: dict[str, Any], turns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for ``datasets``: its columns become turns."""
    import sys
    from types import ModuleType

    asked: list[Any] = []
    module = ModuleType("datasets")
    module.load_dataset = lambda *args, **kw: (asked.append((args, kw)), [row] * 4)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    found = datasets.read(name, 2)
    assert found.talks == {0: turns, 2: turns} and found.note is None
    assert asked[0][0][0] == datasets.HUB[name].repository


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [{"turns": ["a", "b"]}] * 18 + [{"prompt": "c"}, {"messages": [{"role": "user", "content": "d"}]}, {"x": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = datasets.read(str(file))
    assert (found.name, len(found.talks)) == ("mine", 20)
    assert "1 with none of the fields" in str(found.note), "rows that cannot be used are told"
    with pytest.raises(RequestError, match="does not exist"):
        datasets.read("/nowhere/prompts.jsonl")
    with pytest.raises(RequestError, match="no alpaca-sample ships"):
        datasets.read("alpaca-sample")


@pytest.mark.parametrize("escape", ["../x/evil", "./gsm8k", "", "sub/../gsm8k", "{absolute}/evil"])
def test_a_sample_is_one_that_ships_and_never_a_path(
    escape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are there, and would be read if the name became part of a path."""
    for folder in ("data", "x", "data/sub"):
        (tmp_path / folder).mkdir()
    for name in ("data/gsm8k", "x/evil", "evil", "data/"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "secret"}\n')
    monkeypatch.setattr(datasets, "SAMPLES", tmp_path / "data")
    with pytest.raises(RequestError, match="ships with this package: there are"):
        datasets.read(escape.format(absolute=tmp_path) + "-sample")
    assert datasets.read("gsm8k-sample").talks == {0: ("secret",)}


def test_no_set_is_called_as_the_line_over_all(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(RequestError, match="cannot be called all"):
        datasets.read(str(tmp_path / "all.jsonl"))


def test_half_a_pair_of_surrogates_is_no_prompt(tmp_path: Path) -> None:
    """Nor does a byte order mark cost the first row."""
    file = tmp_path / "mine.jsonl"
    rows = ['{"turns": ["first"]}', '{"turns": ["a \\ud83d b"]}', *['{"prompt": "\\ud83d\\ude00"}'] * 18]
    file.write_text("\ufeff" + "\n".join(rows), encoding="utf-8")
    found = datasets.read(str(file))
    assert found.talks[0] == ("first",) and found.talks[2] == ("\U0001f600",) and 1 not in found.talks
    assert "1 with text that is not valid Unicode (half a surrogate pair)" in str(found.note)
    with pytest.raises(RequestError, match="--prompt is not valid Unicode"):
        datasets.one_prompt("\udcff")
