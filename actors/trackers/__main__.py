"""Process of one tracker: logs the rows of a run to it, each once, until SIGTERM, and then the remaining ones.

It reads metrics.jsonl, which the run's node daemon writes, and nothing of the run waits for it.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from actors.trackers.mlflow import Mlflow
from actors.trackers.points import Point, PointKey, RowsFile, points_of
from actors.trackers.swanlab import Swanlab
from actors.trackers.tensorboard import TensorBoard
from actors.trackers.wandb import Wandb
from runtime.util.exit_codes import EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_OK

LOOK_EVERY_S: Final = 1.0
METRICS_FILE: Final = "metrics.jsonl"  # in the run directory
RUN_ID_FILE: Final = "run-id.json"
RUN_DIR_VARIABLE: Final = "PHYSARUM_RUN_DIR"
ID_CHARS: Final = 8  # of the run id, in names that other runs must not have

LOGIN: Final = re.compile(r"(?<=://)(?!/)\S*@")  # of a URL, up to its last @

log = logging.getLogger("tracker")


class WithoutLogins(logging.Formatter):
    """Formats a record with its traceback, and hides the logins of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return LOGIN.sub("***@", super().format(record))


class Tracker(Protocol):
    """A tracker of metrics."""

    place: str  # where it logs to, for people

    def logged(self) -> set[PointKey]:
        """Return the points that it holds already, from earlier processes."""
        ...

    def begin(self) -> None:
        """Get ready to log."""
        ...

    def log(self, point: Point) -> None:
        """Log a point."""
        ...

    def flush(self) -> None:
        """Store the logged points, as far as the tracker can."""
        ...

    def finish(self) -> None:
        """Store or send the remaining points."""
        ...


TRACKERS: Final[Mapping[str, Callable[[Mapping[str, Any], Path, str], Tracker]]] = {
    "mlflow": Mlflow,
    "swanlab": Swanlab,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}


def main(arguments: Sequence[str]) -> int:
    """Run the tracker named by the first argument with the options in the second one, a JSON object."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WithoutLogins("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    name, options = arguments[0], json.loads(arguments[1])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    run_dir = Path(os.environ[RUN_DIR_VARIABLE])
    try:
        try:
            tracker = TRACKERS[name](options, run_dir, _name_of(run_dir, options["run"]))
        except ImportError as error:
            log.error("%s is not installed in %s: run bin/setup --with %s (%s)", name, sys.executable, name, error)
            return EXIT_INPUT_ERROR
        with RowsFile(run_dir / METRICS_FILE) as rows:
            follow(tracker, rows, options, stop)
    except Exception as error:
        log.exception("%s failed: %s", name, error)
        return EXIT_FAILED
    return EXIT_OK


def follow(
    tracker: Tracker,
    rows: RowsFile,
    options: Mapping[str, Any],
    stop: threading.Event,
    *,
    look_every_s: float = LOOK_EVERY_S,
) -> None:
    """Log every point of the rows once, until stopped; then those that are left.

    Args:
        options: `optimizer_steps` and `always_use_train_step` of the run.
    """
    logged = tracker.logged()
    tracker.begin()
    log.info("logging to %s, which holds %d points", tracker.place, len(logged))
    is_last = False
    while not is_last:
        is_last = stop.is_set()  # rows that were written before the stop are still read
        for row in rows.new():
            points = points_of(
                row,
                optimizer_steps=options["optimizer_steps"],
                always_train_step=options["always_use_train_step"],
            )
            for point in points:
                if point.key not in logged:
                    tracker.log(point)
                    logged.add(point.key)
        tracker.flush()
        if not is_last:
            stop.wait(look_every_s)
    tracker.finish()
    log.info("%d points are logged", len(logged))


def _name_of(run_dir: Path, run: str) -> str:
    """Return a name that no other run has, also not one of this name before `--fresh`."""
    return f"{run}-{json.loads((run_dir / RUN_ID_FILE).read_text())['id'][:ID_CHARS]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
