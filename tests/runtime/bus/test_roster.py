"""Who is there, under an epoch."""

from typing import Any

import anyio
import pytest

from messages import Message, StatsGiven, StatsRequested
from messages.subjects import bucket_of
from runtime.bus.bus import Bus
from runtime.bus.errors import Fenced
from runtime.bus.nats.streams import state_of
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
    await roster.join("rollout", member(0))
    first = await roster.members("rollout")
    await roster.join("rollout", member(0))
    assert await roster.members("rollout") == first
    await roster.join("rollout", member(1))
    second = await roster.members("rollout")
    assert second.epoch > first.epoch
    assert second.members == (member(0), member(1))
    await roster.leave("rollout", member(0))
    third = await roster.members("rollout")
    assert third.epoch > second.epoch
    assert third.members == (member(1),)
    await roster.leave("rollout", member(0))
    assert await roster.members("rollout") == third


async def test_a_later_process_takes_the_place_and_an_earlier_one_cannot_remove_it(bus: Bus) -> None:
    roster = Roster(bus)
    await roster.join("rollout", member(0, incarnation=1))
    await roster.join("rollout", member(0, incarnation=2))
    await roster.leave("rollout", member(0, incarnation=1))
    assert (await roster.members("rollout")).members == (member(0, incarnation=2),)
    with pytest.raises(Fenced, match="a newer process runs "):
        await roster.join("rollout", member(0, incarnation=1))


async def test_many_join_at_the_same_time(bus: Bus) -> None:
    roster = Roster(bus)
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            for number in range(256):
                group.start_soon(roster.join, "rollout", member(number))
    members = await roster.members("rollout")
    assert set(members.members) == {member(number) for number in range(256)}


async def test_a_call_to_all_evicts_the_silent_and_keeps_those_that_refuse(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster, call = Roster(bus), bus.call

    async def call_with_time(instance: str, *request: Any, timeout_s: float) -> Any:
        return await call(instance, *request, timeout_s=0.5 if instance == "rollout.1" else timeout_s)

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
        monkeypatch.setattr(bus, "call", call_with_time)  # of the others, none may be late
        outcome = await roster.call_all("rollout", StatsRequested(), StatsGiven, timeout_s=30)
    before = outcome.epoch
    assert list(outcome.answers) == ["rollout.0"]
    assert "not now" in outcome.refused["rollout.2"]
    assert outcome.evicted == ("rollout.1", "rollout.3")
    members = await roster.members("rollout")
    assert members.epoch > before
    assert members.members == (member(0), member(2))


async def test_an_evicted_member_that_lives_joins_again(bus: Bus) -> None:
    roster = Roster(bus)

    async def is_there() -> bool:
        return member(0) in (await roster.members("rollout")).members

    async with anyio.create_task_group() as group:
        group.start_soon(roster.keep_joined, "rollout", member(0))
        await eventually(is_there)
        await roster.leave("rollout", member(0))
        epoch = (await roster.members("rollout")).epoch
        await eventually(is_there)
        assert (await roster.members("rollout")).epoch > epoch
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


async def test_a_process_that_starts_later_has_a_higher_incarnation_on_any_node(bus: Bus) -> None:
    """A node that was replaced by one whose clock is behind could not join: the clock was the incarnation."""
    roster = Roster(bus)
    first = await roster.enter("rollout", "rollout.0", "n0")
    second = await roster.enter("rollout", "rollout.0", "n1")
    assert second.incarnation > first.incarnation
    with pytest.raises(Fenced, match="a newer process runs "):
        await roster.keep_joined("rollout", first)
    await roster.join("rollout", second)
    assert (await roster.members("rollout")).members == (second,)


async def test_renewals_raise_no_epoch_and_keep_the_order(bus: Bus) -> None:
    roster = Roster(bus, renew_every_s=0.05)
    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(roster.keep_joined, "rollout", member(number))
            await eventually(lambda: _has(roster, member(number)))  # noqa: B023 - awaited at once
        before = await roster.members("rollout")
        written = await _written(bus)
        await eventually(lambda: _written_since(bus, written + 9))
        assert await roster.members("rollout") == before
        group.cancel_scope.cancel()


async def test_a_member_that_does_not_renew_expires_and_raises_the_epoch(bus: Bus) -> None:
    roster = Roster(bus)
    gone = await roster.enter("rollout", "rollout.0", "n0")
    before = await roster.members("rollout")
    await Roster(bus, lifetime_s=1).join("rollout", gone)

    async def has_left() -> bool:
        return not (await roster.members("rollout")).members

    await eventually(has_left)
    assert (await roster.members("rollout")).epoch > before.epoch
    await roster.join("rollout", gone)  # it was away for longer than that
    assert (await roster.members("rollout")).members == (gone,)


async def test_one_key_is_read_for_any_number_of_members(bus: Bus) -> None:
    """More than the server answers at once."""
    roster = Roster(bus)
    async with anyio.create_task_group() as group:
        for number in range(1100):
            group.start_soon(roster.enter, "rollout", f"rollout.{number}", "n0")
    assert len((await roster.members("rollout")).members) == 1100


async def _written(bus: Bus) -> int:
    return (await state_of(bus._connection, f"KV_{bucket_of(bus.run)}")).last_seq


async def _written_since(bus: Bus, seq: int) -> bool:
    return await _written(bus) >= seq


async def _has(roster: Roster, wanted: Member) -> bool:
    return wanted in (await roster.members("rollout")).members
