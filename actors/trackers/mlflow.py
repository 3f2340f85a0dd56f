"""Logs points to MLflow, on a server or in a SQLite file, with the time at which each step was trained.

MLflow stores a metric by name, step, time and value, so the same point twice is the same row. Each point also has its
step as a metric of that axis: the history of these three metrics tells which points the run holds.
"""

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from actors.trackers.points import AXES, Point, PointKey

SQLITE: Final = "sqlite:///"
RUN_TAG: Final = "physarum.run"
TOPOLOGY_FILE: Final = "topology.json"  # in the run directory; has no secrets
REFUSED: Final = re.compile(r"[^\w\-. :/]", re.ASCII)  # characters that MLflow does not allow in names
MAX_PARAM_CHARS: Final = 500
PARAMS_AT_ONCE: Final = 100  # MLflow's bound
METRICS_AT_ONCE: Final = 1000  # MLflow's bound


class Mlflow:
    """A run of MLflow.

    Args:
        options: of `observe.mlflow`.
        run_dir: of the run.
        name: stored as a tag, by which a later process finds the run.
    """

    def __init__(self, options: Mapping[str, Any], run_dir: Path, name: str) -> None:
        self._options = options
        self._run_dir = run_dir
        self._name = name
        uri = options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        self.place = uri or f"sqlite:///{run_dir / 'mlflow.db'}"
        self._entities = importlib.import_module("mlflow.entities")
        self._clients = importlib.import_module("mlflow.tracking")
        if self.place.startswith(SQLITE):
            self._prepare(Path(self.place.removeprefix(SQLITE)))
        self._client: Any = self._clients.MlflowClient(tracking_uri=self.place)

    def logged(self) -> set[PointKey]:
        """Find or create the run, and return the points that it holds."""
        self._id = self._found() or self._created()
        histories = ((axis, self._client.get_metric_history(self._id, f"{axis}/step")) for axis in AXES)
        return {PointKey(axis, metric.step) for axis, history in histories for metric in history}

    def begin(self) -> None:
        """Mark the run as running again."""
        self._client.update_run(self._id, status="RUNNING")

    def log(self, point: Point) -> None:
        """Log a point. Its step comes last: without it, the point is logged again."""
        time_ms, step = round(point.time * 1000), point.key.step
        values = {REFUSED.sub("_", name): value for name, value in point.values.items()}
        values[f"{point.key.axis}/step"] = step
        metrics = [self._entities.Metric(name, value, time_ms, step) for name, value in values.items()]
        for first in range(0, len(metrics), METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[first : first + METRICS_AT_ONCE])

    def flush(self) -> None:
        """Do nothing: MLflow stores each point at once."""

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)

    def _prepare(self, path: Path) -> None:
        """Make the tables in another file first: MLflow cannot continue where a crash interrupted it."""
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.new")
        partial.unlink(missing_ok=True)  # left by a crash
        self._clients.MlflowClient(tracking_uri=f"{SQLITE}{partial}").search_experiments()
        partial.replace(path)

    def _experiment(self) -> str:
        name = self._options.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "physarum"
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found is not None else self._client.create_experiment(name)

    def _found(self) -> str | None:
        wanted = f"tags.`{RUN_TAG}` = '{self._name}'"
        found = self._client.search_runs([self._experiment()], filter_string=wanted, max_results=1)
        return found[0].info.run_id if found else None

    def _created(self) -> str:
        name = self._options.get("name") or self._options["run"]
        run = self._client.create_run(self._experiment(), run_name=name, tags={RUN_TAG: self._name})
        topology = json.loads((self._run_dir / TOPOLOGY_FILE).read_text())
        params = [self._entities.Param(REFUSED.sub("_", key), value) for key, value in _flat(topology)]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(run.info.run_id, params=params[first : first + PARAMS_AT_ONCE])
        return run.info.run_id


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a table by dotted key, as text that MLflow takes."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", (value if isinstance(value, str) else json.dumps(value))[:MAX_PARAM_CHARS]
