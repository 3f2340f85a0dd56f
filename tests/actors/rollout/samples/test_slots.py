"""Room for samples in flight."""

import anyio
import pytest

from actors.rollout.samples.slots import Slots
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio


async def test_slots_bound_samples_and_the_first_to_ask_is_the_first_to_get() -> None:
    slots = Slots(4)
    assert await slots.take(3) == 3
    order: list[str] = []

    async def take(name: str, wanted: int) -> None:
        await slots.take(wanted)
        order.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(take, "two", 2)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(take, "one", 1)  # there would be room, but another waits before it
        await anyio.wait_all_tasks_blocked()
        assert (order, slots.taken) == ([], 3)
        slots.give_back(3)
        await eventually(lambda: order == ["two", "one"])
    assert slots.taken == 3


async def test_a_group_larger_than_all_slots_takes_them_all() -> None:
    slots = Slots(2)
    assert await slots.take(8) == 2
    assert slots.taken == 2
