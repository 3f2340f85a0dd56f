"""One run on two machines that loses its second node in three ways trains what an undisturbed one would."""

import shutil
import signal
import time
from pathlib import Path

import anyio
import pytest

from runtime.node.claims.claim import is_lock
from tests.chaos.audit import audit
from tests.chaos.harness import Run
from tests.nodes.test_outages import pids
from tests.nodes.test_runs import RUN_S, start
from tests.support.machines.lan import machines

pytestmark = [pytest.mark.nodes, pytest.mark.anyio, pytest.mark.timeout(400)]  # above RUN_S and the starts
CUT_S = 40.0  # twice the lifetime of a node's claim
STEPS = 60
TWO = """
include = "laptop.toml"
run = {{ dir = "{directory}/runs" }}
nodes.local = {{ address = "eth0", gpus = 0 }}
nodes.n1 = {{ address = "auto", wait_s = 60 }}
bus.node = "local"
engines.policy.nodes = ["n1", "local"]
engines.policy.num_engines = 2
reward.nodes = ["n1"]
"""


async def test_a_node_is_killed_cut_off_and_replaced_by_another_machine(tmp_path: Path) -> None:
    """The clocks of the machines are two hours apart. The reward actor is on the node that is lost."""
    file = tmp_path / "two.toml"
    file.write_text(TWO.format(directory=tmp_path))
    run = Run(tmp_path, num_steps=STEPS, topology=file)
    options = run.command[run.command.index("--set") :]
    with machines("n0", shared=[tmp_path]) as lan:
        n1 = lan.add("n1", clock=7200.0)
        first, later = start(lan["n0"], file, "local", *options), start(n1, file, "n1", *options)
        first.wait_for("step  8/", 120)

        later.signal(signal.SIGKILL)
        later.wait(10)
        again = start(n1, file, "n1", *options)
        again.wait_for("node n1 joins run", 60)
        first.wait_for("step 16/", 120)

        lan.cut("n1")
        cut_at = time.monotonic()
        first.wait_for("node n1 has been silent for", 12)
        await anyio.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))  # the cut itself, not a condition
        lan.heal("n1")
        again.wait_for("the bus answers again, after", 30)
        first.wait_for("step 24/", 120)

        n1.unplug()
        replaced = start(lan.add("n2", clock=-3600.0), file, "n1", *options)
        assert first.wait(RUN_S) == 0, first.output()
        assert replaced.wait(30) == 0, replaced.output()
    await audit(run, killed=None)


@pytest.mark.nightly
async def test_home_moves_to_another_machine_and_the_other_node_keeps_its_engine(tmp_path: Path) -> None:
    """The machine of home is lost. Another one takes its address and the shared directory, and the bus comes back."""
    file = tmp_path / "two.toml"
    file.write_text(TWO.format(directory=tmp_path))
    run = Run(tmp_path, num_steps=STEPS, topology=file)
    options = run.command[run.command.index("--set") :]
    with machines("n0", "n1", shared=[tmp_path]) as lan:
        first, other = start(lan["n0"], file, "local", *options), start(lan["n1"], file, "n1", *options)
        first.wait_for("step  8/", 120)
        before = pids(run.directory, "n1", "engine.policy.0")
        lan["n0"].unplug()
        other.wait_for("does not answer; this node goes on without it for up to 600 s (bus.outage_s)", 15)
        moved = start(lan.add("n2", address_of="n0", clock=-3600.0), file, "local", *options)
        moved.wait_for("resuming run", 90)
        other.wait_for("the bus answers again, after", 90)
        assert moved.wait(RUN_S) == 0, moved.output()
        assert other.wait(30) == 0, other.output()
    await audit(run, killed=None)
    assert pids(run.directory, "n1", "engine.policy.0") == before


@pytest.mark.nightly
async def test_home_is_taken_over_and_the_old_one_ends_before_its_network_returns(tmp_path: Path) -> None:
    """New lock files stand for a file system that does not show the locks of other machines."""
    file = tmp_path / "two.toml"
    file.write_text(TWO.format(directory=tmp_path))
    run = Run(tmp_path, num_steps=STEPS, topology=file)
    options = run.command[run.command.index("--set") :]
    with machines("n0", "n1", shared=[tmp_path]) as lan:
        old, other = start(lan["n0"], file, "local", *options), start(lan["n1"], file, "n1", *options)
        old.wait_for("step  8/", 120)
        lan.cut("n0")
        new = lan.add("n2", address_of="n0")
        locked = start(new, file, "local", "--take-over", *options)
        assert locked.wait(60) == 2
        assert "is in use" in locked.output()
        for lock in [path for path in run.directory.iterdir() if is_lock(path)]:
            shutil.copyfile(lock, tmp_path / "lock")
            (tmp_path / "lock").rename(lock)
        refused = start(new, file, "local", *options)
        assert refused.wait(60) == 2
        assert "--take-over" in refused.output()
        moved = start(new, file, "local", "--take-over", *options)
        assert old.wait(30) == 1
        assert "is home now" in old.output()
        lan.heal("n0")
        other.wait_for("the bus answers again, after", 90)
        assert moved.wait(RUN_S) == 0, moved.output()
        assert other.wait(30) == 0, other.output()
    await audit(run, killed=None)
