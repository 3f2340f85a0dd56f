"""metrics.jsonl of a run directory: one row per step, even if the run is resumed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from runtime.report.rows import MetricRow
from runtime.util.files import append_line, write_atomically


class MetricsFile:
    """Appends rows. A row of a known step replaces the old one if it has more keys (a late evaluation)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = {row["step"]: row for row in _rows(path)}
        self._num_keys = {step: len(row) for step, row in rows.items()}
        if path.exists():  # removes a line that a crash cut off
            self._rewrite(rows)

    def put(self, row: MetricRow) -> None:
        """Write the row of a step. Numbers that JSON cannot express become "NaN", "Infinity" or "-Infinity"."""
        row = {key: _spelled(value) for key, value in row.items()}
        step, known = row["step"], self._num_keys.get(row["step"])
        if known is not None and known >= len(row):
            return
        self._num_keys[step] = len(row)
        if known is None:
            append_line(self.path, msgspec.json.encode(row))
        else:
            self._rewrite({row["step"]: row for row in _rows(self.path)} | {step: row})

    def _rewrite(self, rows: dict[int, MetricRow]) -> None:
        write_atomically(self.path, b"".join(msgspec.json.encode(rows[step]) + b"\n" for step in sorted(rows)))


def _rows(path: Path) -> Iterator[MetricRow]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            row = msgspec.json.decode(line, type=MetricRow)
        except (ValueError, RecursionError):  # a DecodeError and a UnicodeDecodeError are ValueErrors
            continue
        if isinstance(row.get("step"), int):
            yield row


def _spelled(value: Any) -> Any:
    """Convert a float that is not finite to protobuf's JSON spelling, which Python's float() reads."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
