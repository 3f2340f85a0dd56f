"""The part of the event stream that is kept costs an ordinary event nothing but a look at a number."""

import anyio
import pytest

from messages import Plane, PromptsLoaded
from messages.subjects import stream_of
from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.limits import BusLimits
from runtime.bus.nats import room as module
from runtime.bus.nats.connection import open_connection
from runtime.bus.nats.room import AMPLE_S, LOOK_EVERY_S, Room
from tests.fixtures.nats import NatsServer, eventually, group_failed

pytestmark = pytest.mark.anyio
NUM_WAITING = 64


async def test_who_comes_after_a_look_does_not_queue_behind_those_who_waited_for_it(
    bus: Bus, nats_server: NatsServer
) -> None:
    """A queue for the lock would never end: each who leaves it comes again, and finds the others still in it."""
    async with open_connection(nats_server.url, name="room", limits=BusLimits()) as connection:
        room = Room(connection, stream_of(bus.run, Plane.EVENT))
        num_waiting = NUM_WAITING
        passed_by: list[int] = []

        async def wait() -> None:
            nonlocal num_waiting
            await room.wait_and_take(1)
            num_waiting -= 1
            if room.take(group_failed(1), 1):
                passed_by.append(num_waiting)

        assert not room.take(group_failed(1), 1)  # nobody has looked
        assert room.take(PromptsLoaded(data="d", num_prompts=1, num_too_long=0, took_s=0), 1)  # the buffer need not
        async with anyio.create_task_group() as group:
            for _ in range(NUM_WAITING):
                group.start_soon(wait)
        assert passed_by == list(range(NUM_WAITING - 1, -1, -1))


async def test_an_event_waits_for_no_look_while_much_is_left(
    bus: Bus, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_connection(nats_server.url, name="room", limits=BusLimits()) as connection:
        room, event = Room(connection, stream_of(bus.run, Plane.EVENT)), group_failed(1)
        await room.wait_and_take(1)
        looked_at = room._looked_at
        monkeypatch.setattr(module, "monotonic", lambda: looked_at + LOOK_EVERY_S)
        async with in_background(room.keep_current):
            assert room.take(event, 1)
            await eventually(lambda: room._looked_at > looked_at)  # meanwhile, once
        monkeypatch.setattr(module, "monotonic", lambda: looked_at + LOOK_EVERY_S + AMPLE_S)
        assert not room.take(event, 1)  # too old
        monkeypatch.setattr(module, "monotonic", lambda: looked_at + 2 * LOOK_EVERY_S)
        room._left = room._ample
        assert not room.take(event, 1)  # too little
