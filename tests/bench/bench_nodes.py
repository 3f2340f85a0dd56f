"""Whole runs on several machines: round trips of a synchronous step, and groups a second on two machines and on one.

The machines are namespaces of this kernel, on a switch that delays each frame (tests/support/machines; needs root). The
recipe is the laptop's, at staleness 0 and without evaluations. Prints medians over the pairs as JSON:

- round_trips: how much longer a step takes with a delay, in round trips. "bus_alone": the bus is on a machine of its
  own, so that every message between actors crosses the network. "two": as topologies/laptop-two-nodes.toml: bus,
  trainer and one engine at home, the other engine and reward on the other machine. The runs of a pair take turns: a
  run that waits for the network leaves its cores to the other one, which would hide the difference. Of each run the
  lower quartile counts, which other load on the machine moves least.
- throughput: groups a second on two machines without a delay, as a share of those on one machine. The runs of a pair
  start together, so that they have the same load.
- restart: seconds from the command that starts a node again, after its daemon was killed, to the first token of its
  engine, which is the only one; of these, the start of the engine's process (until it is ready), and the rest.

Run: python -m tests.bench.bench_nodes
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tests.bench.rig import ROOT, rounded
from tests.support.machines.bus import start_nats
from tests.support.machines.lan import Lan, machines
from tests.support.machines.machine import Machine, Process

START: Final = (sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "start-topology")
RUN: Final = "bench"
WARM_UP: Final = 4  # train steps
RUN_S: Final = 900.0
END_S: Final = 60.0
AGAIN_S: Final = 120.0  # from the restart of a node to the first token
RECIPE: Final = """
include = "{root}/topologies/laptop.toml"
run = {{ name = "bench", dir = "{directory}" }}
train = {{ num_steps = {steps}, save_interval = {steps} }}
eval = []
"""
ONE: Final = 'nodes.local = { address = "127.0.0.1", gpus = 0 }\nengines.policy.num_engines = 2\n'
TWO: Final = """
nodes.local = {{ address = "{home}", gpus = 0 }}
nodes.other = {{ address = "{other}", wait_s = 120 }}
bus.node = "local"
engines.policy.num_engines = 2
engines.policy.nodes = ["other", "local"]
reward.nodes = ["other"]
"""
AWAY: Final = TWO.replace("num_engines = 2", "num_engines = 1")  # the only engine is on the other machine
FIRST_TOKEN: Final = (sys.executable, "-m", "tests.bench.first_token")
ENGINE: Final = "engine.policy.0"


@dataclass(frozen=True)
class Layout:
    """Where the processes of a run are."""

    is_on_two: bool = False  # an engine and reward are on the other machine
    bus_on: str | None = None  # machine with a server that was started before the run, without TLS; None: the run's own

    def topology(self, lan: Lan, directory: Path, steps: int) -> str:
        """Start the server, if it is not the run's own, and return the topology file's text."""
        text = RECIPE.format(root=ROOT, directory=directory, steps=steps)
        text += TWO.format(home=lan["home"].address, other=lan["other"].address) if self.is_on_two else ONE
        if self.bus_on is None:
            return text
        _, url = start_nats(lan[self.bus_on])
        return text.replace('bus.node = "local"\n', "") + f'bus.url = "{url}"\n'


LAYOUTS: Final = {
    "one": Layout(),
    "one_plain": Layout(bus_on="home"),
    "two": Layout(is_on_two=True),
    "two_plain": Layout(is_on_two=True, bus_on="home"),
    "bus_alone": Layout(bus_on="other"),
}
SLOPES: Final = ("bus_alone", "two")
SHARES: Final = {"without_tls": ("two_plain", "one_plain"), "with_tls": ("two", "one")}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--pairs", type=int, default=5, help="of runs that start together; restarts")
    parser.add_argument("--steps", type=int, default=30, help="train steps of a run")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="of each frame, in each direction")
    parser.add_argument("--layout", choices=SLOPES, action="append", help="of round_trips; default: both")
    args = parser.parse_args(argv)
    print(json.dumps(rounded({name: CASES[name](args) for name in args.case or CASES}), indent=2))
    return 0


def round_trips(args: argparse.Namespace) -> dict[str, Any]:
    """The slope of a step's time between no delay and the delay of `args`, by layout."""
    found: dict[str, Any] = {}
    for name in args.layout or SLOPES:
        pairs = [
            tuple(lower_quartile(step_times_s(LAYOUTS[name], ms, args.steps)) for ms in (0.0, args.delay_ms))
            for _ in range(args.pairs)
        ]
        slopes = [(slow - quick) / (2e-3 * args.delay_ms) for quick, slow in pairs]
        quick_s, slow_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        found[name] = {
            "round_trips": statistics.median(slopes),
            "of_the_pairs": slopes,
            "step_s": quick_s,
            "delayed_step_s": slow_s,
        }
    return found


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Groups a second on two machines over those on one, with and without TLS."""
    found: dict[str, Any] = {}
    for name, (two, one) in SHARES.items():
        pairs = [together((two, one), args.steps) for _ in range(args.pairs)]
        shares = [one_s / two_s for two_s, one_s in pairs]
        found[name] = {"two_over_one": statistics.median(shares), "of_the_pairs": shares}
    return found


def restart(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the command that starts a node again to the first token of its engine."""
    found = [restarted() for _ in range(args.pairs)]
    rests_s = [each["before_engine_s"] + each["after_engine_s"] for each in found]
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return medians | {"rest_s": statistics.median(rests_s), "rest_of_each_s": rests_s}


