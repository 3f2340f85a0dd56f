"""Prompt groups from one process to another: over the bus, durable, against Ray actors and its object store. JSON.

A group of 8 samples and 20,000 tokens goes from a producer to a consumer in another process: many under way for the
rate, one after another for the latency, from the producer's first move to the arrays in the consumer's hands. Over the
bus it is stored in a file stream, and an event says so, both confirmed; see bus_side. Through Ray it is an object in
shared memory that nothing survives, once with its columns as Python lists and once as numpy arrays; see ray_side. Of
the two ways through Ray that are measured the better one counts. The sides take turns; ratios are medians over the
turns, and of the best turn of each side, which other work on the machine disturbed least.

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

from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.bus.bus import Bus
from runtime.bus.limits import StreamLimits
from runtime.process.logs import configure_logging
from tests.bench.bus_side import RUN
from tests.bench.rig import ROOT, processes, rounded, showing_logs
from tests.support.running_server import running_server

RAY_PYTHON = ROOT / ".venv-ray" / "bin" / "python"
HOW_TO_INSTALL = f"""no Ray: {{python}} cannot import it. To compare with it:
  python3 -m venv {RAY_PYTHON.parents[1].name} && {RAY_PYTHON.parents[1].name}/bin/pip install -r requirements/bench.txt
or name an interpreter that has it: --ray-python PATH"""
TARGETS = {"rate_to_ray_lists": 8, "rate_to_ray_numpy": 6, "latency_to_ray_lists": 1 / 3}
RAY_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
FORMS = ("lists", "numpy")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=600, help="for the rate, in each turn")
    parser.add_argument("--latency-groups", type=int, default=100, help="for the latency, in each turn")
    parser.add_argument("--samples", type=int, default=8, help="per group")
    parser.add_argument("--tokens", type=int, default=20_000, help="per group")
    parser.add_argument("--prompt", type=int, default=200, help="of these, per sample")
    parser.add_argument("--in-flight", type=int, default=16, help="groups under way")
    parser.add_argument("--turns", type=int, default=5, help="of each side; medians over them count")
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
    """Medians over the turns: of each side, and of what one turn of ours is to the turn of theirs beside it."""
    found: dict[str, Any] = {"targets": TARGETS, "bus": medians(ours), "ray": None}
    if not theirs:
        return {**found, "bus_turns": list(ours)}
    found["ray"] = {"version": theirs[0]["version"]}
    for form in FORMS:
        best = [best_way(turn[form]) for turn in theirs]
        found["ray"][form] = medians(best)
        for key, name in (("rate", "groups_per_s"), ("latency", "latency_ms")):
            ratios = [mine[name] / other[name] for mine, other in zip(ours, best, strict=True)]
            found[f"{key}_to_ray_{form}"] = statistics.median(ratios)
        rates = [max(turn["groups_per_s"] for turn in side) for side in (ours, best)]
        found[f"best_rate_to_best_of_ray_{form}"] = rates[0] / rates[1]
    return {**found, "bus_turns": list(ours), "ray_turns": list(theirs)}


def medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in ("groups_per_s", "latency_ms")}


def best_way(ways: dict[str, dict[str, float]]) -> dict[str, float]:
    """The better figure of each kind, whichever way through Ray it comes from."""
    return {
        "groups_per_s": max(way["groups_per_s"] for way in ways.values()),
        "latency_ms": min(way["latency_ms"] for way in ways.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
