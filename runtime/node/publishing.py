"""Publishes state changes of a node's processes, and the addresses of its servers."""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

import structlog

from messages import ActorExited, ActorStarted
from runtime.bus.addresses import Address
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.node.supervisor.state_changes import Change, Exited, Ready, Started
from runtime.settings.processes import ProcessSpec
from runtime.util.retrying import FOR_EVER, retried

log = structlog.get_logger()


async def publish_changes(bus: Bus, node: str, changes: AsyncIterable[Change]) -> None:
    """Publish process changes as events, and server addresses in the KV store."""
    async for change in changes:
        name = change.spec.name
        match change:
            case Started():
                await _insist(
                    bus.publish, ActorStarted(actor=name, node=node, pid=change.pid, restarts=change.restarts)
                )
            case Exited():
                event = ActorExited(
                    actor=name,
                    node=node,
                    pid=change.pid,
                    exit_code=change.exit_code,
                    reason=change.reason,
                    restart_in_s=change.restart_in_s,
                )
                await _insist(bus.publish, event)
            case Ready() if change.spec.address_key is not None:
                address = Address(url=f"http://{change.host}:{change.port}", agent=bus.name, pid=change.pid)
                await _insist(bus.kv.put, change.spec.address_key, address)
            case _:
                pass


async def forget_addresses(bus: Bus, specs: Iterable[ProcessSpec]) -> None:
    """Delete the addresses of an earlier daemon's servers, which no longer run."""
    for spec in specs:
        if spec.address_key is not None:
            await bus.kv.delete(spec.address_key)


async def _insist(action: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    """Retry an action through any bus outage, until the daemon ends."""
    await retried(lambda: action(*arguments), on=BusError, times=FOR_EVER, failed=_log_failure)


def _log_failure(error: Exception, failures: int) -> None:
    log.warning("telling_failed", error=str(error), in_a_row=failures)
