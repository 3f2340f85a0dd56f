"""Restart groups over two machines: one death restarts the processes on both, once."""

import json
import signal
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.test_runs import RUN_S, result, start
from tests.sglang.recipe import RECIPE
from tests.support.machines.lan import machines
from tests.support.machines.machine import Machine, polled

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(400)]  # above RUN_S and the starts

RANKS = """
include = "laptop.toml"
run = {{ name = "two", dir = "{directory}" }}
train.num_steps = {steps}
train.save_interval = 2
nodes.local = {{ address = "{home}", gpus = 0 }}
nodes.n1 = {{ address = "{other}", wait_s = 60 }}
bus.node = "local"
trainer.num_processes = 2
trainer.nodes = ["local", "n1"]
{layout}
"""
ENGINE = """
include = "{recipe}"
run = {{ name = "two", dir = "{directory}" }}
train.num_steps = {steps}
rollout.rollout_batch_size = 8
rollout.n_samples_per_prompt = 4
nodes.local = {{ address = "{home}", gpus = 0 }}
nodes.n1 = {{ address = "{other}", wait_s = 60 }}
bus.node = "local"

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
STOP_S = 15.0
CUT_S = 15.0
KILL_S = 5.0  # from the death of a rank on one machine to the end of the ranks on the other


def changes(run_dir: Path, process: str, change: str) -> list[dict[str, Any]]:
    """The changes of one process, from the log of its node daemon."""
    return [
        event for event in _events(run_dir, NODES[process]) if (event["process"], event["change"]) == (process, change)
    ]


def _events(run_dir: Path, node: str) -> Iterator[dict[str, Any]]:
    for line in (run_dir / "logs" / node / "daemon.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "process_changed":
            yield event


def wait_for_starts(run_dir: Path, processes: Iterable[str], number: int) -> None:
    """Wait until each of the processes has started that often."""
    for _ in polled(RESTART_S, lambda: f"not started {number} times: {list(_events(run_dir, 'n1'))[-4:]}"):
        if all(len(changes(run_dir, process, "started")) >= number for process in processes):
            return


def starts(run_dir: Path, processes: Iterable[str]) -> set[int]:
    """How often the processes have started."""
    return {len(changes(run_dir, process, "started")) for process in processes}


def kill(machine: Machine, run_dir: Path, process: str) -> None:
    machine.run(["kill", "-9", str(changes(run_dir, process, "started")[-1]["pid"])])


@pytest.mark.parametrize(
    ("layout", "six"),
    [pytest.param("DP2", False, id="DP2"), pytest.param("TP2", True, id="TP2, IPv6", marks=pytest.mark.nightly)],
)
def test_ranks_on_two_machines_restart_together(tmp_path: Path, layout: str, six: bool) -> None:
    run_dir = tmp_path / "two"
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1", clock=7200.0)
        home, other = (n0.address6, n1.address6) if six else ("auto", "auto")
        file = tmp_path / "two.toml"
        text = RANKS.format(directory=tmp_path, steps=STEPS, home=home, other=other, layout=LAYOUTS[layout])
        file.write_text(text)
        first, later = start(n0, file, "local"), start(n1, file, "n1")
        first.wait_for("step  3/", 180)
        kill(n1, run_dir, "trainer.1")
        wait_for_starts(run_dir, RANKS_ON, 2)
        (killed,), (other,) = changes(run_dir, "trainer.1", "exited"), changes(run_dir, "trainer.0", "exited")
        assert killed["reason"] == "killed by SIGKILL"
        took = datetime.fromisoformat(other["time"]) - datetime.fromisoformat(killed["time"])
        assert took.total_seconds() < KILL_S
        first.wait_for("step  6/", RESTART_S)
        assert starts(run_dir, RANKS_ON) == {2}
        later.signal(signal.SIGKILL)
        later.wait(10)
        later = start(n1, file, "n1")
        wait_for_starts(run_dir, RANKS_ON, 3)
        assert first.wait(RUN_S) == 0, first.output()
        assert later.wait(30) == 0, later.output()
    assert starts(run_dir, RANKS_ON) == {3}
    ended = result(run_dir)
    groups = ended["result"]["groups"]
    assert ended["finished"]
    assert groups["trained"] == STEPS * 64
    assert groups["issued"] == sum(groups[name] for name in groups if name != "issued")
    assert ended["result"]["reward_last"] > ended["result"]["reward_first"]


@pytest.mark.nightly
def test_ranks_on_two_machines_stop_with_home_and_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "two"
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        file = tmp_path / "two.toml"
        text = RANKS.format(directory=tmp_path, steps=STEPS, home="auto", other="auto", layout=LAYOUTS["DP2"])
        file.write_text(text)
        first, later = start(n0, file, "local"), start(n1, file, "n1")
        first.wait_for("step  3/", 180)
        first.signal(signal.SIGINT)
        assert first.wait(STOP_S) == 130, first.output()
        assert later.wait(STOP_S) == 130, later.output()
        assert starts(run_dir, RANKS_ON) == {1}
        first = start(n0, file, "local")
        first.wait_for("trainer waits for node n1", RESTART_S)
        later = start(n1, file, "n1")
        assert first.wait(RUN_S) == 0, first.output()
        assert later.wait(30) == 0, later.output()
    assert starts(run_dir, RANKS_ON) == {2}
    assert result(run_dir)["result"]["groups"]["trained"] == STEPS * 64


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
        file = tmp_path / "two.toml"
        home, other = (n0.address6, n1.address6) if six else ("auto", "auto")
        settings = {"home": home, "other": other, "transport": transport, "steps": steps}
        file.write_text(ENGINE.format(recipe=RECIPE, directory=tmp_path, **settings))
        first, later = start(n0, file, "local"), start(n1, file, "n1")
        first.wait_for("step  2/", ENGINE_S)
        kill(n1, run_dir, "engine.policy.0")
        wait_for_starts(run_dir, ENGINE_ON, 2)
        first.wait_for("step  5/", ENGINE_S)
        assert starts(run_dir, ENGINE_ON) == {2}
        kill(n0, run_dir, "engine.policy.0.1")
        wait_for_starts(run_dir, ENGINE_ON, 3)
        assert first.wait(ENGINE_S) == 0, first.output()
        assert later.wait(30) == 0, later.output()
    assert starts(run_dir, ENGINE_ON) == {3}
    reasons = {process: [each["reason"] for each in changes(run_dir, process, "exited")] for process in ENGINE_ON}
    assert reasons["engine.policy.0"][0] == reasons["engine.policy.0.1"][1] == "killed by SIGKILL"
    groups = result(run_dir)["result"]["groups"]
    assert groups["trained"] == steps * 8
    assert groups["issued"] == sum(groups[name] for name in groups if name != "issued")


@pytest.mark.nightly
def test_ranks_outlast_a_cut_network_and_meet_on_another_machine(tmp_path: Path) -> None:
    """A short cut of the network ends no rank. A machine that is lost takes its rank along, and another replaces it."""
    run_dir = tmp_path / "two"
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        file = tmp_path / "two.toml"
        text = RANKS.format(directory=tmp_path, steps=STEPS, home="auto", other="auto", layout=LAYOUTS["DP2"])
        file.write_text(text)
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
        assert first.wait(RUN_S) == 0, first.output()
        assert later.wait(30) == 0, later.output()
    (ended, *_) = changes(run_dir, "trainer.0", "exited")
    assert ended["reason"] == "a process on node n1, another process of restart group trainer, had ended"
    assert starts(run_dir, RANKS_ON) == {2}
    assert result(run_dir)["result"]["groups"]["trained"] == STEPS * 64
