"""The host: declared surface, calls, roster, ends and exit codes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from actors.rollout.engines.fleet import WeightsNotTaken
from messages import (
    ActorDescribed,
    DescribeRequested,
    GroupFailed,
    RoundHalted,
    ScoreRequested,
    StatsGiven,
    StatsRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable, Fenced
from runtime.bus.limits import BusLimits
from runtime.bus.roster import Roster
from runtime.process.actor import Actor, InputError
from runtime.process.hosting import Hosted, host
from runtime.process.main import _text_of, exit_code_of, run_process
from runtime.settings.reading.config import TopologyError
from runtime.util.disk import NoSpace
from runtime.util.errors import flatten
from runtime.util.exit_codes import EXIT_FAILED, EXIT_FENCED, EXIT_INPUT_ERROR, EXIT_OK
from tests.fixtures.nats import NatsServer, eventually, group_failed, score_request

pytestmark = pytest.mark.anyio
NO_SERVER = "nats://127.0.0.1:9"  # the discard port
ROOT = Path(__file__).parents[3]


class Echo(Actor):
    """Repeats every piece of work as an event. A crash costs a redelivery."""

    reads = (ScoreRequested,)
    writes = (GroupFailed,)

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._count = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with self._bus.consume(ScoreRequested, durable="echo") as deliveries:
            task_status.started()
            async for delivery in deliveries:
                self._count += 1
                await self._bus.publish(group_failed(self._count, reason=delivery.message.request_id))
                await delivery.ack()

    def stats(self) -> dict[str, float]:
        return {"count": float(self._count)}


class Scripted(Actor):
    """Does what it is told, before and after it has started."""

    def __init__(self, bus: Bus, before: Callable[[Bus], None] | None, after: Callable[[Bus], None] | None) -> None:
        self._bus, self._before, self._after = bus, before, after

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        if self._before is not None:
            self._before(self._bus)
        task_status.started()
        if self._after is None:
            await anyio.sleep_forever()
        else:
            self._after(self._bus)


class Hanging(Actor):
    """Does not let itself be cancelled."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await anyio.to_thread.run_sync(time.sleep, 60)


def echo(number: int = 0) -> Hosted:
    return Hosted(name=f"echo.{number}", role="echo", actor_type=Echo, build=Echo)


def scripted(
    before: Callable[[Bus], None] | None = None, after: Callable[[Bus], None] | None = None, name: str = "scripted.0"
) -> Hosted:
    return Hosted(name=name, role="scripted", actor_type=Scripted, build=lambda bus: Scripted(bus, before, after))


def raising(error: Exception) -> Callable[[Bus], None]:
    def act(_bus: Bus) -> None:
        raise error

    return act


def nothing(_bus: Bus) -> None:
    return


async def is_member(bus: Bus, instance: str) -> bool:
    return any(one.instance == instance for one in (await Roster(bus).members(instance.partition(".")[0])).members)


async def knows_that_it_is_a_member(bus: Bus, instance: str) -> bool:
    """Whether a member has renewed its key. One that is stopped before it knows of its key leaves it to expire."""
    entry = await bus.kv.get(f"roster.{instance.partition('.')[0]}.{instance}", dict[str, Any])
    return entry is not None and entry.value is not None and entry.value["joined"] > 0


async def test_an_actor_works_describes_itself_and_counts(bus: Bus) -> None:
    async with anyio.create_task_group() as group, bus.read(GroupFailed) as events:
        group.start_soon(host, bus, [echo()])
        await eventually(lambda: knows_that_it_is_a_member(bus, "echo.0"))
        await bus.publish(score_request("a"))
        received = await events.next(40)
        assert received is not None
        assert received.message.reason == "a"
        described = await bus.call("echo.0", DescribeRequested(), ActorDescribed, timeout_s=40)
        assert (described.role, described.reads, described.writes) == ("echo", ("score_requested",), ("group_failed",))
        given = await bus.call("echo.0", StatsRequested(), StatsGiven, timeout_s=40)
        assert given.stats["count"] == 1.0
        assert given.stats["bus/published"] >= 1.0
        assert given.uptime_s > 0
        group.cancel_scope.cancel()
    assert not await is_member(bus, "echo.0")


async def test_several_actors_share_a_process(bus: Bus) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [echo(0), echo(1)])
        for number in range(2):
            await eventually(lambda number=number: is_member(bus, f"echo.{number}"))
            described = await bus.call(f"echo.{number}", DescribeRequested(), ActorDescribed, timeout_s=40)
            assert described.instance == f"echo.{number}"
        group.cancel_scope.cancel()


