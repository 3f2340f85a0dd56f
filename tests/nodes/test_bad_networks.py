"""Runs on two machines over bad networks and after long outages. `just nodes` runs them: they take about an hour."""

import random
import signal
import time
from pathlib import Path

import anyio
import pytest

from tests.nodes.test_losses import two
from tests.nodes.two_machines import pids
from tests.support.machines.machine import polled

pytestmark = [pytest.mark.nodes, pytest.mark.nightly, pytest.mark.anyio, pytest.mark.timeout(3600)]

STEPS = 40
RANDOM_S = 1800.0
NAMED_WITHIN_S = 12.0  # 10 s, and what a loaded machine takes on top
SEED = 7


async def test_a_run_over_a_slow_network_that_loses_packets(tmp_path: Path) -> None:
    """100 ms plus or minus 50 ms each way, and 1 % of the packets lost."""
    with two(tmp_path, steps=10) as nodes:
        nodes.home.wait_for("step  2/", 120)
        nodes.lan.delay(100, jitter_ms=50)
        nodes.lan.loss(0.01)
        await nodes.finish()


@pytest.mark.parametrize("seconds", [5, 60, 500])
async def test_a_cut_within_the_outage_costs_no_engine(tmp_path: Path, seconds: int) -> None:
    """Home waits for the node longer than the cut, because the only reward actor is there."""
    with two(tmp_path, steps=STEPS, wait_s=600) as nodes:
        nodes.home.wait_for("step  5/", 120)
        nodes.lan.cut("n1")
        await anyio.sleep(seconds)  # the cut itself, not a condition
        nodes.lan.heal("n1")
        await nodes.finish()
        assert len(pids(nodes.run.directory, "n1", "engine.policy.0")) == 1


async def test_a_node_that_is_cut_off_for_longer_ends_and_takes_part_after_its_start(tmp_path: Path) -> None:
    """A cut of 900 s, with bus.outage_s at its default of 600."""
    with two(tmp_path, steps=STEPS) as nodes:
        nodes.home.wait_for("step  5/", 120)
        nodes.lan.cut("n1")
        assert nodes.other.wait(700) == 1
        assert "did not answer for 600 s (bus.outage_s)" in nodes.other.output()
        await anyio.sleep(290)  # the rest of the cut
        nodes.lan.heal("n1")
        if nodes.home.returncode is not None:  # home waits nodes.n1.wait_s for its only reward actor
            assert "n1" in nodes.home.output()
            nodes.home = nodes.start(nodes.lan["n0"], "local")
        nodes.other = nodes.start(nodes.lan["n1"], "n1")
        await nodes.finish()


async def test_the_bus_is_away_for_five_minutes(tmp_path: Path) -> None:
    with two(tmp_path, steps=STEPS) as nodes:
        nodes.home.wait_for("step  5/", 120)
        nodes.home.kill()
        nodes.home.wait(60)
        nodes.other.wait_for("this node goes on without it for up to 600 s (bus.outage_s)", 60)
        await anyio.sleep(300)  # the outage itself
        nodes.home = nodes.start(nodes.lan["n0"], "local")
        nodes.other.wait_for("the bus answers again, after", 60)
        await nodes.finish()
        assert len(pids(nodes.run.directory, "n1", "engine.policy.0")) == 1


async def test_thirty_random_minutes(tmp_path: Path) -> None:
    """Cuts and kills of node daemons at random. Home's terminal names who is away within 10 s."""
    moments = random.Random(SEED)
    with two(tmp_path, steps=1_000_000) as nodes:
        nodes.home.wait_for("step ", 120)
        end = time.monotonic() + RANDOM_S
        while time.monotonic() < end:
            await anyio.sleep(moments.uniform(5, 40))
            what = moments.choice(["cut", "kill n1", "kill local"])
            if what == "cut":
                seen = nodes.home.output().count("node n1 has been silent for")
                nodes.lan.cut("n1")
                for _ in polled(NAMED_WITHIN_S, nodes.home.output):
                    if nodes.home.output().count("node n1 has been silent for") > seen:
                        break
                await anyio.sleep(moments.uniform(0, 40))
                nodes.lan.heal("n1")
            else:
                node = what.removeprefix("kill ")
                process = nodes.home if node == "local" else nodes.other
                process.signal(signal.SIGKILL)
                process.wait(60)
                if node == "local":
                    nodes.home = nodes.start(nodes.lan["n0"], node)
                else:
                    nodes.other = nodes.start(nodes.lan["n1"], node)
            steps = nodes.home.output().count("\nstep ")
            for _ in polled(180, nodes.home.output):
                if nodes.home.output().count("\nstep ") > steps:
                    break
        nodes.home.signal(signal.SIGINT)
        assert nodes.home.wait(60) == 130, nodes.home.output()
        nodes.other.wait(60)
