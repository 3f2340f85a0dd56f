"""`--check` on two machines compares them, and ends with one code on both."""

import re
import shutil
from pathlib import Path

import pytest

from tests.nodes.two_machines import REFUSED_S, apart, copy_join, ends, start
from tests.support.machines.lan import machines

pytestmark = [pytest.mark.nodes]  # above the starts


def test_two_machines_that_fit_are_accepted_on_both_and_nothing_is_left(tmp_path: Path) -> None:
    file = apart(tmp_path, transport="disk")
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1", clock=7200.0)
        other = start(n1, file, "n1", "--check")  # in any order
        other.wait_for("join.toml does not exist yet", 60)
        home = start(n0, file, "local", "--check")
        ends(home, other, within_s=REFUSED_S, code=0)
        for process in (home, other):
            output = process.output()
            assert f"{file}: valid; the run can start on local, n1" in output
            [line] = [line for line in output.splitlines() if line.startswith("node n1: host n1; ")]
            assert "0 GPUs; physarum 0.2.0.dev0, source " in line
            clock = re.search(r"; clock \+([\d.]+) s", line)
            assert clock is not None, line
            assert 7000 < float(clock[1]) < 7400  # give or take a round trip
        assert not list((tmp_path / "runs").iterdir())
        assert not list(n0.path("/tmp").glob("physarum-check-*"))


def test_machines_without_a_common_directory_are_refused_on_both_by_key(tmp_path: Path) -> None:
    file, run_dir = apart(tmp_path, transport="disk"), tmp_path / "runs" / "apart"
    with machines(shared=[tmp_path], own=[tmp_path / "runs"]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        home = start(n0, file, "local", "--check")
        other = start(n1, file, "n1", "--check", "--join", copy_join(n0, n1, run_dir))
        ends(home, other, within_s=REFUSED_S, code=2)
        for process in (home, other):
            assert 'node n1: engines.policy.weight_transport = "disk": ' in process.output()
            assert "valid" not in process.output()


def test_a_problem_of_one_machine_is_that_of_the_check(tmp_path: Path) -> None:
    file = apart(tmp_path, transport="disk")
    other_file = tmp_path / "other.toml"
    shutil.copy(file, other_file)
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        home = start(n0, file, "local", "--check", "--set", "nodes.local.gpus=2")
        other = start(n1, other_file, "n1", "--check", "--set", "nodes.local.gpus=2")
        ends(home, other, within_s=REFUSED_S, code=2)
        for process in (home, other):
            assert "node local: --set: nodes.local.gpus = 2: this machine has 0 GPUs" in process.output()


@pytest.mark.parametrize("alone", ["local", "n1"])
def test_a_node_that_does_not_come_is_named_with_what_only_it_can_answer(tmp_path: Path, alone: str) -> None:
    file = apart(tmp_path, transport="disk")
    absent = {"local": "n1", "n1": "local"}[alone]
    with machines(shared=[tmp_path]) as lan:
        waits = ["--set", "nodes.n1.wait_s=3", "--set", "nodes.local.wait_s=3"]
        process = start(lan.add("n0"), file, alone, "--check", *waits)
        assert process.wait(REFUSED_S) == 1
        output = process.output()
    assert f"node {absent} did not come within 3 s (nodes.n1.wait_s)" in output
    asked = {
        "n1": f"versions, the model, engines.policy, the common directory {tmp_path}/runs/apart",
        "local": "versions, data, the model, engines.policy",
    }
    assert f"not checked: node {absent}: {asked[absent]}\n" in output
