"""The laptop run as a person starts it: time to the first rollout, steps per second, where a step's time goes. JSON.

Several short runs for the start, then one long run. Each is the real command in a fresh process and directory.

Run: python -m tests.bench.bench_demo
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
START = (sys.executable, str(ROOT / "bin" / "physarum.py"), "start-topology")
TOPOLOGY = str(ROOT / "topologies" / "laptop.toml")
SAMPLE_S = 0.2  # between two looks at the CPU times of all processes
PARTS = ("perf/rollout_time", "perf/train_time", "perf/update_weights_time")
HELPS = 5


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="train steps of the long run")
    parser.add_argument("--starts", type=int, default=5, help="short runs")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per run")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        results = {
            "help_s": statistics.median(help_s() for _ in range(HELPS)),
            "starts": starts(directory, args.starts, args.timeout) if args.starts else None,
            "run": long_run(directory, args.steps, args.timeout),
        }
    print(json.dumps(results, indent=2))
    return 0


def help_s() -> float:
    """Seconds until --help has answered."""
    begin = time.perf_counter()
    subprocess.run([*START, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
    return time.perf_counter() - begin


def starts(directory: Path, number: int, timeout_s: float) -> dict[str, Any]:
    """Seconds from the command to the first rollout, and of a whole run of one step."""
    results = [run(directory, f"start-{index}", 1, timeout_s)[0] for index in range(number)]
    first = [result["time_to_first_rollout_s"] for result in results]
    return {
        "time_to_first_rollout_s": {"median": statistics.median(first), "all": first},
        "one_step_run_s": statistics.median(result["seconds"] for result in results),
    }


def long_run(directory: Path, num_steps: int, timeout_s: float) -> dict[str, Any]:
    """How a whole run went, and where its time and CPU went."""
    result, cpu_s = run(directory, "long", num_steps, timeout_s)
    rows = [json.loads(line) for line in (directory / "long" / "metrics.jsonl").read_text().splitlines()]
    step_s = [after["time"] - before["time"] for before, after in itertools.pairwise(rows)]
    return {
        "result": result,
        "steps_per_s": 1 / statistics.median(step_s),
        "step_s": statistics.median(step_s),
        "parts_s": {part: statistics.median(row[part] for row in rows if part in row) for part in PARTS},
        "cpu_s": cpu_s,
    }


def run(
    directory: Path,
    name: str,
    num_steps: int,
    timeout_s: float,
    more: Sequence[str] = (),
    *,
    topology: str | Path = TOPOLOGY,
) -> tuple[dict[str, Any], dict[str, float]]:
    """The run's result as the command prints it, and the CPU seconds of each of its processes."""
    sets = [f"train.num_steps={num_steps}", f"run.name={name}", f"run.dir={directory}", *more]
    command = [*START, str(topology), "--json", *(part for item in sets for part in ("--set", item))]
    with (directory / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=directory)
    watched = CpuTimes(psutil.Process(process.pid))
    try:
        deadline = time.monotonic() + timeout_s
        while process.poll() is None and time.monotonic() < deadline:
            watched.look()
            time.sleep(SAMPLE_S)  # a process that ends takes its CPU times with it: they are sampled
        output = process.communicate(timeout=1)[0]
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {(directory / f'{name}.log').read_text()[-2000:]}")
    return json.loads(output), watched.by_name()


class CpuTimes:
    """CPU seconds of a command and all that it started, as last seen."""

    def __init__(self, command: psutil.Process) -> None:
        self._command = command
        self._seen: dict[int, tuple[str, float]] = {}

    def look(self) -> None:
        """Note the times of all that run now."""
        try:
            family = [self._command, *self._command.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                times = process.cpu_times()
                known, _ = self._seen.get(process.pid, ("", 0.0))
                self._seen[process.pid] = (self._name(process) or known, times.user + times.system)
            except psutil.NoSuchProcess:
                continue

    def by_name(self) -> dict[str, float]:
        """Largest first; several of one name together."""
        sums: Counter[str] = Counter()
        for name, seconds in self._seen.values():
            sums[name] += seconds
        return {name: round(seconds, 2) for name, seconds in sums.most_common()}

    def _name(self, process: psutil.Process) -> str:
        """The name of a process; "" if it has ended and its times alone are left."""
        words = " ".join(process.cmdline())
        if process.pid == self._command.pid or "start-topology" in words:  # a child that has not begun is a copy of it
            return "daemon"
        if "actors.observer" in words or "actors.trackers" in words:
            return "observers"
        names = ("nats-server", "router", "reward.worker", "functions.keeper", "tiny_engine", "guardian")
        return next((name for name in names if name in words), words.rpartition(" ")[2])


if __name__ == "__main__":
    sys.exit(main())
