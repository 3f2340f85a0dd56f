"""Sets the target weights of a rollout actor's engines, and reports which of them they hold."""

from typing import Final

import anyio
import structlog
from msgspec import UNSET

from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.others import OtherActors
from actors.rollout.engines.target import TargetWeights
from messages import WeightsApplied, WeightsLost, WeightsProgressed
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError

log = structlog.get_logger()

PROGRESS_EVERY_S: Final = 60.0  # between events about slow weight updates


class WeightReports:
    """Passes the log's target weights on to a fleet, and publishes what becomes of them.

    Args:
        bus: of the actor.
        fleet: its engines.
        target: the target weights that follow from the log.
        others: what the engines of other rollout actors serve.
        is_alone: whether there are no others.
    """

    def __init__(self, bus: Bus, fleet: Fleet, target: TargetWeights, others: OtherActors, *, is_alone: bool) -> None:
        self._bus = bus
        self._fleet = fleet
        self._target = target
        self._others = others
        self._is_alone = is_alone
        self._set_at: dict[int, float] = {}  # version -> time at which it became the target, until it is verified

    async def set_target(self) -> None:
        """Have the engines take the newest weights of the log that they may take."""
        newest = self._target.newest
        if newest is not None and newest.version > self._fleet.target_version:
            self._set_at[newest.version] = anyio.current_time()
            await self._fleet.set_target(newest)

    async def gives_up(self) -> bool:
        """Move running evaluations to newer weights if no engine of the run holds their version; return whether it did.

        Only called where weights are not in files. The trainer then has newer weights and can never send the old ones
        again. Several actors move where the log says so.
        """
        old = self._fleet.target_version
        if not self._target.holds_back or self._fleet.serving.is_held_by_any(old) or await self._others.hold(old):
            return False
        if self._is_alone:
            self._target.give_up()
            await self.set_target()
        newer = self._target.newest_known if not self._is_alone else self._fleet.target_version
        log.warning("weights_lost", weight_version=old, newer=newer)
        await self._bus.publish(WeightsLost(version=old, newer=newer, instance=self._bus.name))
        return True

    async def run(self) -> None:
        """Report progress and verified versions. Never returns."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._report_progress)
            group.start_soon(self._report_versions)

    async def _report_progress(self) -> None:
        """Publish what engines do whose weight update takes long. Never returns."""
        while True:
            await anyio.sleep(PROGRESS_EVERY_S)
            if engines := self._fleet.slow_updates(PROGRESS_EVERY_S):
                version = self._fleet.target_version
                progressed = WeightsProgressed(version=version, instance=self._bus.name, engines=engines)
                try:
                    await self._bus.publish(progressed)
                except BusError as error:  # the next one says more
                    log.warning("weights_progress_not_published", error=str(error))

    async def _report_versions(self) -> None:
        """Publish an event each time the engines have verified a newer version. Never returns."""
        version, fleet = 0, self._fleet
        while True:
            version = await fleet.next_version(version)
            since = self._set_at[version]
            self._set_at = {later: at for later, at in self._set_at.items() if later > version}
            took_s = anyio.current_time() - since
            log.info("weights_applied", weight_version=version, engines=fleet.serving.num_admitted(), took_s=took_s)
            checksums = fleet.take_checksums()
            await self._bus.publish(
                WeightsApplied(
                    version=version,
                    instance=self._bus.name,
                    num_engines=fleet.serving.num_admitted(),
                    took_s=took_s,
                    engines=fleet.updates(version, since),
                    not_compared=fleet.take_not_compared(),
                    checksums=UNSET if self._is_alone else checksums,
                )
            )
