"""Rows of data sources: the recipe's columns of records, validated."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Final

import msgspec

from messages.plain import check_plain
from runtime.data.chat import plain_messages
from runtime.data.data_files import DataError, Record, decode_json, read_records
from runtime.settings.tables.prompts import DataConfig
from runtime.util.formatting import show

PROMPT_IDS: Final = "prompt_ids"  # column that a user function may return instead of a prompt
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1)]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a data source, with the columns of its DataConfig."""

    number: int  # from 0, in the file
    place: str  # for error messages: file and line or row, or function and number
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    prompt_ids: tuple[int, ...] | None = None  # used instead of tokenizing the prompt; only from functions
    label: Any = None
    chosen: str | list[dict[str, Any]] | None = None  # of a preference pair
    rejected: str | list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = {}  # with "tools", if the row has tools


def read_rows(data: DataConfig, max_rows: int | None = None) -> Iterator[Row]:
    """Read the rows of a data file in order.

    Args:
        data: the file and the names of its columns.
        max_rows: maximum number of rows to read.

    Raises:
        DataError: the file is missing or empty, a row is not an object, or a column is missing or has a wrong type.
        ValueError: the source is not a file.
    """
    if data.path is None:
        raise ValueError(f"data source {data.name} has no file")
    return (row_of(record, data) for record in islice(read_records(data.path), max_rows))


def row_of(record: Record, data: DataConfig) -> Row:
    """Select and validate the columns of a record.

    Raises:
        DataError: a column is missing or has a wrong type.
    """
    columns = record.columns
    try:
        ids = None if data.path is not None else _prompt_ids(columns)
        metadata: dict[str, Any] = _parsed(columns.get(data.metadata_key), data.metadata_key, dict[str, Any]) or {}
        if (tools := _parsed(columns.get(data.tool_key), data.tool_key, list[dict[str, Any]])) is not None:
            metadata = {**metadata, "tools": tools}
        row = Row(
            number=record.number,
            place=record.place,
            prompt=_prompt(columns, data, is_optional=bool(ids)),
            prompt_ids=ids,
            label=None if data.label_key is None else _column(columns, data.label_key, "label_key"),
            chosen=_response(columns, data.chosen_key, "chosen_key"),
            rejected=_response(columns, data.rejected_key, "rejected_key"),
            metadata=metadata,
        )
        _check_value(row, data)
    except ValueError as error:
        raise DataError(f"{record.place}: {error}") from None
    return row


def _check_value(row: Row, data: DataConfig) -> None:
    """Refuse values that messages cannot carry, while the row's place is known."""
    values = [row.prompt, row.label, row.metadata, row.chosen, row.rejected]
    check_plain(values)
    size = len(msgspec.msgpack.encode(values))
    if size > data.max_row_bytes:
        raise ValueError(
            f"prompt, label and metadata have {size} bytes, over the limit of {data.max_row_bytes} (data.max_row_bytes)"
        )


def _prompt_ids(columns: Mapping[str, Any]) -> tuple[int, ...] | None:
    if columns.get(PROMPT_IDS) is None:
        return None
    try:
        return msgspec.convert(columns[PROMPT_IDS], TokenIds)
    except msgspec.ValidationError:
        raise ValueError(f"{PROMPT_IDS} = {show(columns[PROMPT_IDS])}: expected a list of token ids") from None


def _column(columns: Mapping[str, Any], key: str, setting: str) -> Any:
    if key not in columns:
        raise ValueError(f"no column {key!r} ({setting}); there are: {', '.join(columns) or 'none'}")
    return columns[key]


def _response(columns: Mapping[str, Any], key: str | None, setting: str) -> str | list[dict[str, Any]] | None:
    if key is None:
        return None
    value = _column(columns, key, setting)
    try:
        response = msgspec.convert(value, str | list[dict[str, Any]])
    except msgspec.ValidationError:
        raise ValueError(f"{key} = {show(value)}: expected a string or a list of chat messages") from None
    if not response:
        raise ValueError(f"{key} is empty")
    return response if isinstance(response, str) else plain_messages(response, key)


def _prompt(columns: Mapping[str, Any], data: DataConfig, *, is_optional: bool) -> str | list[dict[str, Any]]:
    if data.input_key not in columns and (is_optional or data.chosen_key is not None):
        return ""
    value = _column(columns, data.input_key, "input_key")
    try:
        prompt = msgspec.convert(value, str | list[dict[str, Any]])
    except msgspec.ValidationError:
        raise ValueError(f"{data.input_key} = {show(value)}: expected a string or a list of chat messages") from None
    if not prompt or (data.apply_chat_template and isinstance(prompt, str) and not prompt.strip()):
        raise ValueError(f"{data.input_key} is empty")
    if not data.apply_chat_template and not isinstance(prompt, str):
        raise ValueError(f"{data.input_key} is a list of chat messages: set apply_chat_template = true")
    return prompt if isinstance(prompt, str) else plain_messages(prompt, data.input_key)


def _parsed(value: Any, key: str, expected: Any) -> Any:
    """Convert a column with a value or its JSON text; None and "" mean that there is no value."""
    if value is None or value == "":
        return None
    try:
        return decode_json(value.encode(), expected) if isinstance(value, str) else msgspec.convert(value, expected)
    except msgspec.MsgspecError as error:
        kind = "an object" if expected == dict[str, Any] else "a list of objects"
        raise ValueError(f"{key} = {show(value)}: expected {kind}, or a string with its JSON ({error})") from None
