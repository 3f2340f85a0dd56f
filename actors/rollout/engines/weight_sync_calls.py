"""Weight-sync RPC handlers of the rollout actor."""

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import structlog

from actors.rollout.engines.fleet import Fleet
from messages import BucketSent, WeightSyncAnswered, WeightSyncDecided, WeightSyncPrepared, WeightSyncRequested
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError

log = structlog.get_logger()

SYNC_CALLS: Final = (WeightSyncPrepared, BucketSent, WeightSyncDecided)
ASK_EVERY_S: Final = 1.0  # interval of weight-sync requests while engines wait for one
ASK_TIMEOUT_S: Final = 10.0


async def take_part(bus: Bus, fleet: Fleet, is_given_up: Callable[[], Awaitable[bool]]) -> None:
    """Serve the trainer's weight-sync calls, and request a weight sync for engines that missed one. Never returns.

    Args:
        is_given_up: whether engines move on to newer weights because no process has the target's any more.
    """
    syncs = fleet.syncs
    async with bus.serve(
        {WeightSyncPrepared: syncs.prepared, BucketSent: syncs.step, WeightSyncDecided: syncs.decided}
    ):
        while True:
            await anyio.sleep(ASK_EVERY_S)
            await _ask(bus, fleet, is_given_up)


async def _ask(bus: Bus, fleet: Fleet, is_given_up: Callable[[], Awaitable[bool]]) -> None:
    """Request a weight sync if engines wait for one. The trainer may be down or busy: the next poll retries."""
    announced, engines = fleet.weights, fleet.syncs.wanted()
    if announced is None or not announced.sender or not engines:
        return
    request = WeightSyncRequested(version=announced.version, engines=engines)
    try:
        if await is_given_up():
            return
        answer = await bus.call(announced.sender, request, WeightSyncAnswered, timeout_s=ASK_TIMEOUT_S)
    except BusError as error:
        log.debug("weight_sync_not_requested", weight_version=announced.version, error=str(error))
    else:
        log.debug("weight_sync_requested", weight_version=announced.version, refused=answer.failed)
