"""Changes of processes and addresses of servers, on the bus."""

from collections.abc import AsyncGenerator

import anyio
import pytest

from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.bus.servers import attend_servers
from runtime.node.run_log import Publisher
from runtime.node.supervisor.state_changes import Change, Exited, Ready
from runtime.settings.processes import ProcessSpec
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

KEY = address_key("engine", "policy", 0)
ENGINE = ProcessSpec(name="engine.policy.0", command=(), address_key=KEY)


def ready(pid: int = 7) -> Ready:
    return Ready(spec=ENGINE, host="127.0.0.1", port=9, pid=pid, restarts=0)


async def test_an_address_lives_as_long_as_its_server_and_its_daemon(bus: Bus) -> None:
    send, changes = anyio.create_memory_object_stream[Change](4)

    async def is_there() -> bool:
        return await bus.kv.get(KEY, Address) is not None

    async def is_gone() -> bool:
        return not await is_there()

    async with send, changes, anyio.create_task_group() as group:
        group.start_soon(Publisher(bus, "n0", lifetime_s=1, renew_every_s=0.2).run, changes)
        await send.send(ready())
        await eventually(is_there)
        await send.send(Exited(spec=ENGINE, pid=7, exit_code=1, reason="x", restart_in_s=1.0))
        await eventually(is_gone)
        await send.send(ready(8))
        await eventually(is_there)
        group.cancel_scope.cancel()  # as a daemon that is killed
    await eventually(is_gone)


async def test_an_address_is_renewed_again_and_again(bus: Bus) -> None:
    """Each renewal gives it its whole life again."""
    send, changes = anyio.create_memory_object_stream[Change](4)
    async with send, changes, anyio.create_task_group() as group:
        group.start_soon(Publisher(bus, "n0", lifetime_s=600, renew_every_s=0.05).run, changes)
        await send.send(ready())
        await _renewals(bus, 10)
        assert await bus.kv.get(KEY, Address) is not None
        group.cancel_scope.cancel()


async def test_a_renewed_address_is_no_new_server_and_a_restarted_one_is(bus: Bus) -> None:
    """A server in a container may get the port and the process id of the one before."""
    attended: list[Address] = []

    async def attend(_name: str, address: Address) -> None:
        attended.append(address)
        await anyio.sleep_forever()

    send, changes = anyio.create_memory_object_stream[Change](4)
    async with send, changes, anyio.create_task_group() as group:
        group.start_soon(attend_servers, bus, "engine", "policy", attend)
        group.start_soon(Publisher(bus, "n0", renew_every_s=0.05).run, changes)
        await send.send(ready())
        await eventually(lambda: len(attended) == 1)
        await _renewals(bus, 5)
        assert len(attended) == 1
        await send.send(ready())
        await eventually(lambda: len(attended) == 2)
        group.cancel_scope.cancel()
    assert attended[0].start != attended[1].start


async def _renewals(bus: Bus, number: int) -> None:
    revisions = {revision async for revision in _revisions(bus, number)}
    assert len(revisions) == number


async def _revisions(bus: Bus, number: int) -> AsyncGenerator[int]:
    async with bus.kv.watch(KEY, Address) as entries:
        for _ in range(number):
            yield (await anext(entries)).revision
