"""Writes points as TensorBoard event files, and reads which points the files of earlier processes hold.

Every point is one record. After a crash the last record of a file may be cut off; readers ignore it.
"""

import importlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from actors.trackers.points import Point, PointKey, axis_of

PREFIX: Final = "events.out.tfevents."
VERSION: Final = "brain.Event:2"  # of the file format
LENGTH: Final = struct.Struct("<Q")
SUM_BYTES: Final = 4  # a checksum follows the length, and one the record
MAX_RECORD_BYTES: Final = 64 << 20


class _Writer(Protocol):
    def write(self, data: bytes) -> None: ...


class TensorBoard:
    """The event files of a run, in one directory.

    Args:
        options: of `observe.tensorboard`.
        run_dir: of the run.
        name: directory of the run's event files, if `dir` is set.
    """

    def __init__(self, options: Mapping[str, Any], run_dir: Path, name: str) -> None:
        self._directory = run_dir / "tensorboard" if options.get("dir") is None else Path(options["dir"]) / name
        self._directory.mkdir(parents=True, exist_ok=True)
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._records = importlib.import_module("tensorboard.summary.writer.record_writer")
        self.place = str(self._directory)

    def logged(self) -> set[PointKey]:
        """Return the points that the files hold."""
        keys: set[PointKey] = set()
        for path in self._files():
            for record in _records_of(path):
                event: Any = self._events.Event()
                try:
                    event.ParseFromString(record)
                except Exception:  # noqa: BLE001 - protobuf's DecodeError; what follows in the file is unreadable too
                    break
                if event.summary.value:
                    keys.add(PointKey(axis_of(event.summary.value[0].tag), event.step))
        return keys

    def begin(self) -> None:
        """Open a new file. Its name sorts after those of earlier processes, as TensorBoard reads them in this order."""
        newest = max((int(path.name.removeprefix(PREFIX).partition(".")[0]) for path in self._files()), default=0)
        number = max(int(time.time()), newest + 1)
        name = f"{PREFIX}{number:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._directory / name).open("xb")
        self._writer: _Writer = self._records.RecordWriter(self._file)
        self._put(self._events.Event(wall_time=time.time(), file_version=VERSION))
        self._file.flush()

    def log(self, point: Point) -> None:
        """Write a point."""
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in point.values.items()]
        summary = self._summaries.Summary(value=values)
        self._put(self._events.Event(wall_time=point.time, step=point.key.step, summary=summary))

    def flush(self) -> None:
        """Hand the written points to the kernel, so that they outlive this process."""
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _files(self) -> list[Path]:
        paths = (path for path in self._directory.glob(f"{PREFIX}*"))
        return sorted(path for path in paths if path.name.removeprefix(PREFIX).partition(".")[0].isdecimal())


def _records_of(path: Path) -> Iterator[bytes]:
    """Yield the complete records of an event file."""
    with path.open("rb") as file:
        while len(head := file.read(LENGTH.size + SUM_BYTES)) == LENGTH.size + SUM_BYTES:
            (length,) = LENGTH.unpack(head[: LENGTH.size])
            if length > MAX_RECORD_BYTES:
                return
            record = file.read(length + SUM_BYTES)
            if len(record) < length + SUM_BYTES:
                return
            yield record[:length]
