"""Restart groups over two machines: one death restarts the processes on both, once."""

import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.pace import Pace
from tests.nodes.two_machines import changes, check_books, check_learned, finishes, pids, start, topology
from tests.sglang.recipe import RECIPE
from tests.support.machines.lan import machines
from tests.support.machines.machine import Machine, polled

pytestmark = [pytest.mark.nodes]  # above RUN_S and the starts

RANKS = """
train.save_interval = 2
trainer.num_processes = 2
trainer.nodes = ["local", "n1"]
{layout}
"""
ENGINE = """
rollout.rollout_batch_size = 8
rollout.n_samples_per_prompt = 4

[engines.policy]
nodes = ["n1", "local"]
num_processes = 2
num_nodes_per_engine = 2
env.SGLANG_CPU_OMP_THREADS_BIND = "0|1"
weight_transport = "{transport}"
"""
RANKS_ON = {"trainer.0": "local", "trainer.1": "n1"}
ENGINE_ON = {"engine.policy.0": "n1", "engine.policy.0.1": "local"}
NODES = RANKS_ON | ENGINE_ON
LAYOUTS = {
    "DP2": "trainer.optimizer.use_distributed_optimizer = true",
    "TP2": "trainer.megatron.tensor_model_parallel_size = 2",
}
STEPS = 12
RESTART_S = 120.0
ENGINE_S = 500.0  # of SGLang's start beside other work
STOP_S = 60.0
CUT_S = 15.0


def wait_for_starts(run_dir: Path, processes: Iterable[str], number: int) -> None:
    """Wait until each of the processes has started that often."""
    for _ in polled(RESTART_S, lambda: f"not started {number} times: {changes(run_dir, 'n1')[-4:]}"):
        if all(len(pids(run_dir, NODES[process], process)) >= number for process in processes):
            return


def starts(run_dir: Path, processes: Iterable[str]) -> set[int]:
    """How often the processes have started."""
    return {len(pids(run_dir, NODES[process], process)) for process in processes}


def exits(run_dir: Path, process: str) -> list[dict[str, Any]]:
    return changes(run_dir, NODES[process], process, "exited")


def kill(machine: Machine, run_dir: Path, process: str) -> None:
    machine.run(["kill", "-9", str(pids(run_dir, NODES[process], process)[-1])])


@pytest.mark.parametrize(
    ("layout", "six"),
    [pytest.param("DP2", False, id="DP2"), pytest.param("TP2", True, id="TP2, IPv6", marks=pytest.mark.nightly)],
)
def test_ranks_on_two_machines_restart_together(tmp_path: Path, layout: str, six: bool) -> None:
    run_dir = tmp_path / "two"
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1", clock=7200.0)
        home, other = (n0.address6, n1.address6) if six else ("auto", "auto")
        file = topology(tmp_path, RANKS.format(layout=LAYOUTS[layout]), home=home, other=other, steps=STEPS)
        pace = Pace(tmp_path / "pace")
        pace.allow(2)
        first, later = start(n0, file, "local", env=pace.environment()), start(n1, file, "n1")
        first.wait_for("step  3/", 180)
        kill(n1, run_dir, "trainer.1")
        wait_for_starts(run_dir, RANKS_ON, 2)
        (killed,), (_,) = exits(run_dir, "trainer.1"), exits(run_dir, "trainer.0")
        assert killed["reason"] == "killed by SIGKILL"
        pace.allow(5)
        first.wait_for("step  6/", RESTART_S)
        assert starts(run_dir, RANKS_ON) == {2}
        later.signal(signal.SIGKILL)
        later.wait(60)
        later = start(n1, file, "n1")
        wait_for_starts(run_dir, RANKS_ON, 3)
        pace.free()
        finishes(first, later)
    assert starts(run_dir, RANKS_ON) == {3}
    check_books(run_dir, STEPS)
    check_learned(run_dir)


@pytest.mark.nightly
def test_ranks_on_two_machines_stop_with_home_and_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "two"
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        file = topology(tmp_path, RANKS.format(layout=LAYOUTS["DP2"]), steps=STEPS)
        first, later = start(n0, file, "local"), start(n1, file, "n1")
        first.wait_for("step  3/", 180)
        first.signal(signal.SIGINT)
        assert first.wait(STOP_S) == 130, first.output()
        assert later.wait(STOP_S) == 130, later.output()
        assert starts(run_dir, RANKS_ON) == {1}
        first = start(n0, file, "local")
        first.wait_for("trainer waits for node n1", RESTART_S)
        later = start(n1, file, "n1")
        finishes(first, later)
    assert starts(run_dir, RANKS_ON) == {2}
    check_books(run_dir, STEPS)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("transport", "six"),
    [pytest.param("disk", False, id="disk"), pytest.param("collective", True, id="collective, IPv6")],
)
def test_an_engine_on_two_machines_restarts_whichever_half_is_killed(tmp_path: Path, transport: str, six: bool) -> None:
    run_dir, steps = tmp_path / "two", 12
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1", clock=7200.0)
        home, other = (n0.address6, n1.address6) if six else ("auto", "auto")
        more = ENGINE.format(transport=transport)
        file = topology(tmp_path, more, include=RECIPE, home=home, other=other, steps=steps)
        first, later = start(n0, file, "local"), start(n1, file, "n1")
        first.wait_for("step  2/", ENGINE_S)
        kill(n1, run_dir, "engine.policy.0")
        wait_for_starts(run_dir, ENGINE_ON, 2)
        first.wait_for("step  5/", ENGINE_S)
        assert starts(run_dir, ENGINE_ON) == {2}
        kill(n0, run_dir, "engine.policy.0.1")
        wait_for_starts(run_dir, ENGINE_ON, 3)
        finishes(first, later, ENGINE_S)
    assert starts(run_dir, ENGINE_ON) == {3}
    reasons = {process: [each["reason"] for each in exits(run_dir, process)] for process in ENGINE_ON}
    assert reasons["engine.policy.0"][0] == reasons["engine.policy.0.1"][1] == "killed by SIGKILL"
    check_books(run_dir, steps, step_groups=8)


@pytest.mark.nightly
def test_ranks_outlast_a_cut_network_and_meet_on_another_machine(tmp_path: Path) -> None:
    """A short cut of the network ends no rank. A machine that is lost takes its rank along, and another replaces it."""
    run_dir = tmp_path / "two"
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        file = topology(tmp_path, RANKS.format(layout=LAYOUTS["DP2"]), steps=STEPS)
        first, _ = start(n0, file, "local"), start(n1, file, "n1")
        first.wait_for("step  2/", 180)
        lan.cut("n1")
        time.sleep(CUT_S)
        lan.heal("n1")
        first.wait_for("step  5/", RESTART_S)
        assert starts(run_dir, RANKS_ON) == {1}
        n1.unplug()
        n2 = lan.add("n2")
        later = start(n2, file, "n1")
        wait_for_starts(run_dir, RANKS_ON, 2)
        finishes(first, later)
    (ended, *_) = exits(run_dir, "trainer.0")
    assert ended["reason"] == "a process on node n1, another process of restart group trainer, had ended"
    assert starts(run_dir, RANKS_ON) == {2}
    check_books(run_dir, STEPS)