async def test_an_actor_writes_and_reads_only_what_it_declares(bus: Bus) -> None:
    view = bus.for_actor("echo.0", reads=Echo.reads, writes=Echo.writes)
    assert view.name == "echo.0"
    await view.publish(group_failed(1))
    with pytest.raises(ValueError, match=r"echo\.0 does not declare that it writes ScoreRequested"):
        await view.publish(score_request("a"))
    with pytest.raises(ValueError, match="writes RoundHalted"):
        await view.append(RoundHalted(incarnation=1, round=1), expected_last=0)
    with pytest.raises(ValueError, match="does not declare that it reads GroupFailed"):
        view.read(GroupFailed)
    with pytest.raises(ValueError, match="reads"):
        view.read()
    async with bus.read(GroupFailed):  # the process's own bus is free
        pass


async def test_when_one_actor_fails_the_others_are_cancelled(bus: Bus) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await host(bus, [echo(), scripted(after=raising(RuntimeError("broken")))])
    assert [str(leaf) for leaf in flatten(failed.value)] == ["broken"]  # and the other has ended, or host would not


async def test_the_host_ends_when_all_actors_have(bus: Bus) -> None:
    await host(bus, [scripted(after=nothing), scripted(after=nothing, name="scripted.1")])


async def test_a_value_error_before_the_start_is_wrong_input_and_later_a_failure(bus: Bus) -> None:
    with pytest.raises(ExceptionGroup) as early:
        await host(bus, [scripted(before=raising(ValueError("data/train.jsonl, line 3: not JSON")))])
    assert exit_code_of(early.value) == EXIT_INPUT_ERROR
    assert "line 3" in str(flatten(early.value)[0])
    with pytest.raises(ExceptionGroup) as late:
        await host(bus, [scripted(after=raising(ValueError("a bug")))])
    assert exit_code_of(late.value) == EXIT_FAILED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Fenced("another buffer took over"), EXIT_FENCED),
        (InputError("no such file"), EXIT_INPUT_ERROR),
        (TopologyError([]), EXIT_INPUT_ERROR),
        (BusUnavailable("no server"), EXIT_FAILED),
        (ExceptionGroup("", [RuntimeError(), ExceptionGroup("", [Fenced("x")])]), EXIT_FENCED),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WeightsNotTaken("no engine takes weights v2: 'lm_head'"), "no engine takes weights v2: 'lm_head'"),
        (NoSpace("no space left for /x"), "no space left for /x"),
        (InputError(), "InputError()"),
        (KeyError("x"), "KeyError('x')"),
    ],
)
def test_an_error_that_was_written_for_people_is_logged_as_its_text(error: Exception, text: str) -> None:
    assert _text_of(error) == text


def child(what: str, url: str, run: str) -> None:
    """Runs in a process of its own."""
    match what:
        case "echo":
            hosted = echo()
        case "fenced":
            hosted = scripted(after=raising(Fenced("another one took over")))
        case "input":
            hosted = scripted(before=raising(ValueError("no such filter")))
        case "crash":
            hosted = scripted(after=raising(RuntimeError("broken")))
        case "hang":
            hosted = Hosted(name="hanging.0", role="hanging", actor_type=Hanging, build=Hanging)
        case _:
            hosted = scripted(after=nothing)
    limits = BusLimits(connect_timeout_s=5.0 if url != NO_SERVER else 0.3)
    sys.exit(run_process(url, run, [hosted], node="n0", limits=limits, stop_timeout_s=0.5 if what == "hang" else 15))


def start(what: str, url: str, run: str) -> "subprocess.Popen[str]":
    command = f"from tests.runtime.process.test_actor import child; child({what!r}, {url!r}, {run!r})"
    return subprocess.Popen([sys.executable, "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_process_says_how_it_ended(nats_server: NatsServer) -> None:
    expected = {"done": EXIT_OK, "fenced": EXIT_FENCED, "input": EXIT_INPUT_ERROR, "crash": EXIT_FAILED}
    processes = {what: start(what, nats_server.url, f"exit-{what}") for what in expected}
    outputs = {what: process.communicate(timeout=200)[0] for what, process in processes.items()}
    assert {what: process.returncode for what, process in processes.items()} == expected, outputs


def test_a_process_without_a_server_fails(run_name: str) -> None:
    process = start("echo", NO_SERVER, run_name)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == EXIT_FAILED, output
    assert "no connection to nats://127.0.0.1:9" in output


async def test_a_signal_ends_a_process_in_order(bus: Bus, nats_server: NatsServer) -> None:
    process = start("echo", nats_server.url, bus.run)
    await eventually(lambda: knows_that_it_is_a_member(bus, "echo.0"))
    process.send_signal(signal.SIGTERM)
    output, _ = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=200))
    assert process.returncode == EXIT_OK, output
    assert "stopping" in output
    assert not await is_member(bus, "echo.0")  # it has left the roster


async def test_an_actor_that_hangs_does_not_keep_its_process(bus: Bus, nats_server: NatsServer) -> None:
    process = start("hang", nats_server.url, bus.run)
    await eventually(lambda: is_member(bus, "hanging.0"))
    process.send_signal(signal.SIGTERM)
    output, _ = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=200))
    assert process.returncode == EXIT_OK, output
    assert "stop_took_too_long" in output
