"""Rows of a file or of a data set of the hub. What kind of file it is, its content decides.

JSON, lines of text, cells (csv) and gzip are read with Python alone; parquet, arrow and the hub through ``datasets``.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import jsontext, packages
from dflash.errors import RequestError

MAX_SKIPPED = 0.1
"""Share of malformed rows above which a file is taken for another format."""

JSON = (".jsonl", ".ndjson", ".jsonlines", ".json")
TEXT = (".txt", ".text", "")
"""Endings of files that may hold a prompt a line: any text would do as one, so other names are refused."""
CELLS = {".csv": ",", ".tsv": "\t"}
"""Endings of tables of text, and what stands between their cells."""
TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
"""What the files begin with that ``datasets`` reads, and its names for them."""

_ENDINGS = {*JSON, *TEXT, *CELLS, ".parquet", ".arrow"} - {""}
_GZIP = b"\x1f\x8b"
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1a]")
_ON_THE_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_EXPECTED = (
    "give JSON (an object a line, or one array), text lines (.txt), .csv, .tsv, any of these packed with gzip, "
    ".parquet or .arrow"
)


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        index: from 0; of files read line by line, the line.
        where: for messages.
        value: an object as a dict, or what else the row holds.
        fault: why there is no value.
    """

    index: int
    where: str
    value: Any
    fault: str = ""


def rows(data: str | Path, split: str = "train") -> Iterator[Row]:
    """The rows of a file; where there is none of this name, of a data set of the hub.

    Empty lines are no rows. A line of text is the object ``{"prompt": line}``.

    Args:
        split: of a data set of the hub.

    Raises:
        RequestError: there is neither, it cannot be read, or it holds something else, as binary data or prose.
    """
    name = str(data)
    if not name.strip():
        raise RequestError("the name of a file of prompts is empty")
    file = Path(os.path.expanduser(name))
    if check_file(file):
        return _rows_of_file(file)
    if not _ON_THE_HUB.fullmatch(name) or _suffix(file) in _ENDINGS:
        raise RequestError(f"cannot read {name}: it does not exist")
    return _numbered(hub_rows(f"{name} (not a file here, so taken for a data set)", name, None, split))


def source_of(data: str | Path) -> str:
    """What to call the source of rows that do not say: the file's name without its ending, or the data set's."""
    file = os.path.expanduser(data)
    return Path(re.sub(r"\.gz$", "", Path(file).name, flags=re.IGNORECASE)).stem if os.path.isfile(file) else str(data)


def check_file(path: Path) -> bool:
    """Whether there is a file to read.

    Raises:
        RequestError: what is there is no file.
    """
    if os.path.isfile(path):  # unlike Path.is_file, False for whatever the system says of the name
        return True
    if os.path.isdir(path):
        raise RequestError(f"{path} is a folder: give a file in it")
    if os.path.lexists(path):
        raise RequestError(f"{path} is a pipe, a device or a broken link: give a regular file")
    return False


def hub_rows(what: str, repository: str, config: str | None, split: str) -> Iterator[Any]:
    """The rows of a data set of the hub.

    Args:
        what: it is, for messages.

    Raises:
        RequestError: ``datasets`` is not installed, or does not get it.
    """
    return _loaded(what, repository, config, split=split)


def _loaded(what: str, *arguments: Any, **options: Any) -> Iterator[Any]:
    """What ``datasets.load_dataset`` gives, row by row."""
    packages.need(("datasets",), f"to read {what}")
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield from datasets.load_dataset(*arguments, **options)
    except (OSError, ValueError, RuntimeError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"{what} could not be fetched or read: {why}") from error


def _numbered(found: Iterator[Any]) -> Iterator[Row]:
    for index, value in enumerate(found):
        yield Row(index, f"row {index + 1}", value)


# --- files ------------------------------------------------------------------------------------------


def _rows_of_file(file: Path) -> Iterator[Row]:
    head = _contents(file, 8)
    kind = next((kind for magic, kind in TABLES.items() if head.startswith(magic)), None)
    if kind is not None:
        # A stream, so that nothing is copied to the cache of datasets; escaped, for it takes names for patterns.
        return _numbered(_loaded(str(file), kind, data_files=glob.escape(str(file)), split="train", streaming=True))
    text = _text(file, _contents(file, packed=head.startswith(_GZIP)))
    if not text.strip():
        raise RequestError(f"{file} has no prompts: it is empty")
    if _suffix(file) in CELLS:
        return _cells(file, text)
    return _json_or_lines(file, text.replace("\r\n", "\n").replace("\r", "\n"))


def _suffix(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _contents(file: Path, size: int = -1, packed: bool = False) -> bytes:
    try:
        with gzip.open(file) if packed else file.open("rb") as opened:
            return opened.read(size)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RequestError(f"cannot read {file}: {why}") from error


def _text(file: Path, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text (byte {error.start}): {_EXPECTED}") from error
    binary = _BINARY.search(text)
    if binary is not None:
        raise RequestError(f"{file} is binary data, not text (it has the character {binary[0]!r}): {_EXPECTED}")
    return text


def _cells(file: Path, text: str) -> Iterator[Row]:
    try:
        yield from _numbered(csv.DictReader(io.StringIO(text, newline=""), delimiter=CELLS[_suffix(file)]))
    except csv.Error as error:
        raise RequestError(f"{file} cannot be read as a table of cells: {error}") from error


def _json_or_lines(file: Path, text: str) -> Iterator[Row]:
    """One JSON value; or an object a line; or a prompt a line. The name decides only what the content leaves open.

    Only newlines end a line: splitlines would also cut at U+2028 inside a text.
    """
    lines = [(index, line) for index, line in enumerate(text.split("\n")) if line.strip()]
    suffix, first = _suffix(file), lines[0][1]
    if first.lstrip()[0] in "[{" and not _is_object(first) and (len(lines) == 1 or not _is_json(first)):
        whole = _whole(text, suffix)
        if whole is not None:
            return _numbered(iter(whole))
    objects = sum(_is_object(line) for _, line in lines) if suffix in TEXT else 0
    if suffix in JSON or objects >= (1 - MAX_SKIPPED) * len(lines):  # a torn line makes no prompts of all the others
        return (_json_row(index, line) for index, line in lines)
    if suffix in TEXT:
        return (Row(index, f"line {index + 1}", {"prompt": line.strip()}) for index, line in lines)
    if _is_object(first):
        return (_json_row(index, line) for index, line in lines)
    raise RequestError(f"{file} is not a file of prompts, as far as its content and its name tell: {_EXPECTED}")


def _whole(text: str, suffix: str) -> list[Any] | None:
    """The rows of a text that is one JSON value, maybe over many lines; None where it is something else.

    A prompt may look like a JSON list: in a file of text lines, only objects count.
    """
    try:
        value = jsontext.parse(text)
    except ValueError:
        return None
    found = value if isinstance(value, list) else [value]
    objects = bool(found) and all(isinstance(row, dict) for row in found)
    return found if objects or suffix not in TEXT else None


def _json_row(index: int, line: str) -> Row:
    where = f"line {index + 1}"
    try:
        return Row(index, where, jsontext.parse(line))
    except ValueError:
        return Row(index, where, None, "not JSON")


def _is_json(line: str) -> bool:
    try:
        jsontext.parse(line)
    except ValueError:
        return False
    return True


def _is_object(line: str) -> bool:
    try:
        return isinstance(jsontext.parse(line), dict)
    except ValueError:
        return False
