"""Actors that give no sign any more: the decision by hand-made looks, and real processes."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import anyio
import msgspec
import pytest

from runtime.node.supervisor.heartbeats import (
    Beat,
    Heartbeats,
    LoopWatch,
    ThreadTimes,
    stillness,
    thread_to_ask,
    wait_until_still,
    without_core,
)
from runtime.node.supervisor.state_changes import Blocked, Exited, Silent, Started
from runtime.process.heartbeat import ASKS, PULSE_VARIABLE
from runtime.settings.processes import ProcessSpec, SendsHeartbeats, longest_silence_s
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
    os.write(heartbeats.given, f"beat {time.monotonic():.3f} 1\nbeat".encode())
    heartbeats.forget()
    with anyio.move_on_after(1.0) as scope:
        await wait_until_still(heartbeats, 0.3, os.getpid(), lambda _: None)
    assert scope.cancelled_caught
    heartbeats.close()


async def test_a_block_is_found_though_the_heartbeats_before_it_came_before_the_watch() -> None:
    """Else a process that blocks at once is waited for as one that has not begun: half an hour."""
    heartbeats = Heartbeats()
    os.write(heartbeats.given, f"beat {time.monotonic():.3f} 1\n".encode())
    with anyio.fail_after(200):
        await wait_until_still(heartbeats, 0.3, os.getpid(), lambda _: None)
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
        (exited,) = changes.of(Exited)
        assert exited.reason.startswith("event loop was blocked for 1 s")


async def test_a_process_that_is_stopped_is_named_and_once_more_when_it_answers(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(msgspec.structs.replace(actor(limit_s=8.0), silent_after_s=1.0))
        await said(tmp_path / "logs" / "reward.jsonl", b"up")
        pid = changes.of(Started)[0].pid
        os.kill(pid, signal.SIGSTOP)
        await changes.until(lambda: len(changes.of(Silent)) == 1)
        os.kill(pid, signal.SIGCONT)
        await changes.until(lambda: len(changes.of(Silent)) == 2)
        first, second = [change for change in changes.all if isinstance(change, Silent)]
        assert (first.spec.name, first.pid, first.answers, second.answers) == ("reward", pid, False, True)
        assert second.silent_s >= first.silent_s >= 1.0
        assert not changes.of(Exited)


@pytest.mark.parametrize(
    ("limit_s", "silence_s"),
    [
        (10.0, 12.5),  # 2.5 + 5, then 2.5 + 2.5
        (15.0, 18.75),  # 3.75 + 7.5, then 3.75 + 3.75
        (20.0, 25.0),  # 5 + 10, then 5 + 5
        (60.0, 60.0),  # 5 + 30, then 5 + 20
    ],
)
def test_the_longest_silence_of_a_server_is_that_of_its_probes(limit_s: float, silence_s: float) -> None:
    """By hand: a pause between two probes, and a probe that waits for half of the limit, or for its remainder."""
    assert longest_silence_s(limit_s) == silence_s


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


# calls that block an event loop


class Looks:
    """Looks at a process, once a second; its heartbeats come at the begin of a second."""

    def __init__(self) -> None:
        self.watch, self.now, self.cpu_s, self.queued_s = LoopWatch(), 100.0, 1.0, 0.0

    def look(
        self, *, beat: bool = False, state: str = "S", cpu_s: float = 0.0, queued_s: float = 0.0, took_s: float = 1.0
    ) -> list[tuple[float, bool]]:
        """Look once; return the seconds of each block, and whether it ended. The stacks come at once."""
        beats = [Beat(self.now, 1)] if beat else []
        self.now += took_s
        self.cpu_s, self.queued_s = self.cpu_s + cpu_s, self.queued_s + queued_s
        times = ThreadTimes(state, self.cpu_s, self.queued_s)
        found = self.watch.look(
            self.now, waited_s=took_s, planned_s=1.0, beats=beats, stacks="Timeout (5)!\n", times=times
        )
        return [(round(block.blocked_s, 1), block.ended) for block in found]


def test_a_call_that_sleeps_or_computes_is_reported_after_five_seconds_and_at_its_end() -> None:
    for state, cpu_s in (("S", 0.0), ("D", 0.0), ("R", 1.0)):
        looks = Looks()
        assert looks.look() == looks.look(beat=True) == []
        silent = [looks.look(state=state, cpu_s=cpu_s) for _ in range(8)]
        # the newest heartbeat was at second 101, and the next was due half a second later
        assert silent == [[], [], [], [], [(5.5, False)], [], [], []]
        assert looks.look(beat=True) == [(8.5, True)]
        assert looks.look(beat=True) == []


def test_a_block_of_a_second_is_reported_at_its_end_and_a_shorter_one_is_not() -> None:
    looks = Looks()
    assert [looks.look(), looks.look(beat=True), looks.look()] == [[], [], []]
    assert looks.look(beat=True) == [(1.5, True)]
    assert looks.look(beat=True) == []  # half a second late


def test_a_process_that_was_stopped_or_got_no_core_blocked_nothing() -> None:
    stopped = Looks()
    assert [stopped.look(), stopped.look(beat=True)] == [[], []]
    assert [stopped.look(state="T") for _ in range(20)] == [[]] * 20
    assert stopped.look(beat=True) == []
    starved = Looks()
    assert [starved.look(), starved.look(beat=True)] == [[], []]
    assert [starved.look(state="R", cpu_s=0.01) for _ in range(20)] == [[]] * 20  # it waits for a core all the time
    assert starved.look(beat=True, queued_s=20.0) == []
    queued = Looks()
    assert [queued.look(), queued.look(beat=True)] == [[], []]
    assert [queued.look(state="S", cpu_s=0.05, queued_s=0.95) for _ in range(20)] == [[]] * 20
    asleep = Looks()  # the whole machine slept
    assert [asleep.look(), asleep.look(beat=True), asleep.look(took_s=3600.0), asleep.look(beat=True)] == [[]] * 4


def test_a_block_without_stacks_is_reported_some_seconds_later() -> None:
    watch, times = LoopWatch(), ThreadTimes("S", 1.0, 0.0)
    found: list[float] = []
    for second in range(12):
        beats = [Beat(0.0, 1)] if second == 1 else []
        looked = watch.look(float(second), waited_s=1.0, planned_s=1.0, beats=beats, stacks="", times=times)
        found += [second for _ in looked]
    assert found == [9]  # the next heartbeat was due after half a second


def test_a_call_that_blocks_after_a_stop_is_counted_from_its_end() -> None:
    looks = Looks()
    assert [looks.look(), looks.look(beat=True), looks.look(state="T"), looks.look(state="T")] == [[]] * 4
    assert [looks.look() for _ in range(5)] == [[], [], [], [], [(5.0, False)]]


def test_a_call_that_shares_a_core_is_counted_by_the_time_that_it_ran() -> None:
    looks = Looks()
    assert [looks.look(), looks.look(beat=True)] == [[], []]
    found = [looks.look(state="R", cpu_s=0.5) for _ in range(12)]
    assert [number for number, each in enumerate(found) if each] == [8]  # 5 s of 10


def test_the_last_heartbeat_of_an_event_loop_ends_the_watch() -> None:
    watch, times = LoopWatch(), ThreadTimes("S", 1.0, 0.0)
    for second in range(30):
        beats = [Beat(float(second), 1)] if second < 3 else [Beat(math.inf, 1)] if second == 3 else []
        found = watch.look(second + 0.5, waited_s=1.0, planned_s=1.0, beats=beats, stacks="", times=times)
        assert found == []
    assert watch.end(40.0) == []


def test_a_kernel_without_counters_of_the_scheduler_excuses_nothing() -> None:
    none = ThreadTimes("R", 0.0, 0.0)
    assert without_core(none, none, 1.0) == 0.0


def test_a_thread_that_waits_for_the_interpreters_lock_on_a_busy_machine_lacks_no_core() -> None:
    before = ThreadTimes("S", 1.0, 5.0, num_waits=100)
    assert without_core(before, ThreadTimes("R", 1.01, 5.9, num_waits=130), 1.0) == 0.0
    assert without_core(before, ThreadTimes("R", 1.01, 5.9, num_waits=102), 1.0) == pytest.approx(0.99)


def test_of_the_threads_that_computed_the_busiest_is_asked_first() -> None:
    before, after = {10: 100.0, 11: 1.0, 12: 0.0, 13: 5.0}, {10: 100.004, 11: 1.3, 12: 0.7, 13: 5.0, 14: 9.0}
    assert [thread_to_ask(10, before, after, turn) for turn in range(3)] == [12, 11, 12]
    assert thread_to_ask(10, before, {10: 100.004, 11: 1.002}, 1) == 10  # the first thread, where all wait
    assert thread_to_ask(10, before, {}, 0) == 10


BLOCKING = ACTOR.replace("await anyio.sleep(0.2)", "import ctypes, re, threading, time; await anyio.sleep(0.5)")
CALLS = {
    "time.sleep(600)": "time.sleep",
    're.match("(a+)+$", 100 * "a" + "b")': "a regular expression holds the interpreter's lock",
    "ctypes.PyDLL(None).read(os.pipe()[0], bytes(1), 1)": "and so does a library that waits",
    'threading.Thread(target=lambda: re.match("(a+)+$", 100 * "a" + "b")).start()': "another thread holds it",
}


def long(changes: Changes) -> list[Blocked]:
    """The blocks that lasted some seconds. A busy machine may add shorter ones."""
    return [change for change in changes.of(Blocked) if isinstance(change, Blocked) and not change.ended]


@pytest.mark.slow
async def test_a_blocking_call_is_named_though_it_holds_the_interpreters_lock(tmp_path: Path) -> None:
    """And nothing is said of a process that was stopped for as long."""
    async with supervising(tmp_path) as (supervision, changes):
        for number, call in enumerate(CALLS):
            file = tmp_path / f"tool_{number}.py"
            file.write_text(
                BLOCKING.replace(
                    "print(", f"\n        def with_tool():\n            {call}\n        with_tool(); print("
                )
            )
            command = (sys.executable, str(file))
            functions = {f"key.{number}": f"{file}:with_tool"}
            environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
            supervision.start(
                ProcessSpec(
                    name=f"a{number}", command=command, env=environment, functions=functions, probe=SendsHeartbeats()
                )
            )
        supervision.start(msgspec.structs.replace(actor(limit_s=300.0), name="stopped"))
        await said(tmp_path / "logs" / "stopped.jsonl", b"up")
        stopped = next(change for change in changes.of(Started) if change.spec.name == "stopped")
        assert isinstance(stopped, Started)
        os.kill(stopped.pid, signal.SIGSTOP)
        await changes.until(lambda: len({change.spec.name for change in long(changes)}) == len(CALLS), 200)
        os.kill(stopped.pid, signal.SIGCONT)
        await _nothing_ends(changes, 2.0)
        for change in long(changes):
            number = int(change.spec.name.removeprefix("a"))
            assert (change.culprit.function, change.culprit.is_ours) == (f"key.{number}", False)
            assert f"tool_{number}.py:" in change.culprit.place
            assert f" in {'<lambda>' if 'lambda' in list(CALLS)[number] else 'with_tool'}" in change.culprit.place
        for number in range(len(CALLS)):
            log = (tmp_path / "logs" / f"a{number}.jsonl").read_text()
            assert '"event":"event_loop_blocked"' in log
            assert f"tool_{number}.py" in log


@pytest.mark.slow
async def test_a_process_that_goes_on_after_a_stop_reads_no_frames_of_threads_that_run() -> None:
    """faulthandler's own timer did, without the interpreter's lock: the process could end by SIGSEGV."""
    written, given = os.pipe()
    environment = {**os.environ, PULSE_VARIABLE: str(given), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ACTOR]
    async with await anyio.open_process(command, env=environment, pass_fds=[given]) as process:
        os.close(given)
        assert process.stdout is not None
        await process.stdout.receive()
        os.kill(process.pid, signal.SIGSTOP)
        await anyio.sleep(5.5)  # longer than a call may hold the lock before its stack is written
        os.kill(process.pid, signal.SIGCONT)
        await anyio.sleep(1.0)
        os.kill(process.pid, ASKS)
        await anyio.sleep(0.5)
        process.kill()
    text = os.read(written, 1 << 16).decode()
    os.close(written)
    after_stop, asked, own = text.partition("Stack (most recent call first)")
    assert "Timeout (0:" not in after_stop
    assert asked
    assert "Thread" not in own
