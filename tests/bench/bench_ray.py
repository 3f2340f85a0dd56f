"""Prompt groups from one process to another: over the bus, durable, against Ray actors and its object store. JSON.

A group of 8 samples and 20,000 tokens goes from a producer to a consumer in another process: many under way for the
rate, one after another for the latency, from the producer's first move to the arrays in the consumer's hands. Over the
bus it is stored in a file stream, and an event says so, both confirmed; see bus_side. Through Ray it is an object in
shared memory that nothing survives, once with its columns as Python lists and once as numpy arrays; see ray_side. Of
the two ways through Ray that are measured the better one counts. The sides take turns.

Ray is not part of the environment. Give it one of its own:

    python3 -m venv .venv-ray && .venv-ray/bin/pip install -r requirements/bench.txt

Run: python -m tests.bench.bench_ray
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from runtime.addresses import BUS_URL_VARIABLE
from runtime.bus import Bus, StreamLimits
from runtime.bus.server import running_server
from runtime.logs import configure_logging
from tests.bench.bus_side import RUN
from tests.bench.rig import ROOT, processes, rounded, showing_logs

RAY_PYTHON = ROOT / ".venv-ray" / "bin" / "python"
HOW_TO_INSTALL = f"""no Ray: {{python}} cannot import it. To compare with it:
  python3 -m venv {RAY_PYTHON.parents[1].name} && {RAY_PYTHON.parents[1].name}/bin/pip install -r requirements/bench.txt
or name an interpreter that has it: --ray-python PATH"""
TARGETS = {"rate_to_ray_lists": 2.5, "latency_to_ray_lists": 1 / 3}
RAY_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
FORMS = ("lists", "numpy")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000, help="for the rate, in each turn")
    parser.add_argument("--latency-groups", type=int, default=200, help="for the latency, in each turn")
    parser.add_argument("--samples", type=int, default=8, help="per group")
    parser.add_argument("--tokens", type=int, default=20_000, help="per group")
    parser.add_argument("--prompt", type=int, default=200, help="of these, per sample")
    parser.add_argument("--in-flight", type=int, default=16, help="groups under way")
    parser.add_argument("--turns", type=int, default=3, help="of each side; medians count")
    parser.add_argument("--ray-python", type=Path, default=RAY_PYTHON, help="an interpreter with ray and numpy")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one turn of one side")
    args = parser.parse_args(argv)
    configure_logging("bench", RUN)
    names = ("groups", "latency_groups", "samples", "tokens", "prompt", "in_flight")
    sizes = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    with_ray = has_ray(args.ray_python)
    if not with_ray:
        print(HOW_TO_INSTALL.format(python=args.ray_python), file=sys.stderr)
    ours, theirs = list[dict[str, Any]](), list[dict[str, Any]]()
    for _ in range(args.turns):
        ours.append(anyio.run(over_the_bus, sizes, args.timeout, backend_options={"use_uvloop": True}))
        if with_ray:
            theirs.append(through_ray(args.ray_python, sizes, args.timeout))
    print(json.dumps(rounded(summary(ours, theirs)), indent=2))
    return 0


def has_ray(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", "import ray, numpy"], capture_output=True, timeout=60).returncode == 0


async def over_the_bus(sizes: Sequence[str], timeout_s: float) -> dict[str, float]:
    """One turn over a server of its own."""
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(timeout_s):
        run_dir = Path(folder)
        side = [sys.executable, "-m", "tests.bench.bus_side"]
        async with running_server(run_dir / "bus") as server:
            async with Bus.connect(server.url, RUN, name="bench") as bus:
                await bus.ensure_streams(StreamLimits())
            with showing_logs(run_dir), processes({"produce": [*side, "produce", *sizes]}, run_dir, server.url):
                environment = {**os.environ, BUS_URL_VARIABLE: server.url}
                done = await anyio.run_process([*side, "consume", *sizes], env=environment, cwd=ROOT, stderr=None)
    return json.loads(done.stdout.splitlines()[-1])


def through_ray(python: Path, sizes: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """One turn in a cluster of its own."""
    command = [str(python), str(Path(__file__).with_name("ray_side.py")), *sizes]
    done = subprocess.run(
        command, env={**os.environ, **RAY_ENV}, capture_output=True, text=True, timeout=timeout_s, cwd="/"
    )
    if done.returncode:
        raise RuntimeError(f"Ray's side failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the turns, and ours against theirs."""
    bus = {name: statistics.median(turn[name] for turn in ours) for name in ("groups_per_s", "latency_ms")}
    found: dict[str, Any] = {"targets": TARGETS, "bus": bus, "bus_turns": list(ours), "ray": None}
    if not theirs:
        return found
    found["ray"] = {"version": theirs[0]["version"]}
    for form in FORMS:
        best = {
            "groups_per_s": statistics.median(max(w["groups_per_s"] for w in turn[form].values()) for turn in theirs),
            "latency_ms": statistics.median(min(w["latency_ms"] for w in turn[form].values()) for turn in theirs),
        }
        found["ray"][form] = best
        found[f"rate_to_ray_{form}"] = bus["groups_per_s"] / best["groups_per_s"]
        found[f"latency_to_ray_{form}"] = bus["latency_ms"] / best["latency_ms"]
    return {**found, "ray_turns": list(theirs)}


if __name__ == "__main__":
    sys.exit(main())
