"""JSONL and Parquet files as records: the same rows from both, and bad files named with the row."""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from runtime.data.data_files import BATCH_ROWS, DataError, read_records
from runtime.data.rows import Row, read_rows
from runtime.settings.slices import split_slice
from runtime.settings.tables.prompts import DataConfig

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


# Slices


def write_jsonl(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"input": "{number}"}}\n\n' for number in range(count)))
    return path


@given(st.integers(1, 8), *[st.none() | st.integers(-10, 10)] * 2, st.sampled_from([".jsonl", ".parquet"]))
def test_a_slice_has_the_rows_that_python_gives(count: int, start: int | None, stop: int | None, suffix: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{suffix}"
        rows = [{"input": str(number)} for number in range(count)]
        write_parquet(path, *rows) if suffix == ".parquet" else write_jsonl(path, count)
        sliced = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
        expected = list(range(count))[start:stop]
        if expected:
            assert [(row.number, row.prompt) for row in rows_of(sliced)] == [
                (number, str(number)) for number in expected
            ]
        else:
            assert error(sliced) == f"{sliced}: the slice is empty: {path} has {count} rows"


@pytest.mark.parametrize("rows", ["@[3]", "@[1:2:3]", "@[a:b]", "@[]", "@[1.5:]"])
def test_a_slice_that_is_none_is_told_how_to_write_one(tmp_path: Path, rows: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", 3)
    assert error(f"{path}{rows}") == (
        f"{path}{rows}: a slice of rows is written file@[a:b], with a and b whole numbers or left out"
    )


def test_a_file_of_that_very_name_is_read_whole(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", 5)
    literal = write_jsonl(tmp_path / "rows.jsonl@[0:1]", 2)
    assert split_slice(str(literal)) == (str(literal), "")
    assert [row.number for row in rows_of(literal)] == [0, 1]


def test_rows_after_a_slice_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "0"}\n{"input": "1"}\nnonsense\n')
    assert [row.prompt for row in rows_of(f"{path}@[1:2]")] == ["1"]
    assert error(f"{path}@[:3]").startswith(f"{path}:3: not a JSON object")


def test_a_row_over_the_limit_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a", "metadata": {"k": "v"}}\n{"input": "b", "metadata": {"k": "%s"}}\n' % ("x" * 200))
    assert len(rows_of(path)) == 2
    refused = error(path, max_row_bytes=100)
    assert refused.startswith(f"{path}:2: prompt, label and metadata have 2")
    assert refused.endswith("over the limit of 100 (data.max_row_bytes)")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (str(2**64), "an integer is out of range: from -2**63 to 2**64 - 1 are allowed"),
        ("[" * 200 + "]" * 200, "lists and dicts are over 128 deep"),
        ("[" * 100_000 + "]" * 100_000, "lists and objects are nested too deeply"),
    ],
)
def test_a_value_that_no_message_can_carry_is_refused_with_its_place(tmp_path: Path, value: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"input": "a"}}\n{{"input": "b", "metadata": {{"k": {value}}}}}\n')
    assert error(path) == f"{path}:2: {said}"


def test_seventeen_megabytes_are_over_the_default_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "%s"}\n' % ("x" * 17_000_000))
    assert f"{path}:1: " in error(path)
    path.write_text('{"input": "%s"}\n' % ("x" * 16_000_000))
    assert len(rows_of(path)) == 1
