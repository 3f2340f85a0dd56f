"""What a tracker logs: the points of each row, read from metrics.jsonl as it grows. Standard library only."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

ROLLOUT: Final = "rollout"
TRAIN: Final = "train"
EVAL: Final = "eval"
AXES: Final = (ROLLOUT, TRAIN, EVAL)
EVAL_TIME: Final = "perf/eval_time"  # an evaluation may end long after the rest of its row is logged
STEP: Final = "step"  # of a row: train steps done, counted from 1
TIME: Final = "time"
MAX_LINE_BYTES: Final = 16 << 20  # a longer line is not a row


class PointKey(NamedTuple):
    """Identity of a point: a tracker logs each key once."""

    axis: str  # one of AXES
    step: int  # on that axis


class Point(NamedTuple):
    """Metrics of one train step that share a step axis, logged as one record."""

    key: PointKey
    time: float  # Unix time at which the step was trained
    values: Mapping[str, float]  # by metric name, without the step itself


def axis_of(name: str) -> str:
    """Return the step axis of a metric: slime's rules, with the rest on the rollout axis."""
    if name == EVAL_TIME:
        return EVAL
    prefix = name.partition("/")[0]
    return prefix if prefix in (TRAIN, EVAL) else ROLLOUT


def points_of(row: Mapping[str, Any], *, optimizer_steps: int = 1, always_train_step: bool = False) -> list[Point]:
    """Split a row of metrics.jsonl into points.

    Args:
        row: of one train step. Step 0 is the evaluation before training and has evaluation metrics only.
        optimizer_steps: of a train step.
        always_train_step: count every axis in optimizer steps, as `train/step` is.
    """
    step, time = row.get(STEP), row.get(TIME)
    if not isinstance(step, int) or not isinstance(time, int | float):
        return []
    values: dict[str, dict[str, float]] = {axis: {} for axis in AXES}
    for name, value in row.items():
        number = _number(value)
        if "/" in name and name not in ("rollout/step", "eval/step") and number is not None:
            values[axis_of(name)][name] = number
    unit = optimizer_steps if always_train_step else 1
    steps = {ROLLOUT: (step - 1) * unit, TRAIN: (step - 1) * optimizer_steps, EVAL: step * unit}
    return [
        Point(PointKey(axis, steps[axis]), time, values[axis])
        for axis in AXES
        if values[axis] and (step > 0 or axis == EVAL)
    ]


def _number(value: object) -> float | None:
    """Return a metric as a float; None for other values. A row spells numbers that are not finite as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if isinstance(value, str) and math.isfinite(number) else number


class RowsFile:
    """Reads the rows of metrics.jsonl as the run appends them, or replaces the file to add an evaluation to a row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None  # kept open, so that no later file gets its inode
        self._offset = 0  # after the last complete line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the rows since the last call; all rows again if the file was replaced."""
        file = self._opened()
        if file is None:
            return
        if file.seek(0, os.SEEK_END) < self._offset:
            self._offset = 0
        file.seek(self._offset)
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                return  # its end is not written yet
            self._offset += len(line)
            row = _row_of(line)
            if row is not None:
                yield row

    def _opened(self) -> BinaryIO | None:
        """Return the file of this path, opened again if it was replaced; None: there is none."""
        try:
            now = self._path.stat()
            if self._file is None or not os.path.samestat(os.fstat(self._file.fileno()), now):
                self._close()
                self._file, self._offset = self._path.open("rb"), 0
        except FileNotFoundError:
            return None
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", row) if isinstance(row, dict) else None
