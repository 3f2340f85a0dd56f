"""Tables of a whole run with a killed trainer, read by DuckDB and polars, against bin/ledger."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos.audit import audit
from tests.chaos.harness import Run

pytestmark = [pytest.mark.observe, pytest.mark.anyio, pytest.mark.timeout(600)]

ROOT: Final = Path(__file__).parents[2]
READ: Final = """
import json, sys
import duckdb, polars
folder = sys.argv[1]
def rows(query):
    return duckdb.sql(query.format(**{name: f"'{folder}/{name}.parquet'" for name in NAMES})).fetchall()
NAMES = "steps groups samples requests scores processes".split()
frames = {name: polars.read_parquet(f"{folder}/{name}.parquet") for name in NAMES}
print(json.dumps({
    "states": dict(rows("select state, count(*) from {groups} group by state")),
    "polars_states": dict(frames["groups"]["state"].value_counts().iter_rows()),
    "reasons": dict(rows("select reason, count(*) from {groups} where state = 'dropped' group by reason")),
    "trained": rows("select step from {steps} where step > 0 order by step"),
    "tokens": rows("select sum(num_tokens) from {steps}")[0][0],
    "metric_tokens": rows("select sum(metrics['train/num_tokens']) from {steps}")[0][0],
    "per_step": rows("select step, count(*) from {groups} where step is not null group by step order by step"),
    "joined": rows("select count(*) from {samples} s join {groups} g using (group_id) where g.state = 'trained'")[0][0],
    "scores": rows("select count(*) from {scores} where eval_set is null")[0][0],
    "kills": rows("select actor, exit_code from {processes} where exit_code = -9"),
    "lives": rows("select count(*) from {processes} where actor = 'trainer'")[0][0],
    "num_rows": {name: frame.height for name, frame in frames.items()},
}))
"""


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with DuckDB and polars, which no environment of the checkout has."""
    directory = tmp_path_factory.mktemp("readers")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-input", "--target", str(directory)]
    command = [*install, "-r", str(ROOT / "requirements" / "readers.txt")]
    subprocess.run(command, check=True, timeout=500)
    return directory


def command_of(script: str, *words: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bin" / script), *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_by_others(readers: Path, folder: Path) -> dict[str, Any]:
    """What DuckDB and polars find in the tables of a folder."""
    command = [sys.executable, "-c", READ, str(folder)]
    environment = {"PYTHONPATH": str(readers)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_sums_of_the_tables_are_those_of_the_ledger(tmp_path: Path, readers: Path) -> None:
    run = Run(tmp_path, num_steps=8, eval_interval=4)
    async with run.started() as command:
        await command.log.until_trained(3)
        command.log.kill("trainer")
        assert await command.end() == 0
    await audit(run, killed=["trainer"])
    folder = tmp_path / "tables"
    command_of("report.py", str(run.directory), "--out", str(tmp_path / "r.html"), "--parquet", str(folder))
    ledger: dict[str, Any] = json.loads(command_of("ledger.py", str(run.directory), "--json"))
    found = read_by_others(readers, folder)
    books = {name: count for name, count in ledger["books"].items() if count}
    assert sum(found["states"].values()) == books.pop("issued")
    assert found["states"] == found["polars_states"] == books
    assert found["reasons"] == {name: count for name, count in ledger["dropped"].items() if count}
    rows = [row for row in run.rows() if row["step"]]
    assert [step for (step,) in found["trained"]] == [row["step"] for row in rows]
    assert found["tokens"] == found["metric_tokens"] == sum(row["train/num_tokens"] for row in rows)
    groups = run.topology.rollout.rollout_batch_size
    assert found["per_step"] == [[step, groups] for step in range(1, 9)]
    assert found["joined"] == run.topology.rollout.n_samples_per_prompt * found["states"]["trained"]
    assert found["scores"] == found["num_rows"]["samples"]  # each sample of this recipe is graded
    assert found["kills"] == [["trainer", -9]]
    assert found["lives"] == 2
