"""Discovers the servers of a pool, engines or routers, from their addresses on the bus."""

from collections.abc import Awaitable, Callable

import anyio
import structlog

from messages import KillAnswered, KillRequested
from runtime.bus.addresses import Address, address_filter, server_name
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.util.retrying import retried

log = structlog.get_logger()

KILL_TIMEOUT_S = 10.0  # for the node daemon's response
KILL_TRIES = 30  # several minutes: the node daemon may be starting


def index_of_server(name: str) -> int:
    """Return the index of a server in its pool, from its name."""
    return int(name.rpartition(".")[2])


async def attend_servers(
    bus: Bus,
    role: str,
    pool: str,
    attend: Callable[[str, Address], Awaitable[None]],
    *,
    of_index: Callable[[int], bool] = lambda _: True,
) -> None:
    """Run `attend` for each server at its newest address, existing servers first. Never returns.

    Cancels the earlier call for a server when its address changes. Renewals and an expiry of an address change nothing.
    Servers whose index in the pool `of_index` does not accept are left to other actors.
    """
    scopes: dict[str, anyio.CancelScope] = {}
    newest: dict[str, Address] = {}

    async def attend_within(scope: anyio.CancelScope, name: str, address: Address) -> None:
        with scope:
            await attend(name, address)

    async with (
        bus.kv.watch(address_filter(role, pool), Address) as entries,
        anyio.create_task_group() as group,
    ):
        async for entry in entries:
            if entry.value is None or newest.get(entry.key) == entry.value:
                continue
            if not of_index(index_of_server(entry.key)):
                continue
            newest[entry.key] = entry.value
            if entry.key in scopes:
                scopes[entry.key].cancel()
            scope = scopes[entry.key] = anyio.CancelScope()
            group.start_soon(attend_within, scope, server_name(entry.key), entry.value)


async def kill_server(bus: Bus, name: str, address: Address, reason: str, *, gives_up: bool = False) -> None:
    """Have a server killed by the node daemon that started it, if there is one; restarted too unless `gives_up`.

    Idempotent: only the process with that pid is killed. Returns once the node daemon has responded, or the retries are
    used up.
    """
    if not address.agent:
        return
    request = KillRequested(process=name, pid=address.pid, reason=reason, gives_up=gives_up)
    try:
        answer = await retried(
            lambda: bus.call(address.agent, request, KillAnswered, timeout_s=KILL_TIMEOUT_S),
            on=BusError,
            times=KILL_TRIES,
        )
    except BusError as error:
        log.warning("server_not_killed", process=name, error=str(error))
    else:
        log.info("server_killed", process=name, pid=address.pid, was_there=answer.killed)
