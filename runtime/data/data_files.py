"""Reads JSONL and Parquet files strictly. Errors name file and place."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from runtime.settings.slices import split_slice
from runtime.util.formatting import show

T = TypeVar("T")
BOM: Final = b"\xef\xbb\xbf"
PARQUET_SUFFIXES: Final = (".parquet", ".pq")
BOUNDS: Final = re.compile(r"^@\[\s*(-?\d+)?\s*:\s*(-?\d+)?\s*\]$")
MAX_LINE_BYTES: Final = 256 << 20  # of JSONL; a file without line ends is not JSONL
BATCH_ROWS: Final = 1024  # rows of a Parquet file in memory at a time


class DataError(Exception):
    """A data source, or its tokenizer, cannot be used. The text names place and problem, and ends with `trace`."""

    def __init__(self, problem: str, trace: str = "") -> None:
        """Create an error.

        Args:
            problem: place and problem.
            trace: traceback of a user's function.
        """
        super().__init__(f"{problem}\n{trace}" if trace else problem)
        self.problem = problem
        self.trace = trace


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a data file, with all columns."""

    number: int  # from 0, without blank lines
    place: str  # "rows.jsonl:3", lines from 1; "rows.parquet: row 2", rows from 0
    columns: dict[str, Any]


def read_records(path: str) -> Iterator[Record]:
    """Read a data file, or a slice of its rows, in order: Parquet by its suffix, else JSONL.

    Args:
        path: a file, or file@[a:b] for the rows of Python's rows[a:b].

    Raises:
        DataError: the file cannot be read, the slice is empty, or a row up to its end is not an object.
    """
    file, rows = split_slice(path)
    if not rows:
        yield from _whole(file)
        return
    start, stop = _bounds(path, rows)
    if (start or 0) < 0 or (stop or 0) < 0:
        start, stop, _ = slice(start, stop).indices(_num_records(file))
    record = None
    for record in islice(_whole(file), start, stop):
        yield record
    if record is None:
        raise DataError(f"{path}: the slice is empty: {file} has {_num_records(file)} rows")


def _bounds(path: str, rows: str) -> tuple[int | None, int | None]:
    match = BOUNDS.match(rows)
    if match is None:
        raise DataError(f"{path}: a slice of rows is written file@[a:b], with a and b whole numbers or left out")
    start, stop = (None if text is None else int(text) for text in match.groups())
    return start, stop


def _num_records(file: str) -> int:
    return sum(1 for _ in _whole(file))


def _whole(file: str) -> Iterator[Record]:
    read = _read_parquet if Path(file).suffix in PARQUET_SUFFIXES else _read_jsonl
    record = None
    try:
        for record in read(Path(file)):
            yield record
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    if record is None:
        raise DataError(f"{file}: the file has no rows")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        number = 0
        for line, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(f"{path}:{line}: the line is over {MAX_LINE_BYTES >> 20} MiB: is this JSONL?")
            if text := raw.removeprefix(BOM if line == 1 else b"").strip():
                place = f"{path}:{line}"
                yield Record(number=number, place=place, columns=_json_object(text, place))
                number += 1


def _json_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        return decode_json(text, dict[str, Any])
    except RecursionError:
        raise DataError(f"{place}: lists and objects are nested too deeply") from None
    except _DoubleKey as error:
        raise DataError(f"{place}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        excerpt = show(text[:200].decode(errors="replace"))
        raise DataError(f"{place}: not a JSON object: {error}: {excerpt}") from None


class _DoubleKey(ValueError):
    """An object of JSON has a key twice."""


def decode_json(text: bytes, expected: type[T]) -> T:
    """Decode JSON, and refuse a key that an object has twice: JSON readers keep one of the values without a word.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is no JSON, or of another type.
        ValueError: a key is there twice.
    """
    value = msgspec.json.decode(text, type=expected)
    # a lost key takes its quotes with it; a quote may also be written as \u0022
    if text.count(b'"') != msgspec.json.encode(value).count(b'"') or b"\\u0022" in text:
        json.loads(text, object_pairs_hook=_each_once)
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DoubleKey(f"the key {show(key)} is there twice in one object")
        found[key] = value
    return found


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet  # optional, and as large as all base packages together
    except ImportError:
        message = 'Parquet needs pyarrow, which is the extra "parquet": pip install "physarum[parquet]"'
        raise DataError(f"{path}: {message}") from None
    number = 0
    open_file: Callable[[Path], Any] = cast("Any", parquet).ParquetFile  # it is untyped
    try:
        with open_file(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for columns in batch.to_pylist():
                    yield Record(number=number, place=f"{path}: row {number}", columns=columns)
                    number += 1
    except (ValueError, NotImplementedError) as error:  # pyarrow raises these besides OSError
        raise DataError(f"{path}: not a Parquet file, or a broken one: {error}") from None
