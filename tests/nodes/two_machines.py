"""Runs on two machines: their topologies and commands, and what their logs and results must show."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.support.machines.lan import ROOT
from tests.support.machines.machine import Machine, Process, polled

TOPOLOGY = """
include = "{include}"
run = {{ name = "{name}", dir = "{runs}" }}
train.num_steps = {steps}
nodes.local = {{ address = "{home}", gpus = 0 }}
nodes.n1 = {{ address = "{other}", wait_s = {wait_s} }}
bus.node = "local"
{more}
"""
REWARD_ON_N1 = """
engines.policy.nodes = ["n1", "local"]
engines.policy.num_engines = 2
reward.nodes = ["n1"]
"""
APART = """
engines.policy.nodes = {nodes}
engines.policy.num_engines = 2
engines.policy.weight_transport = "{transport}"
{more}
"""
RUN_S = 240.0
WAIT_S: Final = 240  # that home waits for a node: longer than any start takes on a busy machine
REFUSED_S = 60.0  # the start of both commands included
STEP_GROUPS = 64  # of the laptop topology


def topology(
    directory: Path,
    more: str = REWARD_ON_N1,
    *,
    include: str | Path = "laptop.toml",
    name: str = "two",
    runs: Path | None = None,
    home: str = "auto",
    other: str = "auto",
    steps: int = 20,
    wait_s: int = WAIT_S,
) -> Path:
    """Write a topology of two nodes, of which "local" is home.

    Args:
        directory: of the file.
        more: TOML of further settings.
        include: topology that this one includes.
        name: of the run.
        runs: directory of the run's directory; by default that of the file.
        home: address of home.
        other: address of the other node.
        steps: train steps.
        wait_s: seconds that home waits for the other node.
    """
    file = directory / f"{name}.toml"
    values = {"include": include, "name": name, "home": home, "other": other, "steps": steps, "wait_s": wait_s}
    file.write_text(TOPOLOGY.format(runs=runs or directory, more=more, **values))
    return file


def apart(
    directory: Path, *, transport: str, steps: int = 5, nodes: tuple[str, ...] = ("n1", "local"), more: str = ""
) -> Path:
    """Write the topology of a run whose directory may be missing on a machine: that in which runs are is its own."""
    (runs := directory / "runs").mkdir()
    text = APART.format(nodes=json.dumps(nodes), transport=transport, more=more)
    return topology(directory, text, name="apart", runs=runs, steps=steps)


def start(machine: Machine, file: Path, node: str, *options: str, env: Mapping[str, str] | None = None) -> Process:
    """Start a node of a run on a machine."""
    command = [
        sys.executable,
        "-P",
        str(ROOT / "bin" / "physarum.py"),
        "start-topology",
        str(file),
        "--node",
        node,
        *options,
    ]
    return machine.start(command, env=env, cwd=file.parent)


def copy_join(home: Machine, other: Machine, run_dir: Path) -> str:
    """Copy the join file to a machine that does not see the run directory, as a person would; return its path there."""
    join = home.path(run_dir / "join.toml")
    for _ in polled(60, lambda: f"no {join}"):
        if join.exists():
            break
    shutil.copy(join, other.path("/tmp/join.toml"))
    return "/tmp/join.toml"


def ends(*processes: Process, within_s: float, code: int) -> None:
    """Check that processes end with one exit code, each within so many seconds after the one before."""
    assert [process.wait(within_s) for process in processes] == [code] * len(processes)


def finishes(home: Process, other: Process, within_s: float = RUN_S) -> None:
    """Check that a run finishes, and that the other node ends with it."""
    ends(home, within_s=within_s, code=0)
    ends(other, within_s=60, code=0)


def result(run_dir: Path) -> dict[str, Any]:
    """Read the result of a run that has ended."""
    return msgspec.json.decode((run_dir / "result.json").read_bytes())


def check_books(run_dir: Path, steps: int, step_groups: int = STEP_GROUPS) -> None:
    """Check that every group of a finished run was trained once or left out for a reason."""
    ended = result(run_dir)
    assert ended["finished"]
    groups = ended["result"]["groups"]
    assert groups["trained"] == steps * step_groups
    assert groups["issued"] == sum(groups[name] for name in groups if name != "issued")


def check_learned(run_dir: Path) -> None:
    """Check that the reward of a run has risen."""
    shown = result(run_dir)["result"]
    assert shown["reward_last"] > shown["reward_first"]


def changes(run_dir: Path, node: str, process: str | None = None, change: str | None = None) -> list[dict[str, Any]]:
    """Return the changes of a node's processes, from the log of its daemon; those of one process or kind only."""
    whole, _, _ = (run_dir / "logs" / node / "daemon.jsonl").read_text().rpartition("\n")  # the rest is half written
    events = (event for event in map(json.loads, whole.splitlines()) if event["event"] == "process_changed")
    return [each for each in events if process in (None, each["process"]) and change in (None, each["change"])]


def pids(run_dir: Path, node: str, process: str) -> list[int]:
    """Return the ids of a process of a node, from its first start to its last."""
    return [each["pid"] for each in changes(run_dir, node, process, "started")]


def ready_hosts(run_dir: Path) -> set[str]:
    """Return the node and host of every server of both nodes, as their logs name them."""
    return {
        f"{node} {each['host']}"
        for node in ("local", "n1")
        for each in changes(run_dir, node, change="ready")
        if each.get("host") is not None
    }
