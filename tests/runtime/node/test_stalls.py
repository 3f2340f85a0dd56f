"""A stall is noticed once, and everybody is asked what they wait for."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from messages import RunStalled, StatsGiven, StatsRequested
from runtime.bus.bus import Bus
from runtime.bus.roster import Member, Roster
from runtime.node.stalls import StallWatch
from tests.fixtures.nats import group_failed
from tests.runtime.node.test_daemon import Running, plan, player
from tests.support.rollout import next_event

pytestmark = pytest.mark.anyio

AFTER_S = 0.2


@asynccontextmanager
async def watching(bus: Bus, *expected: str, answer_timeout_s: float = 5.0) -> AsyncGenerator[StallWatch]:
    watch = StallWatch(bus, AFTER_S, expected, answer_timeout_s=answer_timeout_s)
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        yield watch
        group.cancel_scope.cancel()


async def stall(bus: Bus, from_seq: int = 1) -> tuple[RunStalled, int]:
    event, seq = await next_event(bus, RunStalled, from_seq=from_seq)
    assert isinstance(event, RunStalled)
    return event, seq


@asynccontextmanager
async def answering(bus: Bus, instance: str, waits_for: str) -> AsyncGenerator[None]:
    async def stats(_request: StatsRequested) -> StatsGiven:
        return StatsGiven(instance=instance, uptime_s=1, stats={}, waits_for=waits_for)

    await Roster(bus).join("reward", Member(instance=instance, incarnation=1, node="local"))
    async with bus.serve({StatsRequested: stats}, instance=instance):
        yield


async def test_everybody_on_the_roster_is_asked_and_the_silent_are_named(bus: Bus) -> None:
    asked = anyio.Event()

    async def hang(_request: StatsRequested) -> StatsGiven:
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    began = anyio.current_time()
    async with (
        answering(bus, "reward.0", "graders: 3 samples"),
        answering(bus, "reward.1", ""),
        bus.serve({StatsRequested: hang}, instance="rollout"),
        watching(bus, "rollout", "trainer", answer_timeout_s=0.3),
    ):
        told, _ = await stall(bus)
    assert asked.is_set()
    assert told.waiting == {
        "reward.0": "graders: 3 samples",
        "reward.1": "at work",
        "rollout": "no answer in 0.3 s",
        "trainer": "not there",
    }
    assert AFTER_S <= told.idle_s <= anyio.current_time() - began + 0.05  # it is rounded to tenths of a second


async def test_a_stall_is_told_again_when_it_has_lasted_twice_as_long(bus: Bus) -> None:
    async with watching(bus):
        first, seq = await stall(bus)
        second, seq = await stall(bus, seq + 1)
        third, _ = await stall(bus, seq + 1)
    assert first.idle_s >= AFTER_S
    assert second.idle_s >= 2 * AFTER_S
    assert third.idle_s >= 4 * AFTER_S


async def test_whatever_is_logged_ends_a_stall_but_its_own_telling_does_not(bus: Bus) -> None:
    async with watching(bus) as watch:
        told, seq = await stall(bus)
        watch.happened(told)
        second, seq = await stall(bus, seq + 1)
        assert second.idle_s >= 2 * AFTER_S
        happened = anyio.current_time()
        watch.happened(group_failed(1))
        third, _ = await stall(bus, seq + 1)
        assert AFTER_S <= third.idle_s <= anyio.current_time() - happened


async def test_the_agent_shows_a_stall_in_a_line(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    stalling = msgspec.structs.replace(plan(tmp_path / "r", player("1", "--wait", str(go_on))), stall_after_s=0.3)
    running = Running(stalling)
    async with anyio.create_task_group() as group:
        group.start_soon(running.run)
        await running.shown("step 1/3")
        line = await running.shown("nothing happened for")
        go_on.touch()
    assert line.endswith("s: player: not there")  # it plays no actor's part
    assert running.outcome is not None
    assert running.outcome.finished
