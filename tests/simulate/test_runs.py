"""Simulated runs: those of CI by the commit's hash, equal seeds, and an audit that finds what is planted."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from messages import GroupsIssued, Plane
from messages.subjects import stream_of
from tests.simulate.audit import audit
from tests.simulate.world import RUN, Broken, Recipe, World

ROOT = Path(__file__).parents[2]
CPU_S = 8  # of the runs of CI
NIGHTLY = 2000


def simulate(*words: str) -> dict[str, Any]:
    """Play runs in a process of their own, and return what it printed at the end."""
    command = [sys.executable, "-m", "tests.simulate", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def first_seed() -> int:
    """A seed that follows from the commit: a run that breaks breaks again."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    return int(done.stdout[:8] or "0", 16)


@pytest.mark.slow
def test_runs_with_faults_end_and_their_books_close() -> None:
    assert simulate("--first", str(first_seed()), "--seeds", "1000", "--cpu-s", str(CPU_S))["runs"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_runs_with_faults_end_and_their_books_close() -> None:
    assert simulate("--first", str(first_seed()), "--seeds", str(NIGHTLY))["runs"] == NIGHTLY


@pytest.mark.slow
def test_equal_seeds_give_equal_logs() -> None:
    words = ("--first", "13", "--seeds", "1")
    assert simulate(*words)["digest"] == simulate(*words)["digest"]


def lose_an_issue(world: World) -> None:
    lost = next(seq for seq, event in world.log() if isinstance(event, GroupsIssued))
    name = stream_of(RUN, Plane.EVENT)
    world.server.history = [each for each in world.server.history if (each[0], each[1].seq) != (name, lost)]


def train_other_groups(world: World) -> None:
    key, line = max(world.disk.checkpoints.items())
    (step, groups), *rest = line
    world.disk.checkpoints[key] = ((step, tuple(group + 1 for group in groups)), *rest)


def lose_payloads(world: World) -> None:
    world.server.streams[stream_of(RUN, Plane.DATA)].purge()


def leave_a_task(world: World) -> None:
    work = stream_of(RUN, Plane.WORK)
    _, message = next(each for each in world.server.history if each[0] == work and ".rollout." in each[1].subject)
    world.server.streams[work].messages[message.seq] = message


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, lose_an_issue, train_other_groups, lose_payloads, leave_a_task])
def test_the_audit_finds_what_is_planted(fault: Callable[[World], None] | None) -> None:
    world = World(1, faults=[], recipe=Recipe(num_steps=3, save_interval=1)).play()
    if fault is None:
        audit(world)
        return
    fault(world)
    with pytest.raises(Broken):
        audit(world)
