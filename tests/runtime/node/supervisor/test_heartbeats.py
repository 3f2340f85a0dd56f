"""Actors that give no sign any more: the decision by hand-made looks, and real processes."""

import os
import signal
import sys
import time
from pathlib import Path

import anyio
import pytest

from runtime.node.supervisor.readiness import Heartbeats, stillness, wait_until_still
from runtime.node.supervisor.state_changes import Exited, Started
from runtime.settings.processes import ProcessSpec, SendsHeartbeats
from tests.runtime.node.supervisor.test_supervisor import Changes, said, supervising

pytestmark = pytest.mark.anyio

LIMIT_S = 1.0
ACTOR = """
import anyio, os
from runtime.process.heartbeat import PULSE_VARIABLE, give_pulse

async def main():
    async with anyio.create_task_group() as group:
        group.start_soon(give_pulse, 0.05)
        await anyio.sleep(0.2)
        print("up", PULSE_VARIABLE in os.environ, flush=True)

anyio.run(main)
"""


def actor(code: str = ACTOR, limit_s: float = LIMIT_S) -> ProcessSpec:
    return ProcessSpec(
        name="reward", command=(sys.executable, "-c", code), probe=SendsHeartbeats(), unresponsive_after_s=limit_s
    )


def test_only_looks_that_came_in_time_and_saw_nothing_add_up() -> None:
    looks = [  # seconds waited of 5 that were planned, whether there was a sign, seconds of silence after it
        (5.0, False, 5.0),
        (6.0, False, 11.0),
        (5.0, True, 0.0),
        (10.0, False, 10.0),  # twice as long as planned is still in time
        (10.1, False, 0.0),  # the daemon stood still: the process may have had no time either
        (5.0, False, 5.0),
        (3600.0, False, 0.0),  # the whole machine slept
        (5.0, False, 5.0),
    ]
    still_s = 0.0
    for waited_s, sign, expected in looks:
        still_s = stillness(still_s, waited_s=waited_s, planned_s=5.0, sign=sign)
        assert still_s == expected


async def test_before_its_first_sign_a_process_has_more_time() -> None:
    """And what its former life has left in the pipe is no sign of this one."""
    heartbeats = Heartbeats()
    os.write(heartbeats.given, b".")
    with anyio.move_on_after(1.0) as scope:
        await wait_until_still(heartbeats, 0.3)
    assert scope.cancelled_caught
    heartbeats.close()


async def test_an_actor_that_is_stopped_is_killed_and_started_again(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(actor())
        await said(tmp_path / "logs" / "reward.jsonl", b"up False")  # not handed on to what it starts
        os.kill(changes.of(Started)[0].pid, signal.SIGSTOP)
        await changes.until(lambda: len(changes.of(Started)) == 2)
        (exited,) = changes.of(Exited)
        assert isinstance(exited, Exited)
        assert (exited.exit_code, exited.reason) == (-signal.SIGKILL, "event loop was blocked for 1 s")
        assert exited.restart_in_s is not None


async def test_an_actor_whose_event_loop_is_blocked_is_killed(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(actor(ACTOR.replace("print(", "import time; time.sleep(60); print(")))
        await changes.until(lambda: bool(changes.of(Exited)))
        assert [exited.reason for exited in changes.of(Exited)] == ["event loop was blocked for 1 s"]


@pytest.mark.slow
async def test_nobody_is_judged_after_the_agent_itself_stood_still(tmp_path: Path) -> None:
    limit_s = 3.0  # longer than a busy machine keeps the actor from its sign
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(actor(limit_s=limit_s))
        await said(tmp_path / "logs" / "reward.jsonl", b"up")
        pid = changes.of(Started)[0].pid
        await _nothing_ends(changes, limit_s / 3)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5 * limit_s)  # noqa: ASYNC251 - this loop is the daemon's
        await _nothing_ends(changes, limit_s / 3)
        os.kill(pid, signal.SIGCONT)
        await _nothing_ends(changes, 1.2 * limit_s)


async def _nothing_ends(changes: Changes, seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await changes.until(lambda: bool(changes.of(Exited)))
    assert not changes.of(Exited)
