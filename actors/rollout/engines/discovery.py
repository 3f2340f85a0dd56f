"""The servers of a pool, engines or routers, as their addresses come and go on the bus."""

from collections.abc import Awaitable, Callable

import anyio

from runtime.bus.addresses import Address, address_filter, server_name
from runtime.bus.bus import Bus


async def attend_servers(bus: Bus, role: str, pool: str, attend: Callable[[str, str], Awaitable[None]]) -> None:
    """Attend to each server by its name and URL, until its next address; those already there come first. For ever."""
    scopes: dict[str, anyio.CancelScope] = {}

    async def attend_within(scope: anyio.CancelScope, name: str, url: str) -> None:
        with scope:
            await attend(name, url)

    async with (
        bus.kv.watch(address_filter(role, pool), Address) as entries,
        anyio.create_task_group() as group,
    ):
        async for entry in entries:
            if entry.value is None:
                continue
            if entry.key in scopes:
                scopes[entry.key].cancel()
            scope = scopes[entry.key] = anyio.CancelScope()
            group.start_soon(attend_within, scope, server_name(entry.key), entry.value.url)
