"""Processes that are parts of one whole start, and start again, together."""

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from runtime.node.supervisor.state_changes import Exited, Started
from runtime.settings.processes import ProcessSpec, RestartGroupSpec
from tests.fixtures.nats import eventually
from tests.runtime.node.supervisor.test_supervisor import SLEEPER, said, supervising

pytestmark = pytest.mark.anyio

MEETS = "import sys; print('meets at', sys.argv[1], flush=True); " + SLEEPER


def part(name: str, number: int = 2, **settings: object) -> ProcessSpec:
    command = (sys.executable, "-c", MEETS, "{peers}")
    return ProcessSpec(name=name, command=command, restart_group=RestartGroupSpec("engine", number), **settings)  # type: ignore[arg-type]


def meetings(run_dir: Path, name: str) -> list[str]:
    """Where a process was to meet the others, in each of its starts."""
    lines = (run_dir / "logs" / f"{name}.jsonl").read_text().splitlines()
    return [line.partition("meets at ")[2].partition('"')[0] for line in lines if "meets at" in line]


async def test_none_starts_before_all_are_there_and_all_know_where_they_meet(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(part("first"))
        await anyio.wait_all_tasks_blocked()
        assert not changes.of(Started)
        supervision.start(part("second"))
        for name in ("first", "second"):
            await said(tmp_path / "logs" / f"{name}.jsonl", b"up")
    (first,), (second,) = meetings(tmp_path, "first"), meetings(tmp_path, "second")
    assert first == second
    assert int(first.removeprefix("127.0.0.1:")) > 0


@pytest.mark.parametrize("killed", [0, 1])
async def test_when_one_dies_all_are_started_again_once_all_have_ended(tmp_path: Path, killed: int) -> None:
    names = ["first", "second"]
    async with supervising(tmp_path) as (supervision, changes):
        for name in names:
            supervision.start(part(name))
        for name in names:
            await said(tmp_path / "logs" / f"{name}.jsonl", b"up")
        pids = {change.spec.name: change.pid for change in changes.of(Started) if isinstance(change, Started)}
        os.kill(pids[names[killed]], signal.SIGKILL)
        await changes.until(lambda: len(changes.of(Started)) == 4)
        ends = [change for change in changes.of(Exited) if isinstance(change, Exited)]
        assert {end.spec.name: end.reason for end in ends} == {
            names[killed]: "killed by SIGKILL",
            names[1 - killed]: f"{names[killed]}, another process of restart group engine, had ended",
        }
        order = [type(change) for change in changes.all if isinstance(change, Started | Exited)]
        assert order == [Started, Started, Exited, Exited, Started, Started]
        for name in names:
            await eventually(lambda name=name: len(meetings(tmp_path, name)) == 2)
    assert meetings(tmp_path, "first") == meetings(tmp_path, "second")


async def test_one_that_waits_for_the_others_can_be_stopped(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(part("first"))
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(200):
            await supervision.stop()
        assert not changes.all
