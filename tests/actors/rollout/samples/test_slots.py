"""Slots for samples in flight."""

from collections.abc import Sequence

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.samples.slots import GroupSlots, Slots

pytestmark = pytest.mark.anyio


async def started(group: GroupSlots, names: Sequence[str], order: list[str]) -> None:
    """Each name is noted once it has a slot, which it keeps."""

    async def run(name: str) -> None:
        if await group.take():
            order.append(name)

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(run, name)


async def test_a_slot_goes_to_the_earliest_group_that_lacks_one() -> None:
    slots, order = Slots(3), list[str]()
    first, second, third = slots.reserve(2), slots.reserve(2), slots.reserve(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(started, third, ["third"], order)  # waits first, and comes last
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(started, second, ["second 0", "second 1"], order)
        await started(first, ["first 0", "first 1"], order)
        await anyio.wait_all_tasks_blocked()
        assert (order, slots.taken) == (["first 0", "first 1", "second 0"], 3)
        first.give_back()
        await anyio.wait_all_tasks_blocked()
        assert order[3:] == ["second 1"]
        first.give_back()
    assert order[4:] == ["third"]


async def test_a_group_larger_than_all_slots_runs_in_parts() -> None:
    slots, order = Slots(2), list[str]()
    async with slots.reserve(5) as group, anyio.create_task_group() as tasks:
        tasks.start_soon(started, group, "abcde", order)
        for number in (2, 3, 4, 5):
            await anyio.wait_all_tasks_blocked()
            assert len(order) == number
            assert slots.taken == 2
            group.give_back()
    assert slots.taken == 0


async def test_a_batch_waits_for_all_its_slots_and_takes_all_there_are_if_these_are_fewer() -> None:
    slots = Slots(4)
    other, group = slots.reserve(2), slots.reserve(3)
    assert await other.take()
    with anyio.move_on_after(0.01) as scope:
        await group.take_batch(3)
    assert scope.cancelled_caught
    other.stop()
    assert await group.take_batch(3)
    assert slots.free == 0
    async with slots.reserve(8) as larger:
        other.give_back()
        for _ in range(3):
            group.give_back()
        assert await larger.take_batch(8)
        assert slots.free == 0
    assert slots.free == 4


async def test_a_group_that_is_stopped_returns_its_slots_and_wakes_those_that_wait() -> None:
    slots, order = Slots(2), list[str]()
    async with slots.reserve(4) as group:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(started, group, "abc", order)
            await anyio.wait_all_tasks_blocked()
            group.stop()
        assert (order, slots.taken) == (["a", "b"], 2)  # those that run keep theirs
        assert not await group.take()
        assert not await group.take_batch(2)
    assert slots.taken == 0


async def test_a_group_that_needs_more_slots_than_it_reserved_gets_them_before_later_groups() -> None:
    slots, order = Slots(2), list[str]()
    first, second = slots.reserve(1), slots.reserve(2)
    first.need(3)  # a task of an earlier start of the run, whose recipe had more samples
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(started, first, "abc", order)
        tasks.start_soon(started, second, "x", order)
        await anyio.wait_all_tasks_blocked()
        assert order == ["x", "a"] or order == ["a", "x"]  # the second slot had gone to the second group
        first.give_back()
        await anyio.wait_all_tasks_blocked()
        first.give_back()
    assert sorted(order) == ["a", "b", "c", "x"]


async def test_fewer_slots_are_granted_after_they_became_fewer_and_no_sample_loses_its_own() -> None:
    slots = Slots(4)
    group, later = slots.reserve(4), slots.reserve(1)
    assert all([await group.take() for _ in range(4)])
    slots.resize(2)
    for free in (0, 0):
        group.give_back()
        assert slots.free == free
    with anyio.move_on_after(0.01) as scope:
        await later.granted(1)
    assert scope.cancelled_caught
    slots.resize(3)
    await later.granted(1)
    assert slots.free == 0


async def test_a_sample_that_is_cancelled_leaves_no_slot_behind() -> None:
    slots = Slots(1)
    first, second = slots.reserve(1), slots.reserve(1)
    assert await first.take()
    async with second, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(second.take)
        await anyio.wait_all_tasks_blocked()
        first.give_back()  # granted to one and cancelled before it runs again
        tasks.cancel_scope.cancel()
    assert slots.taken == 0
    assert await slots.reserve(1).take()


steps = st.lists(
    st.tuples(st.sampled_from("reserve share take back stop need size".split()), st.integers(0, 6)), max_size=60
)


@given(steps)
async def test_no_more_slots_are_granted_than_there_are_and_all_come_back(steps: list[tuple[str, int]]) -> None:
    slots, groups, largest, partners = Slots(3), [Slots(1).reserve(1)], 3, list[GroupSlots]()
    async with anyio.create_task_group() as tasks:
        for step, number in steps:
            group = groups[number % len(groups)]
            match step:
                case "reserve":
                    groups.append(slots.reserve(number))
                case "share":
                    groups.append(slots.reserve(number))
                    groups[-1].share(partners)
                case "take":
                    tasks.start_soon(group.take)
                    await checkpoint()
                case "back":
                    group.give_back()
                case "stop":
                    group.stop()
                case "need":
                    group.need(number)
                case _:
                    slots.resize(number)
                    largest = max(largest, number)
            assert 0 <= slots.taken <= largest
            assert all(each.num_wanted >= 0 for each in groups)
        await checkpoint()
        for group in groups:
            async with group:
                pass
    assert slots.taken == 0
    slots.resize(3)
    async with slots.reserve(2) as group:
        await group.granted(2)


async def test_groups_that_share_lend_idle_slots_when_engines_took_some_away() -> None:
    """Without that the second sample of b would wait for a slot that a holds for a sample which comes after it."""
    slots, order, partners = Slots(3), list[str](), list[GroupSlots]()
    async with slots.reserve(2) as a, slots.reserve(2) as b:
        a.share(partners)
        b.share(partners)
        slots.resize(1)
        with anyio.fail_after(200):
            await started(b, ["b0", "b1"], order)
            assert (order, slots.taken) == (["b0", "b1"], 3)
            b.give_back()
            b.give_back()
            await started(a, ["a0"], order)
            a.give_back()
            await started(a, ["a1"], order)
            assert slots.taken == 1
    assert (order, slots.taken, partners) == (["b0", "b1", "a0", "a1"], 0, [])


async def test_slots_that_come_back_together_are_lent_once_and_no_group_is_forgotten() -> None:
    """Of a and b, which share, b waits. Before, a lent b the slots that b was granted too, and c waited for them."""
    for num_slots in range(1, 7):
        slots, partners = Slots(num_slots), list[GroupSlots]()
        async with anyio.create_task_group() as tasks:
            async with slots.reserve(num_slots):
                a, b, c = slots.reserve(2), slots.reserve(2), slots.reserve(2)
                a.share(partners)
                b.share(partners)
                for _ in range(2):
                    tasks.start_soon(b.take)
                await anyio.wait_all_tasks_blocked()
            assert (slots.taken, b.num_wanted) == (num_slots, max(0, 2 - num_slots))
            async with a, b:
                pass
            with anyio.fail_after(200):
                await c.granted(2)
            tasks.cancel_scope.cancel()


async def test_the_slot_of_a_resting_sample_stays_in_its_call() -> None:
    """Two groups of a call share one slot in turn. A later group, which may wait for the call, gets it at its end."""
    slots = Slots(1)
    first, second, later = slots.reserve(1), slots.reserve(1), slots.reserve(1)
    call = list[GroupSlots]()
    first.share(call)
    second.share(call)
    assert await first.take()
    first.rest()
    with anyio.fail_after(2):
        assert await second.take()
        second.rest()
        assert await first.take()
    first.rest()
    assert slots.taken == 1
    for group in (first, second):
        group.regain()
        group.give_back()
    with anyio.fail_after(2):
        assert await later.take()
    assert slots.taken == 1
