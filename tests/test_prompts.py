"""Files of prompts: what kind they are, what of a row is asked, and what is refused, the same for every command."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tiny
from dflash.benchmark import datasets
from dflash.cli.prompts import Question, as_asked, read_file
from dflash.errors import RequestError
from dflash.prompts import Conversation, read_prompts

ROWS: list[Any] = [{"turns": ["a", "b"]}, {"prompt": "c"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
WANTED = [("a", "b"), ("c",)]

KINDS = {
    "p.jsonl": LINES,
    "p.ndjson": LINES,
    "p.jsonlines": LINES,
    "p.JSONL": LINES,
    "p.jsonl.gz": gzip.compress(LINES),
    "P.JSONL.GZ": gzip.compress(LINES),
    "packed.jsonl": gzip.compress(LINES),
    "p.json": json.dumps(ROWS).encode(),
    "indented.json": json.dumps(ROWS, indent=2).encode(),
    "indented.jsonl": json.dumps(ROWS, indent=2).encode(),
    "lines.json": LINES,
    "p.txt": LINES,
    "array.txt": json.dumps(ROWS, indent=1).encode(),
    "p": LINES,
    "p.dat": LINES,
    "p.jsonl.bak": LINES,
    "windows.jsonl": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "blank.jsonl": b"\n\n" + LINES.replace(b"\n", b"\n\n\n"),
}


@pytest.mark.parametrize("name", KINDS)
def test_json_is_told_by_its_content_in_every_reader(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(KINDS[name])
    assert [one.turns for one in read_prompts(file).conversations] == WANTED
    assert [one.text for one in read_file(file)] == ["a", "c"]
    assert list(datasets.read(str(file)).talks.values()) == WANTED


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("p.txt", b"first\n\n\nsecond\n", ["first", "second"]),
        ("P.TXT", "\ufefféé\r\nzwei\r\n".encode(), ["éé", "zwei"]),
        ("p", b"one\rtwo", ["one", "two"]),
        ("p.txt.gz", gzip.compress(b"one\ntwo\n"), ["one", "two"]),
        ("p.txt", b"[1, 2, 3]\n[4]\n", ["[1, 2, 3]", "[4]"]),
        ("p.txt", b"text\n" * 9 + b'{"prompt": "x"}\n', ["text"] * 9 + ['{"prompt": "x"}']),
        ("p.txt", b"[1, 2, 3]\n", ["[1, 2, 3]"]),
        ("p.txt", "a\u2028b\n".encode(), ["a\u2028b"]),
        ("p.csv", b'id,prompt\n1,"one, two"\n2,"three\nfour"\n', ["one, two", "three\nfour"]),
        ("p.CSV", b"prompt\n7\n", ["7"]),
        ("p.tsv", b"question\tx\nwhy\t1\n", ["why"]),
        ("p.csv", b'id,prompt\n1,"say ""a, b"""\n2,5" wide\n', ['say "a, b"', '5" wide']),
        ("p.csv", b"id,prompt\n1,a,\n2,b,,\n", ["a", "b"]),
        ("p.csv", b'id,prompt\n1,"' + b"x, " * 100_000 + b'y"\n', ["x, " * 100_000 + "y"]),
    ],
)
def test_text_lines_and_cells(tmp_path: Path, name: str, content: bytes, wanted: list[str]) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert [one.turns for one in read_prompts(file).conversations] == [(text,) for text in wanted]
    assert [one.text for one in read_file(file)] == wanted
    assert list(datasets.read(str(file)).talks.values()) == [(text,) for text in wanted]


