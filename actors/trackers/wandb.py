"""Logs points to Weights & Biases, and reads which points the run's directories on this machine hold.

A process that continues the run has a directory of its own. W&B keeps a point in a file `run-<id>.wandb` there, a
LevelDB log of protobuf records, before it sends it. What the file of a killed process lacks is logged again.
"""

import importlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from actors.trackers.points import AXES, EVAL, EVAL_TIME, ROLLOUT, TRAIN, Point, PointKey

BLOCK_BYTES: Final = 1 << 15
FILE_HEADER_BYTES: Final = 7
HEADER: Final = struct.Struct("<IHB")  # checksum, length, and which part of a record
FULL, FIRST, LAST = 1, 2, 4
TOPOLOGY_FILE: Final = "topology.json"  # in the run directory; has no secrets
STEP_AXES: Final = (
    *((f"{TRAIN}/*", f"{TRAIN}/step"), (f"{EVAL}/*", f"{EVAL}/step"), (f"{ROLLOUT}/*", f"{ROLLOUT}/step")),
    (EVAL_TIME, f"{EVAL}/step"),  # W&B prefers a whole name
    *((f"{prefix}/*", f"{ROLLOUT}/step") for prefix in ("multi_turn", "passrate", "perf", "groups", "weights")),
)


class Wandb:
    """A run of Weights & Biases.

    Args:
        options: of `observe.wandb`.
        run_dir: of the run.
        name: of the run and its id, if no setting and no variable of W&B names one.
    """

    def __init__(self, options: Mapping[str, Any], run_dir: Path, name: str) -> None:
        self._options = options
        self._run_dir = run_dir
        self._id = options.get("run_id") or os.environ.get("WANDB_RUN_ID") or name
        self._title = options.get("name") or os.environ.get("WANDB_NAME") or options["run"]
        self._directory = Path(options.get("dir") or os.environ.get("WANDB_DIR") or run_dir)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._wandb = importlib.import_module("wandb")
        self._held: dict[int, PointKey] = {}  # points in the files, by W&B's own step
        self.place = str(self._directory / "wandb")

    def logged(self) -> set[PointKey]:
        """Open the run, and return the points that it holds already.

        Online those are the points of the files that the server has: it names the step after its last one.
        """
        self._held = dict(self._points_in_files())
        if self._held:
            time.sleep(1.0 - time.time() % 1.0)  # W&B names directories by the second and writes over an equal one
        options = {key: self._options.get(key) for key in ("project", "group", "mode")}
        settings = {"console": "off", "silent": True}
        if self._options.get("host") is not None:
            settings["base_url"] = self._options["host"]
        if self._options.get("key_file") is not None:
            settings["api_key"] = Path(self._options["key_file"]).read_text().strip()
        self._run: Any = self._wandb.init(
            **options,
            entity=self._options.get("team"),
            id=self._id,
            name=self._title,
            dir=self._directory,
            resume="allow",
            config=json.loads((self._run_dir / TOPOLOGY_FILE).read_text()),
            settings=self._wandb.Settings(**settings),
        )
        if not self._run.settings._offline and not self._run.disabled:
            self._held = {step: key for step, key in self._held.items() if step < self._run.step}
        self._next = max(self._run.step, max(self._held, default=-1) + 1)
        return set(self._held.values())

    def begin(self) -> None:
        """Name the step axis of each metric."""
        for axis in AXES:
            self._run.define_metric(f"{axis}/step")
        for pattern, axis in STEP_AXES:
            self._run.define_metric(pattern, step_metric=axis)

    def log(self, point: Point) -> None:
        """Log a point. W&B's own step only numbers the points."""
        self._run.log({**point.values, f"{point.key.axis}/step": point.key.step}, step=self._next)
        self._next += 1

    def flush(self) -> None:
        """Do nothing: W&B has no such call. What its file lacks after a crash is logged again."""

    def finish(self) -> None:
        """Wait until W&B has stored or sent everything."""
        self._run.finish()

    def _points_in_files(self) -> Iterator[tuple[int, PointKey]]:
        protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
        for path in sorted(self._directory.glob(f"wandb/*-{self._id}/run-{self._id}.wandb")):
            for data in records_of(path.read_bytes()):
                record: Any = protocol.Record()
                try:
                    record.ParseFromString(data)
                except Exception:  # noqa: BLE001 - protobuf's DecodeError; such a record counts as missing
                    continue
                if record.WhichOneof("record_type") == "history" and (key := _key_of(record.history)) is not None:
                    yield record.history.step.num, key


def _key_of(history: Any) -> PointKey | None:
    for item in history.item:
        name = item.key or "/".join(item.nested_key)
        axis, _, rest = name.rpartition("/")
        if rest == "step" and axis in AXES:
            return PointKey(axis, int(float(item.value_json)))
    return None


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a LevelDB log behind W&B's file header."""
    parts: list[bytes] = []
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        position = FILE_HEADER_BYTES if start == 0 else 0
        while position + HEADER.size <= len(block):
            _, length, kind = HEADER.unpack_from(block, position)
            position += HEADER.size
            content = block[position : position + length]
            if kind == 0 or len(content) < length:
                break  # padding, or cut off by a crash
            position += length
            parts = [content] if kind in (FULL, FIRST) else [*parts, content]
            if kind in (FULL, LAST):
                yield b"".join(parts)
                parts = []