def restarted() -> dict[str, float]:
    """Kill the daemon of the node with the engine, start the node again, and measure."""
    with tempfile.TemporaryDirectory() as folder, machines("home", "other", shared=Path(folder)) as lan:
        directory, file = Path(folder), Path(folder) / "topology.toml"
        text = RECIPE.format(root=ROOT, directory=directory, steps=100_000)
        file.write_text(text + AWAY.format(home=lan["home"].address, other=lan["other"].address))
        home, other = start(lan["home"], file, "local"), start(lan["other"], file, "other")
        home.wait_for("step      5/", RUN_S)
        other.signal(signal.SIGKILL)
        other.wait(END_S)
        log = directory / RUN / "logs" / "other" / "daemon.jsonl"
        watch = [*FIRST_TOKEN, str(log), str(log.stat().st_size), ENGINE, str(AGAIN_S)]
        watching = lan["other"].start(watch, cwd=ROOT)
        watching.wait_for("watching", END_S)
        began = time.time()
        start(lan["other"], file, "other")
        if watching.wait(AGAIN_S + END_S):
            raise RuntimeError(lan.describe())
        first_token = float(watching.output().split()[-1])
        home.signal(signal.SIGINT)
        home.wait(END_S)
        times = {
            event["change"]: event["time"]
            for event in map(json.loads, log.read_text().splitlines())
            if is_of_engine(event)
        }
        started, ready = (datetime.fromisoformat(times[change]).timestamp() for change in ("started", "ready"))
    return {
        "first_token_s": first_token - began,
        "before_engine_s": started - began,
        "engine_start_s": ready - started,
        "after_engine_s": first_token - ready,
    }


def is_of_engine(event: dict[str, Any]) -> bool:
    """Whether a line of a daemon's log is a change of the engine's process."""
    return event["event"] == "process_changed" and event["process"] == ENGINE


CASES: Final[dict[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "round_trips": round_trips,
    "throughput": throughput,
    "restart": restart,
}


def together(layouts: Sequence[str], steps: int) -> tuple[float, ...]:
    """Median seconds of a step of runs that start at the same time, without a delay."""
    with ThreadPoolExecutor(len(layouts)) as pool:
        return tuple(pool.map(lambda name: statistics.median(step_times_s(LAYOUTS[name], 0.0, steps)), layouts))


def step_times_s(layout: Layout, delay_ms: float, steps: int) -> list[float]:
    """Seconds between the ends of two train steps of a run, by step."""
    with tempfile.TemporaryDirectory() as folder, machines("home", "other", shared=Path(folder)) as lan:
        directory = Path(folder)
        file = directory / "topology.toml"
        file.write_text(layout.topology(lan, directory, steps))
        lan.delay(delay_ms)
        first = start(lan["home"], file, "local")
        later = start(lan["other"], file, "other") if layout.is_on_two else None
        if first.wait(RUN_S) or (later is not None and later.wait(END_S)):
            raise RuntimeError(lan.describe())
        rows = [json.loads(line) for line in (directory / RUN / "metrics.jsonl").read_text().splitlines()]
    times_s = [row["time"] for row in rows][min(WARM_UP, steps - 3) :]
    return [after - before for before, after in itertools.pairwise(times_s)]


def lower_quartile(values: Sequence[float]) -> float:
    """The value that a quarter of them is below."""
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def start(machine: Machine, file: Path, node: str) -> Process:
    """Start a node of a run."""
    return machine.start([*START, str(file), "--node", node], cwd=file.parent)


if __name__ == "__main__":
    sys.exit(main())