REFUSED = {
    "p.txt": (b"one\ntw\x00o\n", "is binary data"),
    "p.jsonl": (LINES + b"\x01", "is binary data"),
    "latin.txt": ("é\n".encode("latin-1"), "is not UTF-8 text"),
    "utf16.jsonl": (LINES.decode().encode("utf-16"), "is not UTF-8 text"),
    "p.pkl": (pickle.dumps(ROWS), "is not UTF-8 text|is binary data"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is not UTF-8 text"),
    "model.safetensors": (b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", "is binary data"),
    "p.zip": (b"PK\x03\x04\x14\x00\x00\x00", "is binary data"),
    "packed.txt.gz": (gzip.compress(bytes(range(256))), "is not UTF-8 text"),
    "cut.jsonl.gz": (gzip.compress(LINES * 100)[:60], "cannot read .*cut.jsonl.gz: "),
    "no.parquet": (b"some words\n", "is not a file of prompts"),
    "notes.md": (b"# Title\n\nSome prose.\n", "is not a file of prompts"),
    "script.py": (b"import os\n", "is not a file of prompts"),
    "p.yaml": (b"prompts:\n  - one\n", "is not a file of prompts"),
    "empty.jsonl": (b"", "has no prompts"),
    "blank.txt": (b"\n \n", "has no prompts"),
    "prose.jsonl": (b"one\ntwo\n", "2 of 2 rows cannot be used: not JSON"),
    "empty.json": (b"[]", "has no prompts: it is empty"),
    "only a header.csv": (b"id,prompt\n", "has no prompts: it is empty"),
    "torn.txt": (LINES + b'{"turns": ["a"\n', r"1 of 3 rows cannot be used: not JSON \(1, first in line 3\)"),
    "torn": (b'{"turns": ["a"\n' + LINES, r"1 of 3 rows cannot be used: not JSON \(1, first in line 1\)"),
    "mixed.txt": (b"text\n" * 4 + LINES, r"mixes JSON objects with other lines \(2 of 6 are objects\)"),
    "halves.txt": (b'[1, 2, 3]\n{"prompt": "x"}\n', r"mixes JSON objects with other lines \(1 of 2 are objects\)"),
    "commas.csv": (
        b"id,prompt\n1,one, two\n2,a\n",
        "1 of 2 rows cannot be used: more cells than the header has: quote",
    ),
    "quotes.csv": (
        b'id,prompt\n1,"one" two\n',
        r"cannot be read as a table of cells \(after line 1: .*double the quotes",
    ),
    "open.tsv": (
        b'id\tprompt\n1\t"one\n2\ttwo\n',
        r"cannot be read as a table of cells \(after line 1: unexpected end",
    ),
    "twice.csv": (b"prompt,prompt\na,b\n", "two columns of one name"),
    "semicolons.csv": (
        b"id;prompt\n1;a\n",
        r"it has 'id;prompt': the first line must name the columns, and cells be separated by ',' \(1, first in ",
    ),
    "unknown.jsonl": (
        b'{"text": "a", "n": 1}\n',
        "none of the fields turns, messages, .*, prompt, question, instruction; it has 'text', 'n'",
    ),
    "header.csv": (b"title,body\na,b\n", "1 of 1 rows cannot be used"),
    "deep.jsonl": (b"[" * 200_000 + b"]" * 200_000 + b"\n", "1 of 1 rows cannot be used: not JSON"),
    "deep.txt.jsonl": (LINES + b'{"turns": ' * 100_000 + b"\n", "1 of 3 rows cannot be used: not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_file_of_prompts_is_one_sentence_in_every_reader(tmp_path: Path, name: str) -> None:
    content, why = REFUSED[name]
    file = tmp_path / name
    file.write_bytes(content)
    for read in (read_prompts, read_file, lambda one: datasets.read(str(one))):
        with pytest.raises(RequestError, match=why) as caught:
            read(file)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.jsonl").mkdir()
    for name, why in (
        ("pipe.jsonl", "is a pipe"),
        ("loop.jsonl", "a broken link"),
        ("dangling.jsonl", "a broken link"),
        ("folder.jsonl", "is a folder"),
        ("none.jsonl", "does not exist"),
        ("none.parquet", "does not exist"),
        ("none", "does not exist"),
        ("../none", "does not exist"),
        ("x" * 5000 + ".jsonl", "does not exist"),
    ):
        for read in (read_prompts, read_file, lambda one: datasets.read(str(one))):
            with pytest.raises(RequestError, match=why):
                read(tmp_path / name)
    for empty in ("", "  "):
        with pytest.raises(RequestError, match="empty"):
            read_prompts(empty)
        with pytest.raises(RequestError, match="empty"):
            datasets.read(empty)


TABLES = {"p.parquet": b"PAR1\x15\x04", "P.dat": b"PAR1\x15\x04", "p.arrow": b"ARROW1\0\0", "s.arrow": b"\xff" * 8}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With a stand-in for ``datasets``."""
    file = tmp_path / "a[1]*" / name
    file.parent.mkdir()
    file.write_bytes(TABLES[name])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"datasets is not installed, but needed to read .*: pip install") as caught:
        read_prompts(file)
    assert str(file) in str(caught.value)

    asked: list[Any] = []
    module = ModuleType("datasets")
    module.load_dataset = lambda *args, **kw: (asked.append((args, kw)), iter(ROWS))[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert [one.turns for one in read_prompts(file).conversations] == WANTED
    [((kind,), options)] = asked
    assert kind == ("arrow" if name.endswith("arrow") else "parquet")
    assert options["data_files"] == str(file).replace("[", "[[]").replace("*", "[*]"), "a name, not a pattern"


def test_tables_as_datasets_itself_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets")
    parquet, ipc, table = (pytest.importorskip(name) for name in ("pyarrow.parquet", "pyarrow.ipc", "pyarrow"))
    rows = table.table({"prompt": ["a", None], "messages": [None, [{"role": "user", "content": "b"}]]})
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    parquet.write_table(rows, folder / "p.parquet")
    for name, writer in (("p.arrow", ipc.new_file), ("s.arrow", ipc.new_stream)):
        with writer(folder / name, rows.schema) as out:
            out.write_table(rows)
    for name in ("p.parquet", "p.arrow", "s.arrow"):
        assert [one.turns for one in read_prompts(folder / name).conversations] == [("a",), ("b",)]
    (folder / "torn.parquet").write_bytes(b"PAR1 and nothing else")
    capsys.readouterr()
    with pytest.raises(RequestError, match=r"torn.parquet cannot be read: "):
        read_prompts(folder / "torn.parquet")
    assert capsys.readouterr().err == "", "it is said once"


@pytest.mark.parametrize("name", ["p.txt", "p", "p.dat"])
def test_a_torn_line_does_not_make_prompts_of_json(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(LINES * 10 + b'{"turns": ["a"\n')
    read = read_prompts(file)
    assert [one.turns for one in read.conversations] == WANTED * 10
    assert read.skipped == {"not JSON": 1}


# --- rows -------------------------------------------------------------------------------------------


def one_row(tmp_path: Path, row: Any) -> Conversation:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(row) + "\n")
    [found] = read_prompts(file).conversations
    return found


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("row", "turns", "opening"),
    [
        ({"instruction": "Sum up.", "input": "A text."}, ["Sum up.\n\nA text."], []),
        ({"instruction": "Sum up.", "context": "A text.", "response": "r"}, ["Sum up.\n\nA text."], []),
        ({"question": "q", "input": "i", "context": "c"}, ["q\n\ni\n\nc"], []),
        ({"instruction": "Go.", "input": "", "context": None}, ["Go."], []),
        ({"prompt": None, "question": None, "instruction": "x"}, ["x"], []),
        ({"system_prompt": "S", "question": "q"}, ["q"], [said("system", "S")]),
        ({"system": "S", "instruction": "q", "input": "i"}, ["q\n\ni"], [said("system", "S")]),
        ({"system": "", "prompt": "q"}, ["q"], []),
        ({"messages": [said("system", "S"), said("user", "q")]}, ["q"], [said("system", "S")]),
        (
            {"messages": [said("developer", "D"), said("user", "q")], "system": "S"},
            ["q"],
            [said("system", "S"), said("developer", "D")],
        ),
        ({"messages": [said("system", "S"), said("user", "q")], "system": "T"}, ["q"], [said("system", "S")]),
        (
            {"messages": [said("user", "a"), said("assistant", "x"), said("user", "b"), said("assistant", None)]},
            ["a", "b"],
            [],
        ),
        ({"messages": [said("user", [{"type": "text", "text": "a"}], tool_calls=None)], "tools": []}, ["a"], []),
        (
            {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "a"},
                               {"from": "gpt", "value": "x"}, {"from": "human", "value": "b"}]},
            ["a", "b"],
            [said("system", "S")],
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}], "system": "S", "tools": "[]"},
            ["a"],
            [said("system", "S")],
        ),
        ({"conversation": [said("user", "a"), said("assistant", "x")]}, ["a"], []),
        ({"prompt": [said("system", "S"), said("user", "a")]}, ["a"], [said("system", "S")]),
        ({"prompt": ["a", "b"]}, ["a", "b"], []),
        ({"turns": [said("system", "S"), "a", "b"]}, ["a", "b"], [said("system", "S")]),
        ({"turns": ["a"], "system": "S"}, ["a"], [said("system", "S")]),
    ],
)  # fmt: skip
def test_no_part_of_a_row_is_dropped(tmp_path: Path, row: Any, turns: list[str], opening: list[Any]) -> None:
    found = one_row(tmp_path, row)
    assert (list(found.turns), list(found.opening)) == (turns, opening)
    [question] = read_file(tmp_path / "p.jsonl")
    assert (question.text, list(question.opening)) == (turns[0], opening)
    data = datasets.read(str(tmp_path / "p.jsonl"))
    assert data.talks == {0: tuple(turns)} and data.openings == ({0: tuple(opening)} if opening else {})


TOOLS = "tool calls or tool results, which cannot be handed on"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [said("user", "a"), said("assistant", None, tool_calls=[{"function": {}}])]}, TOOLS),
        ({"messages": [said("user", "a"), said("tool", "42"), said("assistant", "x")]}, TOOLS),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "observation", "value": "42"}]}, TOOLS),
        ({"messages": [said("user", "a")], "tools": [{"name": "f"}]}, "'tools', which cannot be handed on"),
        ({"instruction": "a", "history": [["b", "c"]]}, "'history', which cannot be handed on"),
        ({"messages": [said("user", "a"), said("system", "S"), said("user", "b")]}, "developer message after"),
        ({"messages": [said("wizard", "a")]}, "a role that is not known"),
        ({"messages": [said(5, "a")]}, "a role that is not known"),
        ({"messages": ["a", 5]}, "one that is no text"),
        ({"messages": [said("user", [{"type": "image"}])]}, "only text content"),
        *(
            ({"messages": [said("user", "a", **{key: ["x"]})]}, f"'{key}', which cannot be handed on")
            for key in ("images", "audio", "audios", "videos", "attachments", "documents", "tools")
        ),
        ({"conversations": [{"from": "human", "value": "a", "image": "x.png"}]}, "'image', which cannot be handed on"),
        ({"prompt": "a", "attachments": ["x.pdf"]}, "'attachments', which cannot be handed on"),
        ({"prompt": None}, "one that is no text"),
        ({"text": "a"}, "none of the fields turns, messages, "),
        ({}, "it has none"),
        ({"messages": [said("system", "S")]}, "no user turn"),
        ({"instruction": "a", "context": {"title": ["x"]}}, "one that is no text"),
        ({"system": ["S"], "prompt": "a"}, "only text content"),
        ({"messages": [said("system", "\ud83d"), said("user", "a")]}, "not valid Unicode"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_carried_whole_is_skipped_with_its_reason(tmp_path: Path, row: Any, reason: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(row) + "\n" + '{"prompt": "good"}\n' * 19)
    read = read_prompts(file)
    assert len(read.conversations) == 19
    [(why, count)] = read.skipped.items()
    assert reason in why and count == 1
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(RequestError, match="1 of 1 rows cannot be used"):
        read_prompts(file)


def test_the_longest_cell_of_the_process_is_left_as_it_is(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    for text in ("prompt\na\n", 'prompt\n"a'):
        (tmp_path / "p.csv").write_text(text)
        with contextlib.suppress(RequestError):
            read_prompts(tmp_path / "p.csv")
        assert csv.field_size_limit() == before


def test_empty_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    """An answer knows its prompt by the line."""
    file = tmp_path / "p.jsonl"
    file.write_text('\n\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    read = read_prompts(file)
    assert ([one.index for one in read.conversations], read.skipped) == ([2, 4], {})


def test_a_question_is_asked_with_its_system_message() -> None:
    question = Question("", "hi", ({"role": "system", "content": "S"},))
    tokenizer = tiny.make_tokenizer()
    assert as_asked(tokenizer, question) == [said("system", "S"), said("user", "hi")]
    tokenizer.chat_template = None
    assert as_asked(tokenizer, question) == "S\n\nhi"
