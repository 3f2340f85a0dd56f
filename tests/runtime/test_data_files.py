"""JSONL and Parquet files as records: the same rows from both, and bad files named with the row."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from runtime.data_files import BATCH_ROWS, DataError, read_records
from runtime.recipe import DataConfig
from runtime.rows import Row, read_rows

TURNS = [{"role": "user", "content": "1"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def rows_of(path: Path | str, **settings: Any) -> list[Row]:
    return list(read_rows(DataConfig(**{"name": "d", "path": str(path), "rm_type": "f1", **settings})))


def error(path: Path | str, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows_of(path, **settings)
    return str(caught.value)


def test_parquet_rows_are_read_as_those_of_jsonl(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "rows.parquet",
        {"q": "12", "label": "21", "metadata": {"k": 1}, "tools": TOOLS},
        {"q": "34", "label": "43", "metadata": None, "tools": None},
    )
    first, second = rows_of(path, input_key="q", label_key="label")
    assert (first.number, first.prompt, first.label, first.metadata) == (0, "12", "21", {"k": 1, "tools": TOOLS})
    assert (second.number, second.prompt, second.label, second.metadata) == (1, "34", "43", {})


def test_chat_messages_and_json_strings_are_read_from_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", {"input": TURNS, "metadata": '{"k": 2}'})
    (row,) = rows_of(path, apply_chat_template=True)
    assert (row.prompt, row.metadata) == (TURNS, {"k": 2})


def test_a_long_parquet_file_keeps_its_order(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 3
    path = write_parquet(tmp_path / "rows.pq", *({"input": str(number)} for number in range(count)))
    assert [(row.number, row.prompt) for row in rows_of(path)] == [(number, str(number)) for number in range(count)]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"input": "1"}, {"input": None}], {}, ": row 1: input = null: expected a string or a list of chat messages"),
        ([{"x": 1}], {}, ": row 0: no column 'input' (input_key); there are: x"),
        ([{"input": "1"}], {"label_key": "a"}, ": row 0: no column 'a' (label_key); there are: input"),
        ([{"input": "1", "metadata": "{"}], {}, ': row 0: metadata = "{": expected an object'),
    ],
)
def test_bad_parquet_rows_are_named_by_file_and_row(
    tmp_path: Path, rows: Sequence[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    path = write_parquet(tmp_path / "rows.parquet", *rows)
    assert error(path, **settings).startswith(f"{path}{message}")


def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text('{"input": "1"}\n' * 9)
    assert error(path).startswith(f"{path}: not a Parquet file, or a broken one: ")


def test_a_missing_or_empty_parquet_file_is_named(tmp_path: Path) -> None:
    assert error(tmp_path / "no.parquet").startswith(f"{tmp_path}/no.parquet: cannot be read: ")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"input": pa.array([], pa.string())}), path)
    assert error(path) == f"{path}: the file has no rows"


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "rows.parquet", {"input": "1"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what an import meets where it is not installed
    with pytest.raises(DataError, match=r'Parquet needs pyarrow.*pip install "physarum\[parquet\]"'):
        list(read_records(str(path)))
