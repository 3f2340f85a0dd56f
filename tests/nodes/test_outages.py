"""Runs on two machines of which one loses its network, leaves, or is stopped."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.nodes.two_machines import REWARD_ON_N1, WAIT_S, check_books, finishes, pids, start, topology
from tests.support.machines.lan import machines

pytestmark = [pytest.mark.nodes]  # above RUN_S and the starts
CUT_S = 40.0  # twice the lifetime of a node's claim


def last_step(output: str) -> int:
    """Return the last train step that a terminal shows."""
    return max(int(number) for number in re.findall(r"^step +(\d+)/", output, re.MULTILINE))


@pytest.mark.nightly
def test_a_node_that_is_cut_off_for_40_s_keeps_its_engine_and_takes_part_again(tmp_path: Path) -> None:
    with machines("n0", "n1", shared=[tmp_path]) as lan:
        file = topology(tmp_path, home="eth0", steps=40)
        first, later = start(lan["n0"], file, "local"), start(lan["n1"], file, "n1")
        first.wait_for("step  5/", 120)
        lan.cut("n1")
        cut_at = time.monotonic()
        first.wait_for("node n1 has been silent for", CUT_S)
        later.wait_for("does not answer; this node goes on without it for up to 600 s (bus.outage_s)", CUT_S)
        time.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))  # the cut itself, not a condition
        lan.heal("n1")
        later.wait_for("the bus answers again, after", 60)
        first.wait_for("node n1 is back", 60)
        finishes(first, later)
    run_dir = tmp_path / "two"
    check_books(run_dir, 40)
    for process in ("engine.policy.0", "reward.0"):
        assert len(pids(run_dir, "n1", process)) == 1, process


def test_ctrl_c_on_a_node_makes_it_leave_and_at_home_stops_the_run_everywhere(tmp_path: Path) -> None:
    with machines("n0", "n1", shared=[tmp_path]) as lan:
        more = REWARD_ON_N1.replace('reward.nodes = ["n1"]', 'reward.nodes = ["n1", "local"]')
        file = topology(tmp_path, f"{more}engines.policy.min_engines = 2", home="eth0", steps=1000)
        first, later = start(lan["n0"], file, "local"), start(lan["n1"], file, "n1")
        first.wait_for("step    3/", 120)
        later.signal(signal.SIGINT)
        assert later.wait(60) == 128 + signal.SIGINT, later.output()
        first.wait_for("node n1 left the run: SIGINT", 60)
        first.wait_for(
            f"waiting for node n1, up to {WAIT_S} s (nodes.n1.wait_s): "
            "1 of 2 engines are left, fewer than engines.policy.min_engines = 2",
            60,
        )
        left_at = last_step(first.output())
        first.wait_for(f"step {left_at + 3:>4}/", 120)  # its tasks are taken up at home
        again = start(lan["n1"], file, "n1")
        again.wait_for(" | reward ", 60)  # of a train step
        first.signal(signal.SIGINT)
        assert first.wait(60) == 128 + signal.SIGINT, first.output()
        assert again.wait(60) == 128 + signal.SIGINT, again.output()
        assert "run two stopped by node local: SIGINT" in again.output()
