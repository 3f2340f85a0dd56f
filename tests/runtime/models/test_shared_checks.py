"""Looks at files that are shared: one that is under way began too early for who asks now."""

import threading

import anyio
import pytest

from runtime.models.shared_checks import SharedLooks
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio


class Reads:
    """Counts reads, and holds them."""

    def __init__(self) -> None:
        self.begun = 0
        self.open = threading.Event()

    def read(self) -> str:
        self.begun += 1
        number = self.begun
        assert self.open.wait(10)
        return str(number)


async def test_who_asks_while_a_look_is_under_way_shares_the_next_one() -> None:
    looks, reads, found = SharedLooks(), Reads(), list[str]()

    async def ask() -> None:
        found.append(await looks.look("v1", reads.read))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await eventually(lambda: reads.begun == 1)
        for _ in range(3):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        reads.open.set()
    assert sorted(found) == ["1", "2", "2", "2"]


async def test_a_look_that_is_cut_off_is_led_by_another_one() -> None:
    looks, reads = SharedLooks(), Reads()
    async with anyio.create_task_group() as group:
        cut_off = anyio.CancelScope()

        async def lead() -> None:
            with cut_off:
                await looks.look("v1", reads.read)

        group.start_soon(lead)
        await eventually(lambda: reads.begun == 1)
        found: list[str] = []

        async def follow() -> None:
            found.append(await looks.look("v1", reads.read))

        async def follow_on() -> None:
            found.append(await looks.look("v1", reads.read))

        group.start_soon(follow)
        group.start_soon(follow_on)
        await anyio.wait_all_tasks_blocked()
        cut_off.cancel()
        await eventually(lambda: reads.begun == 2)
        reads.open.set()
    assert found == ["2", "2"]
