"""Start a run as a user does, wait for its end, and read its result and metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from actors.observer.advice import Adviser
from actors.observer.following import followed
from runtime.node.reopen import find_run
from runtime.report.fold.account import Account

ROOT: Final = Path(__file__).parents[2]
START: Final = (sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "start-topology")
COMPARE_TIMES: Final = {  # what such rules say of a run on a busy machine is about the machine
    "stall",
    "event loop blocked",
    "slow engine",
    "slow grader",
    "trainer waits for the engines",
    "engines wait for the trainer",
}


class Finished(NamedTuple):
    """A run that ended with exit code 0."""

    result: dict[str, Any]  # what --json prints
    rows: list[dict[str, Any]]  # of metrics.jsonl
    run_dir: Path
    printed: list[str]  # lines for people

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
    return Finished(result, rows, run_dir, done.stderr.splitlines())


def advice_in(run_dir: Path) -> dict[str, str]:
    """Return what an ended run was advised after any of its steps: the first figure of each advice, by its name.

    Advice of rules that compare times is left out.
    """
    found = anyio.run(_advice_by_step, run_dir)
    return {name: figure for name, figure in found.items() if name not in COMPARE_TIMES}


async def _advice_by_step(run_dir: Path) -> dict[str, str]:
    adviser, account, found = Adviser(), Account(), dict[str, str]()
    async with followed(find_run(str(run_dir), trust=True), waits=False) as events:
        async for received in events:
            step = account.apply(received.message, received.unix_time)
            adviser.apply(received.message, step)
            for advice in adviser.advice(account) if step is not None else ():
                found.setdefault(advice.name, f"after step {account.num_steps}: {advice.figure}")
    assert account.num_steps > 0, run_dir
    return found
