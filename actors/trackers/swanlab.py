"""Logs points to SwanLab, and reads which points the run's directories on this machine hold.

A process that continues the run has a directory of its own. SwanLab keeps a value in a file `run-<id>.swanlab` there, a
LevelDB log of protobuf records. What the file of a killed process lacks is logged again: a point that it holds in part
without the values that it holds.
"""

import importlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from actors.trackers.points import AXES, Point, PointKey, axis_of

TOPOLOGY_FILE: Final = "topology.json"  # in the run directory; has no secrets
NOT_OF_IDS: Final = re.compile(r"[^a-z0-9_]+")
MAX_ID_CHARS: Final = 64


class Swanlab:
    """A run of SwanLab.

    Args:
        options: of `observe.swanlab`.
        run_dir: of the run.
        name: of the run's directory, if `dir` is set, and of its id.
    """

    def __init__(self, options: Mapping[str, Any], run_dir: Path, name: str) -> None:
        self._options = options
        self._run_dir = run_dir
        self._id = NOT_OF_IDS.sub("_", name.lower())[-MAX_ID_CHARS:]
        self._directory = run_dir / "swanlab" if options.get("dir") is None else Path(options["dir"]) / name
        self._directory.mkdir(parents=True, exist_ok=True)
        self._swanlab = importlib.import_module("swanlab")
        self._partial: dict[PointKey, set[str]] = {}  # names that a killed process stored of a point
        self.place = str(self._directory)

    def logged(self) -> set[PointKey]:
        """Return the points that the files hold."""
        held: dict[PointKey, set[str]] = defaultdict(set)
        for name, step in self._values_in_files():
            axis, _, rest = name.rpartition("/")
            held[PointKey(axis if rest == "step" and axis in AXES else axis_of(name), step)].add(name)
        whole = {key for key, names in held.items() if f"{key.axis}/step" in names}
        self._partial = {key: names for key, names in held.items() if key not in whole}
        return whole

    def begin(self) -> None:
        """Open the run, in a directory of its own."""
        if any(self._directory.glob("run-*")):
            time.sleep(1.0 - time.time() % 1.0)  # SwanLab names directories by the second
        set_here = {name: self._options.get(name) for name in ("mode", "project", "workspace", "group")}
        settings: dict[str, Any] = {"interactive": False, "terminal": {"proxy_type": "none"}}
        if self._options.get("host") is not None:
            settings["api_host"] = self._options["host"]
        if self._options.get("key_file") is not None:
            settings["api_key"] = Path(self._options["key_file"]).read_text().strip()
        self._run: Any = self._swanlab.init(
            **set_here | {"project": set_here["project"] or os.environ.get("SWANLAB_PROJECT") or "physarum"},
            name=self._options.get("name") or self._options["run"],
            id=self._id,
            resume="allow",
            log_dir=str(self._directory),
            config=json.loads((self._run_dir / TOPOLOGY_FILE).read_text()),
            settings=self._swanlab.Settings(**settings),
        )

    def log(self, point: Point) -> None:
        """Log a point. Its step comes last: without it, the rest is logged again."""
        held = self._partial.pop(point.key, set())
        values = {name: value for name, value in point.values.items() if name not in held}
        axis = f"{point.key.axis}/step"
        self._run.log({name: value for name, value in values.items() if name != axis}, step=point.key.step)
        self._run.log({axis: point.key.step}, step=point.key.step)

    def flush(self) -> None:
        """Do nothing: SwanLab has no such call. What its file lacks after a crash is logged again."""

    def finish(self) -> None:
        """Wait until SwanLab has stored or sent everything."""
        self._run.finish()

    def _values_in_files(self) -> Iterator[tuple[str, int]]:
        """Yield name and step of each stored value."""
        records = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2")
        stores = importlib.import_module("swanlab.sdk.internal.core_python.store")
        for path in sorted(self._directory.glob("run-*/run-*.swanlab")):
            reader: Any = stores.DataStoreReader()
            try:
                reader.open(path)
            except Exception:  # noqa: BLE001 - a file without a whole header, of a process that was killed at once
                continue
            for data in reader:  # it ends before a record that is cut off
                record: Any = records.Record()
                try:
                    record.ParseFromString(data)
                except Exception:  # noqa: BLE001 - protobuf's DecodeError; such a record counts as missing
                    continue
                if record.HasField("scalar"):
                    yield record.scalar.key, record.scalar.step
            reader.close()
