"""Ranks of one start meet at rank 0's store, whatever address an earlier start has left."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from actors.trainer.rendezvous import meet
from runtime.bus.addresses import ADDRESS_VARIABLE, START_VARIABLE
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_rank_ignores_the_address_of_an_earlier_start(
    bus: Bus, make_topology: Callable[..., Topology], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    topology = make_topology(trainer={"num_processes": 2})
    monkeypatch.setenv(ADDRESS_VARIABLE, host)
    monkeypatch.setenv(START_VARIABLE, "10.0.0.1:1")
    earlier = await meet(topology, bus, 0)  # its process still runs
    monkeypatch.setenv(START_VARIABLE, "10.0.0.1:2")
    found: list[Any] = []

    async def join() -> None:
        found.append(await meet(topology, bus, 1))

    with anyio.fail_after(200):
        async with anyio.create_task_group() as ranks:
            ranks.start_soon(join)
            await anyio.sleep(0.5)
            assert not found
            store = await meet(topology, bus, 0)
    earlier.set("key", "earlier")
    store.set("key", "later")
    assert [joined.get("key") for joined in found] == [b"later"]
