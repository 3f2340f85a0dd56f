"""Start a run as a user does, wait for its end, and read its result and metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
START: Final = (sys.executable, "-P", str(ROOT / "bin" / "start_topology.py"))


class Finished(NamedTuple):
    """A run that ended with exit code 0."""

    result: dict[str, Any]  # what --json prints
    rows: list[dict[str, Any]]  # of metrics.jsonl
    run_dir: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of train steps."""
        return [row for row in self.rows if row["step"] > 0]


def best_reward(steps: list[dict[str, Any]]) -> float:
    """Return the best mean reward of five train steps in a row.

    At the rates of the small models the reward dips at times, for some steps, depending on the order in which groups
    arrive. So its last steps do not show what a run has learnt.
    """
    rewards = [row["rollout/raw_reward"] for row in steps]
    return max(sum(rewards[i : i + 5]) / 5 for i in range(len(rewards) - 4))


def run_topology(place: Path, topology: str | Path, *words: str, limit_s: float = 300.0) -> Finished:
    """Run a topology to its end.

    Args:
        place: Working directory; the run is in its runs/.
        topology: Path, from the repository's root if it is relative.
        words: Settings with "=", and further options.
        limit_s: Seconds that the run may take.
    """
    command = [*START, str(ROOT / topology), "--json"]
    for word in words:
        command += ["--set", word] if "=" in word else [word]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    run_dir = place / "runs" / result["run"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Finished(result, rows, run_dir)
