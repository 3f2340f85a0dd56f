"""Rows of JSONL files, read strictly: what is wrong is said with file and line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.config import show
from runtime.recipe import DataConfig

BOM: Final = b"\xef\xbb\xbf"


class DataError(Exception):
    """A data file, or the tokenizer its prompts need, cannot be used. The text names file, line and what is wrong."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a data file, its columns picked by a DataConfig."""

    number: int  # from 0, blank lines not counted
    line: int  # from 1
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    label: Any = None
    metadata: dict[str, Any] = {}  # with "tools" if the row has any


def read_rows(data: DataConfig, max_rows: int | None = None) -> Iterator[Row]:
    """Read the rows of a data source in file order.

    Args:
        data: its file and the names of its columns.
        max_rows: stop after so many.

    Raises:
        DataError: the file is missing or empty, a line is no JSON object, or a column is missing or of a wrong type.
    """
    number = 0
    for line, raw in _lines(Path(data.path)):
        if max_rows is not None and number >= max_rows:
            return
        try:
            yield _row(msgspec.json.decode(raw, type=dict[str, Any]), data, number, line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{data.path}:{line}: not a JSON object: {error}: {_excerpt(raw)}") from None
        except ValueError as error:
            raise DataError(f"{data.path}:{line}: {error}") from None
        number += 1
    if number == 0:
        raise DataError(f"{data.path}: the file has no rows")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if text := raw.removeprefix(BOM if line == 1 else b"").strip():
                    yield line, text
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _excerpt(raw: bytes) -> str:
    return show(raw[:200].decode(errors="replace"))


def _row(columns: dict[str, Any], data: DataConfig, number: int, line: int) -> Row:
    metadata: dict[str, Any] = _parsed(columns.get(data.metadata_key), data.metadata_key, dict[str, Any]) or {}
    if (tools := _parsed(columns.get(data.tool_key), data.tool_key, list[dict[str, Any]])) is not None:
        metadata = {**metadata, "tools": tools}
    return Row(
        number=number,
        line=line,
        prompt=_prompt(_column(columns, data.input_key, "input_key"), data),
        label=None if data.label_key is None else _column(columns, data.label_key, "label_key"),
        metadata=metadata,
    )


def _column(columns: dict[str, Any], key: str, setting: str) -> Any:
    if key not in columns:
        raise ValueError(f"no column {key!r} ({setting}); there are: {', '.join(columns) or 'none'}")
    return columns[key]


def _prompt(value: Any, data: DataConfig) -> str | list[dict[str, Any]]:
    try:
        prompt = msgspec.convert(value, str | list[dict[str, Any]])
    except msgspec.ValidationError:
        raise ValueError(f"{data.input_key} = {show(value)}: expected a string or a list of chat messages") from None
    if not prompt:
        raise ValueError(f"{data.input_key} is empty")
    if not data.apply_chat_template and not isinstance(prompt, str):
        raise ValueError(f"{data.input_key} is a list of chat messages: set apply_chat_template = true")
    return prompt


def _parsed(value: Any, key: str, expected: Any) -> Any:
    """A column that holds a value or a string with its JSON; none and "" mean that there is nothing."""
    if value is None or value == "":
        return None
    try:
        return msgspec.json.decode(value, type=expected) if isinstance(value, str) else msgspec.convert(value, expected)
    except msgspec.MsgspecError as error:
        kind = "an object" if expected == dict[str, Any] else "a list of objects"
        raise ValueError(f"{key} = {show(value)}: expected {kind}, or a string with its JSON ({error})") from None
