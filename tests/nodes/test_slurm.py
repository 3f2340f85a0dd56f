"""topologies/cluster/slurm.sh on two machines with Debian's Slurm: it trains, scancel ends it, sbatch resumes it."""

import json
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.machines import REQUIRED
from tests.support.machines.lan import ROOT, Lan, machines
from tests.support.machines.machine import polled
from tests.support.machines.slurm import KILL_WAIT_S, Slurm, why_no_slurm

pytestmark = [pytest.mark.nodes, pytest.mark.nightly, pytest.mark.timeout(600)]

SCRIPT = ROOT / "topologies" / "cluster" / "slurm.sh"
TOPOLOGY = ROOT / "topologies" / "laptop-two-nodes.toml"
RUN = "laptop-two-nodes"
STEPS = 30
START_S = 120.0
RUN_S = 240.0
COMMAND = f"""#!/bin/sh
exec {sys.executable} -P {ROOT / "bin" / "physarum.py"} start-topology "$@"
"""


@contextmanager
def cluster(directory: Path) -> Generator[tuple[Lan, Slurm]]:
    """Two machines with Slurm. The directory is what a checkout is to the nodes: it has bin/start-topology."""
    if (reason := why_no_slurm()) is not None:
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    command = directory / "bin" / "start-topology"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    with machines("n0", "n1", shared=directory) as lan:
        yield lan, Slurm(lan, ("n0", "n1"), directory)


def submit(slurm: Slurm, *options: str) -> str:
    return slurm.sbatch("--nodes=2", *options, SCRIPT, TOPOLOGY, "--set", f"train.num_steps={STEPS}")


def log(directory: Path, job: str) -> str:
    file = directory / f"physarum-{job}.log"
    return file.read_text() if file.exists() else ""


def wait_for(text: str, directory: Path, job: str, timeout_s: float) -> None:
    for _ in polled(timeout_s, lambda: f"no {text!r} within {timeout_s:g} s in:\n{log(directory, job)}"):
        if text in (shown := log(directory, job)):
            return
        assert "srun: error" not in shown, shown


def listening(lan: Lan) -> list[str]:
    """Servers of the run: all but those of Slurm."""
    found = [place.process for name in ("n0", "n1") for place in lan[name].listening()]
    return [process for process in found if "slurm" not in process and "srun" not in process]


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "runs" / RUN / "result.json").read_text())


def test_scancel_ends_the_run_on_all_nodes_and_the_same_sbatch_resumes_it(tmp_path: Path) -> None:
    with cluster(tmp_path) as (lan, slurm):
        first = submit(slurm)
        wait_for("node n1 joined", tmp_path, first, START_S)
        wait_for("step  3/", tmp_path, first, START_S)
        before = time.monotonic()
        slurm.scancel(first)
        assert slurm.wait(first, 2 * KILL_WAIT_S)[0] == "CANCELLED"
        took_s = time.monotonic() - before
        text = log(tmp_path, first)
        assert took_s < KILL_WAIT_S / 2, text  # so nothing was killed for being late
        assert f"run {RUN} stopped" in text, text
        assert listening(lan) == []
        trained = len((tmp_path / "runs" / RUN / "metrics.jsonl").read_text().splitlines())

        second = submit(slurm)
        assert slurm.wait(second, RUN_S) == ("COMPLETED", "0:0"), log(tmp_path, second)
        assert f"resuming run {RUN}" in log(tmp_path, second)
        assert listening(lan) == []
    assert result(tmp_path)["finished"]
    groups = result(tmp_path)["result"]["groups"]
    assert groups["trained"] == STEPS * 64
    assert groups["issued"] == sum(groups[name] for name in groups if name != "issued")
    rows = [json.loads(line) for line in (tmp_path / "runs" / RUN / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= trained
    assert rows[-1]["step"] == STEPS


def test_a_killed_daemon_ends_the_job_and_the_same_sbatch_resumes_it(tmp_path: Path) -> None:
    with cluster(tmp_path) as (lan, slurm):
        first = submit(slurm)
        wait_for("step  3/", tmp_path, first, START_S)
        [daemon] = [int(pid) for pid in lan["n1"].run(["pgrep", "-of", "physarum.py start-topology"]).split()]
        lan["n1"].run(["kill", f"-{int(signal.SIGKILL)}", str(daemon)])
        state, _ = slurm.wait(first, 3 * KILL_WAIT_S)
        assert state == "FAILED", log(tmp_path, first)
        assert listening(lan) == []
        second = submit(slurm)
        assert slurm.wait(second, RUN_S) == ("COMPLETED", "0:0"), log(tmp_path, second)
    assert result(tmp_path)["finished"]


def test_another_number_of_nodes_than_the_file_has_is_refused_by_names(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, slurm):
        job = submit(slurm, "--nodes=1")
        assert slurm.wait(job, START_S) == ("FAILED", "2:0"), log(tmp_path, job)
        expected = "Slurm started this on 1 nodes (SLURM_NNODES), and the topology has 2: n0, n1; submit with --nodes=2"
        assert expected in log(tmp_path, job)
