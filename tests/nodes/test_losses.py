"""One run on two machines that loses its second node in three ways trains what an undisturbed one would."""

import shutil
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from runtime.node.claims.claim import is_lock
from tests.chaos.audit import audit
from tests.chaos.harness import Run
from tests.nodes.two_machines import WAIT_S, finishes, pids, start, topology
from tests.support.machines.lan import Lan, machines
from tests.support.machines.machine import Machine, Process

pytestmark = [pytest.mark.nodes, pytest.mark.anyio]  # above RUN_S and the starts
CUT_S = 40.0  # twice the lifetime of a node's claim
STEPS = 60


@dataclass
class Two:
    """A run on two machines: n0 is home, n1 has the reward actor and an engine."""

    lan: Lan
    run: Run
    file: Path
    home: Process
    other: Process

    def start(self, machine: Machine, node: str, *options: str) -> Process:
        """Start a node of the run on a machine."""
        settings = self.run.command[self.run.command.index("--set") :]
        return start(machine, self.file, node, *options, *settings)

    async def finish(self) -> None:
        """Wait until both nodes have ended with 0, and audit the log."""
        finishes(self.home, self.other)
        await audit(self.run, killed=None)


@contextmanager
def two(directory: Path, *, steps: int = STEPS, wait_s: int = WAIT_S, clock: float = 0.0) -> Generator[Two]:
    """Start a run on two machines, of which the second one's clock is ahead by `clock` seconds."""
    file = topology(directory, runs=directory / "runs", home="eth0", wait_s=wait_s)
    run = Run(directory, num_steps=steps, topology=file)
    settings = run.command[run.command.index("--set") :]
    with machines("n0", shared=[directory]) as lan:
        n1 = lan.add("n1", clock=clock)
        yield Two(lan, run, file, start(lan["n0"], file, "local", *settings), start(n1, file, "n1", *settings))


async def test_a_node_is_killed_cut_off_and_replaced_by_another_machine(tmp_path: Path) -> None:
    """The clocks of the machines are two hours apart. The reward actor is on the node that is lost."""
    with two(tmp_path, clock=7200.0) as nodes:
        lan, home = nodes.lan, nodes.home
        home.wait_for("step  8/", 120)

        nodes.other.signal(signal.SIGKILL)
        nodes.other.wait(60)
        nodes.other = nodes.start(lan["n1"], "n1")
        nodes.other.wait_for("node n1 joins run", 60)
        home.wait_for("step 16/", 120)

        lan.cut("n1")
        cut_at = time.monotonic()
        home.wait_for("node n1 has been silent for", CUT_S)  # within the cut
        await anyio.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))  # the cut itself, not a condition
        lan.heal("n1")
        nodes.other.wait_for("the bus answers again, after", 60)
        home.wait_for("step 24/", 120)

        lan["n1"].unplug()
        nodes.other = nodes.start(lan.add("n2", clock=-3600.0), "n1")
        await nodes.finish()


@pytest.mark.nightly
async def test_home_moves_to_another_machine_and_the_other_node_keeps_its_engine(tmp_path: Path) -> None:
    """The machine of home is lost. Another one takes its address and the shared directory, and the bus comes back."""
    with two(tmp_path) as nodes:
        nodes.home.wait_for("step  8/", 120)
        before = pids(nodes.run.directory, "n1", "engine.policy.0")
        nodes.lan["n0"].unplug()
        nodes.other.wait_for("does not answer; this node goes on without it for up to 600 s (bus.outage_s)", 60)
        nodes.home = nodes.start(nodes.lan.add("n2", address_of="n0", clock=-3600.0), "local")
        nodes.home.wait_for("resuming run", 90)
        nodes.other.wait_for("the bus answers again, after", 90)
        await nodes.finish()
        assert pids(nodes.run.directory, "n1", "engine.policy.0") == before


@pytest.mark.nightly
async def test_home_is_taken_over_and_the_old_one_ends_before_its_network_returns(tmp_path: Path) -> None:
    """New lock files stand for a file system that does not show the locks of other machines."""
    with two(tmp_path) as nodes:
        lan, old = nodes.lan, nodes.home
        old.wait_for("step  8/", 120)
        lan.cut("n0")
        new = lan.add("n2", address_of="n0")
        locked = nodes.start(new, "local", "--take-over")
        assert locked.wait(60) == 2
        assert "is in use" in locked.output()
        for lock in [path for path in nodes.run.directory.iterdir() if is_lock(path)]:
            shutil.copyfile(lock, tmp_path / "lock")
            (tmp_path / "lock").rename(lock)
        refused = nodes.start(new, "local")
        assert refused.wait(60) == 2
        assert "--take-over" in refused.output()
        nodes.home = nodes.start(new, "local", "--take-over")
        assert old.wait(60) == 1
        assert "is home now" in old.output()
        lan.heal("n0")
        nodes.other.wait_for("the bus answers again, after", 90)
        await nodes.finish()
