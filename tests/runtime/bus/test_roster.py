"""Who is there, under an epoch."""

import anyio
import pytest

from messages import Message, StatsGiven, StatsRequested
from runtime.bus.bus import Bus
from runtime.bus.errors import Fenced
from runtime.bus.roster import Member, Members, Roster
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio


def member(number: int, incarnation: int = 1) -> Member:
    return Member(instance=f"rollout.{number}", incarnation=incarnation, node="n0")


async def answer(_request: StatsRequested) -> StatsGiven:
    return StatsGiven(instance="", uptime_s=0.0, stats={})


async def test_every_change_raises_the_epoch_and_nothing_else_does(bus: Bus) -> None:
    roster = Roster(bus)
    assert await roster.members("rollout") == Members()
    assert (await roster.join("rollout", member(0))).epoch == 1
    assert (await roster.join("rollout", member(0))).epoch == 1
    assert (await roster.join("rollout", member(1))).members == (member(0), member(1))
    assert await roster.leave("rollout", member(0)) == Members(epoch=3, members=(member(1),))
    assert (await roster.leave("rollout", member(0))).epoch == 3


async def test_a_later_process_takes_the_place_and_an_earlier_one_cannot_remove_it(bus: Bus) -> None:
    roster = Roster(bus)
    await roster.join("rollout", member(0, incarnation=1))
    await roster.join("rollout", member(0, incarnation=2))
    assert (await roster.leave("rollout", member(0, incarnation=1))).members == (member(0, incarnation=2),)


async def test_many_join_at_the_same_time(bus: Bus) -> None:
    roster = Roster(bus)
    async with anyio.create_task_group() as group:
        for number in range(12):
            group.start_soon(roster.join, "rollout", member(number))
    members = await roster.members("rollout")
    assert members.epoch == 12
    assert set(members.members) == {member(number) for number in range(12)}


async def test_a_call_to_all_evicts_the_silent_and_keeps_those_that_refuse(bus: Bus) -> None:
    roster = Roster(bus)

    async def hang(_request: Message) -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def refuse(_request: Message) -> Message:
        raise RuntimeError("not now")

    for number in range(4):
        await roster.join("rollout", member(number))
    async with (
        bus.serve({StatsRequested: answer}, instance="rollout.0"),
        bus.serve({StatsRequested: hang}, instance="rollout.1"),
        bus.serve({StatsRequested: refuse}, instance="rollout.2"),
    ):
        outcome = await roster.call_all("rollout", StatsRequested(), StatsGiven, timeout_s=0.3)
    assert outcome.epoch == 4
    assert list(outcome.answers) == ["rollout.0"]
    assert "not now" in outcome.refused["rollout.2"]
    assert outcome.evicted == ("rollout.1", "rollout.3")
    members = await roster.members("rollout")
    assert (members.epoch, members.members) == (5, (member(0), member(2)))


async def test_an_evicted_member_that_lives_joins_again(bus: Bus) -> None:
    roster = Roster(bus)

    async def is_there() -> bool:
        return member(0) in (await roster.members("rollout")).members

    async with anyio.create_task_group() as group:
        group.start_soon(roster.keep_joined, "rollout", member(0))
        await eventually(is_there)
        epoch = (await roster.leave("rollout", member(0))).epoch
        await eventually(is_there)
        assert (await roster.members("rollout")).epoch == epoch + 1
        group.cancel_scope.cancel()


async def test_a_member_gives_way_to_a_later_process(bus: Bus) -> None:
    roster = Roster(bus)
    failed: list[str] = []

    async def earlier() -> None:
        try:
            await roster.keep_joined("rollout", member(0, incarnation=1))
        except Fenced as error:  # so that it is not started again: the two would replace each other for ever
            failed.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(earlier)
        await eventually(lambda: _has(roster, member(0, incarnation=1)))
        await roster.join("rollout", member(0, incarnation=2))
    assert "a newer process runs " in failed[0]


async def _has(roster: Roster, wanted: Member) -> bool:
    return wanted in (await roster.members("rollout")).members
