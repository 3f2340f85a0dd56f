"""Environments of trackers, and what tracker files hold, read with the tracker's own package."""

import json
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SETUP_S: Final = 600  # another call may have to end first
READ_SCALARS: Final = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
print(json.dumps({tag: [event.step for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}))
"""
READ_METRICS: Final = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("physarum").experiment_id])
assert run.info.status == "FINISHED", run.info.status
found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
print(json.dumps({name: sorted(metric.step for metric in history) for name, history in found.items()}))
"""
READ_RECORDS: Final = """
import json, sys
from pathlib import Path
from actors.trackers.wandb import records_of
from wandb.proto.wandb_internal_pb2 import Record
for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")):
    for data in records_of(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            print(json.dumps([record.history.step.num, values]))
"""
READ_SWANLAB: Final = """
import json, sys
from collections import defaultdict
from pathlib import Path
from swanlab.sdk.internal.core_python.store import DataStoreReader
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
found = defaultdict(list)
for path in sorted(Path(sys.argv[1]).glob("swanlab/run-*/run-*.swanlab")):
    reader = DataStoreReader()
    reader.open(path)
    for data in reader:
        record = Record.FromString(data)
        if record.HasField("scalar"):
            found[record.scalar.key].append(record.scalar.step)
print(json.dumps(found))
"""


@cache
def tracker_python(name: str) -> str:
    """Interpreter with a tracker's package. The environment is made first if it is missing."""
    command = [ROOT / "bin" / "setup", "--with", name, "--if-needed"]
    subprocess.run(command, check=True, timeout=SETUP_S)
    return str(ROOT / f".venv-{name}" / "bin" / "python")


def scalars(run_dir: Path, *, pattern: str = "tensorboard") -> dict[str, list[int]]:
    """Steps of each tag in a directory of event files, as TensorBoard reads them."""
    return json.loads(_read("tensorboard", READ_SCALARS, run_dir / pattern))


def logged_by_mlflow(run_dir: Path) -> dict[str, list[int]]:
    """Steps of each metric of the run in MLflow's SQLite file."""
    return json.loads(_read("mlflow", READ_METRICS, run_dir))


def logged_by_swanlab(run_dir: Path) -> dict[str, list[int]]:
    """Steps of each metric in all of a run's SwanLab directories, as SwanLab's own reader reads them."""
    return json.loads(_read("swanlab", READ_SWANLAB, run_dir))


def logged_by_wandb(run_dir: Path) -> dict[str, list[int]]:
    """Steps of each metric on its own axis in all of a run's W&B directories. W&B's own step never falls."""
    found: dict[str, list[int]] = defaultdict(list)
    newest = -1
    for line in _read("wandb", READ_RECORDS, run_dir).splitlines():
        step, values = json.loads(line)
        assert step > newest
        newest = step
        (axis,) = {"train/step", "rollout/step", "eval/step"} & values.keys()
        for name in values.keys() - {axis, "_step", "_runtime", "_timestamp"}:
            found[name].append(int(values[axis]))
    return dict(found)


def _read(name: str, program: str, path: Path) -> Any:
    command = [tracker_python(name), "-c", program, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
