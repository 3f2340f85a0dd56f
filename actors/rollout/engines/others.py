"""What the engines of a run's other rollout actors serve. Decisions that concern the whole run ask for it."""

from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog

from actors.rollout.engines.fleet import Fleet
from runtime.bus.errors import BusError
from runtime.bus.kv import KeyValues

log = structlog.get_logger()

LIFETIME_S: Final = 30  # of an actor's note without renewal, in whole seconds as the bucket needs
RENEW_EVERY_S: Final = 10.0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout actor's engines serve."""

    version: int = 0  # newest verified weights of an engine that accepts requests; 0: there is none
    answers: bool = False  # whether the last request to one of them succeeded


def served_by(fleet: Fleet) -> Served:
    """Return what the engines of a fleet serve."""
    admitted = fleet.serving.admitted()
    return Served(
        version=max((engine.version for engine in admitted), default=0),
        answers=any(fleet.serving.outcomes.answers(engine.name) for engine in admitted),
    )


class OtherActors:
    """Notes of all rollout actors in the run's bucket, each under its own key.

    Args:
        kv: the run's bucket.
        pool: of the engines.
        instance: name of this actor.
        is_alone: whether there are no others; nothing is read or written then.
    """

    def __init__(self, kv: KeyValues, pool: str, instance: str, *, is_alone: bool) -> None:
        self._kv = kv
        self._prefix = f"served.{pool}."
        self._own = self._prefix + instance
        self._is_alone = is_alone

    async def tell(self, fleet: Fleet) -> None:
        """Note what the engines of this actor serve, at once and at each change. Never returns, unless it is alone."""
        while not self._is_alone:
            now = served_by(fleet)
            try:
                await self._kv.put(self._own, now, ttl_s=LIFETIME_S)
            except BusError as error:  # others count on it until it expires
                log.warning("served_weights_not_noted", error=str(error))
            with anyio.move_on_after(RENEW_EVERY_S):
                await fleet.until(lambda now=now: served_by(fleet) != now)

    async def hold(self, version: int) -> bool:
        """Whether an engine of another actor serves this weight version or a newer one."""
        return await self._any(lambda served: served.version >= version)

    async def answer(self) -> bool:
        """Whether an engine of another actor answers its requests."""
        return await self._any(lambda served: served.answers)

    async def _any(self, holds: Callable[[Served], bool]) -> bool:
        """Whether it holds for another actor. If that cannot be read, it is assumed: no actor ends a run by itself."""
        if self._is_alone:
            return False
        try:
            entries = await self._kv.latest(self._prefix + ">", Served)
        except BusError as error:
            log.warning("served_weights_not_read", error=str(error))
            return True
        return any(entry.value is not None and entry.key != self._own and holds(entry.value) for entry in entries)
