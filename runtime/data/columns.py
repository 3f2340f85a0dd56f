"""Reads columns of a dump's `.npz` files, whole or by rows."""

import zipfile
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

SKIPPED_BYTES: Final = 2**20  # of a column at once
UNREADABLE: Final = (  # what zipfile and numpy raise for damaged files; RuntimeError: encrypted, or of a later zip
    *(OSError, ValueError, TypeError, EOFError, IndexError, RuntimeError, zipfile.BadZipFile, zlib.error),
)

Columns = Mapping[str, NDArray[Any]]


class DumpError(ValueError):
    """A dump cannot be used. The message names file, line and problem."""


@contextmanager
def reading(path: Path) -> Generator[BinaryIO]:
    """Open the columns of a step.

    Raises:
        DumpError: the file cannot be read, or a block finds something wrong in it.
    """
    try:
        with path.open("rb") as opened:  # np.load does not close a truncated file
            yield opened
    except FileNotFoundError as error:
        raise DumpError(f"{path}: no such file") from error
    except KeyError as error:
        raise DumpError(f"{path}: has no column {error}") from error
    except DumpError:
        raise
    except UNREADABLE as error:
        raise DumpError(f"{path}: cannot be read: {error}") from error


def load(path: Path, names: Sequence[str], may_lack: Sequence[str] = ()) -> Columns:
    """Read columns of a step, whole.

    Args:
        path: the file.
        names: of the columns.
        may_lack: names of more columns, which are left out if the file lacks them.

    Raises:
        DumpError: the file cannot be read, or has no such column.
    """
    with reading(path) as opened, np.load(opened, allow_pickle=False) as file:
        return {name: file[name] for name in (*names, *(name for name in may_lack if name in file))}


def rows(archive: zipfile.ZipFile, name: str, begin: int, end: int | None) -> NDArray[Any]:
    """Read rows of a column, and skip those before.

    Args:
        archive: open columns.
        name: of the column.
        begin: first row.
        end: end of the rows; None: all.

    Raises:
        KeyError, ValueError: there is no such column, or it has no such rows.
    """
    with archive.open(f"{name}.npy") as column:
        np.lib.format.read_magic(column)
        shape, column_major, dtype = np.lib.format.read_array_header_1_0(column)
        end = end if end is not None or not shape else shape[0]
        if dtype.hasobject or column_major or end is None or not 0 <= begin <= end <= shape[0]:
            raise ValueError(f"column {name} has no rows {begin} to {end}")
        row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        left = begin * row_bytes
        while left:
            skipped = len(column.read(min(left, SKIPPED_BYTES)))
            if not skipped:
                raise ValueError(f"column {name} is cut short")
            left -= skipped
        return np.frombuffer(column.read((end - begin) * row_bytes), dtype).reshape(end - begin, *shape[1:])
