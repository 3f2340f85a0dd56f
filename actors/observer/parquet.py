"""Writes the tables of a run as Parquet files, row group by row group."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

from actors.observer.tables import TABLES, Row
from runtime.util.files import atomic_file

ROW_GROUP: Final = 16_384  # rows that are held for one table
MISSING: Final = 'Parquet needs pyarrow, which is the extra "parquet": bin/setup, or pip install "physarum[parquet]"'


class ParquetMissing(Exception):
    """There is no pyarrow; the text says how to install it."""


class ParquetTables:
    """The files of all tables. Opened by `parquet_tables`."""

    def __init__(self, pyarrow: Any, writers: dict[str, Any], schemas: dict[str, Any]) -> None:
        self.num_rows = dict.fromkeys(TABLES, 0)
        self._pyarrow = pyarrow
        self._writers = writers
        self._schemas = schemas
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}

    def add(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Add rows, each with the name of its table.

        Raises:
            OSError: a file cannot be written.
        """
        for name, row in rows:
            held = self._rows[name]
            held.append(row)
            if len(held) >= ROW_GROUP:
                self._write(name)

    def flush(self) -> None:
        """Write the rows that are held."""
        for name in TABLES:
            self._write(name)

    def _write(self, name: str) -> None:
        rows, self._rows[name] = self._rows[name], []
        if not rows:
            return
        schema = self._schemas[name]
        columns = zip(*rows, strict=True)
        arrays = [
            self._pyarrow.array([None if value is None else _converted(value, kind) for value in values], field.type)
            for values, field, (_, kind, _) in zip(columns, schema, TABLES[name], strict=True)
        ]
        self._writers[name].write_table(self._pyarrow.Table.from_arrays(arrays, schema=schema))
        self.num_rows[name] += len(rows)


def _converted(value: Any, kind: str) -> Any:
    """Convert a value of a row to what its column takes."""
    if kind == "time":
        return round(value * 1e6)  # microseconds
    return list(value.items()) if kind == "numbers" else value


def load_pyarrow() -> tuple[Any, Any]:
    """Import pyarrow and its module for Parquet.

    Raises:
        ParquetMissing: there is no pyarrow.
    """
    try:
        import pyarrow as pa  # optional, and as large as all base packages together
        from pyarrow import parquet
    except ImportError:
        raise ParquetMissing(MISSING) from None
    return cast("Any", pa), cast("Any", parquet)


@contextmanager
def parquet_tables(directory: Path) -> Generator[ParquetTables, None, None]:
    """Write the files `<table>.parquet` of a directory. They replace older ones when the block ends, unless it raises.

    Raises:
        ParquetMissing: there is no pyarrow.
        OSError: the directory cannot be made, or a file cannot be written.
    """
    pyarrow, parquet = load_pyarrow()
    kinds = {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "text": pyarrow.string(),
        "time": pyarrow.timestamp("us", tz="UTC"),
        "bool": pyarrow.bool_(),
        "numbers": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
    }
    schemas = {
        name: pyarrow.schema([(column.name, kinds[column.kind]) for column in columns])
        for name, columns in TABLES.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        writers = {
            name: files.enter_context(
                parquet.ParquetWriter(
                    files.enter_context(atomic_file(directory / f"{name}.parquet")), schema, compression="zstd"
                )
            )
            for name, schema in schemas.items()
        }
        tables = ParquetTables(pyarrow, writers, schemas)
        yield tables
        tables.flush()
