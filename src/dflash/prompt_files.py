"""Rows of a file or of a data set of the hub. What kind of file it is, its content decides.

JSON, lines of text, cells (csv) and gzip are read with Python alone; parquet, arrow and the hub through ``datasets``.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import logging
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
        hint: what may be wrong where the value has none of the fields that are looked for.
    """

    index: int
    where: str
    value: Any
    fault: str = ""
    hint: str = ""


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
    return _loaded(what, "could not be fetched", repository, config, split=split)


def _loaded(what: str, failure: str, *arguments: Any, **options: Any) -> Iterator[Any]:
    """What ``datasets.load_dataset`` gives, row by row.

    Args:
        failure: what is said of it where that fails, before the reason.
    """
    packages.need(("datasets",), f"to read {what}")
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what it would log of an error is said below
    try:
        yield from datasets.load_dataset(*arguments, **options)
    except (OSError, ValueError, RuntimeError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"{what} {failure}: {why}") from error
    finally:
        log.setLevel(level)


def _numbered(found: Iterator[Any]) -> Iterator[Row]:
    for index, value in enumerate(found):
        yield Row(index, f"row {index + 1}", value)


# --- files ------------------------------------------------------------------------------------------


def _rows_of_file(file: Path) -> Iterator[Row]:
    head = _contents(file, 8)
    kind = next((kind for magic, kind in TABLES.items() if head.startswith(magic)), None)
    if kind is not None:
        # A stream, so that nothing is copied to the cache of datasets; escaped, for it takes names for patterns.
        pattern = glob.escape(str(file))
        return _numbered(_loaded(str(file), "cannot be read", kind, data_files=pattern, split="train", streaming=True))
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
    """The rows of a table, all read at once, for the longest cell is a setting of the whole process."""
    separator = CELLS[_suffix(file)]
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    longest = csv.field_size_limit(min(max(len(text), 1), 2**31 - 1))
    try:
        names = [name for name in reader.fieldnames or () if name]
        found = list(reader)
    except csv.Error as error:
        raise RequestError(
            f"{file} cannot be read as a table of cells (after line {reader.line_num}: {error}): put a text that has a "
            "quote or the separator in it into quotes, and double the quotes inside it"
        ) from error
    finally:
        csv.field_size_limit(longest)
    if len(set(names)) < len(names):
        raise RequestError(f"{file} has two columns of one name: give each a name of its own")
    hint = ""
    if len(names) == 1:
        hint = f": the first line must name the columns, and cells be separated by {separator!r}"
    for index, cells in enumerate(found):
        where = f"row {index + 1}"
        if any(cells.pop(None, ())):  # type: ignore[call-overload]
            yield Row(index, where, None, "more cells than the header has: quote the text")
        else:
            yield Row(index, where, cells, hint=hint)


def _json_or_lines(file: Path, text: str) -> Iterator[Row]:
    """One JSON value; or an object a line; or a prompt a line. The name decides only what the content leaves open.

    Only newlines end a line: splitlines would also cut at U+2028 inside a text.
    """
    lines = [(index, line) for index, line in enumerate(text.split("\n")) if line.strip()]
    suffix, first = _suffix(file), lines[0][1]
    if first.lstrip()[0] in "[{" and not _is_object(first) and (len(lines) == 1 or not jsontext.is_json(first)):
        whole = _whole(text, suffix)
        if whole is not None:
            return _numbered(iter(whole))
    objects = sum(_is_object(line) for _, line in lines) if suffix in TEXT else 0
    # A torn line makes no prompts of all the others.
    if suffix in JSON or _is_object(first) or objects > len(lines) / 2:
        return (_json_row(index, line) for index, line in lines)
    if objects > MAX_SKIPPED * len(lines):  # fewer are prompts that look like one
        raise RequestError(
            f"{file} mixes JSON objects with other lines ({objects} of {len(lines)} are objects): give an object a "
            "line, or a prompt a line"
        )
    if suffix in TEXT:
        return (Row(index, f"line {index + 1}", {"prompt": line.strip()}) for index, line in lines)
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


def _is_object(line: str) -> bool:
    try:
        return isinstance(jsontext.parse(line), dict)
    except ValueError:
        return False
