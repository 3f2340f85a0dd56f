"""Restores the samples of a group from earlier attempts, or from earlier deliveries of its task."""

from collections.abc import Sequence
from typing import Final

import anyio
import structlog

from actors.rollout.groups.open_samples import OpenSample, fresh_samples, inherit
from messages import (
    RolloutRequested,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    SpillsGiven,
    SpillsRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.consumer import Delivery
from runtime.bus.errors import BusError, PayloadLost
from runtime.bus.roster import Roster
from runtime.ledger.groups import longest

log = structlog.get_logger()

SPILLS_TIMEOUT_S: Final = 3.0  # for the buffer's response with spilled samples


class Inheritance:
    """Finds earlier samples to continue from. A sample without an answer or with a lost payload starts from scratch."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def carried(self, delivery: Delivery[RolloutRequested]) -> tuple[SampleSummary, ...]:
        """Return the samples of earlier attempts, merged with spills of earlier deliveries of this attempt."""
        task = delivery.message
        if delivery.num_delivered == 1:
            return task.carried
        request = SpillsRequested(group_id=task.group_id, attempt=task.attempt)
        try:
            with anyio.fail_after(SPILLS_TIMEOUT_S):
                buffers = (await Roster(self._bus).members("buffer")).members
                if not buffers:
                    return task.carried
                instance = buffers[-1].instance
                given = await self._bus.call(instance, request, SpillsGiven, timeout_s=SPILLS_TIMEOUT_S)
        except (BusError, TimeoutError) as error:
            log.warning("spills_not_given", error=str(error))
            return task.carried
        return longest(task.carried, given.samples)

    async def samples(self, task: RolloutRequested, carried: Sequence[SampleSummary]) -> list[OpenSample]:
        """Return the group's samples, restored from earlier attempts where possible."""
        samples = fresh_samples(task.num_samples, task.prompt.prompt_ids)
        for summary in carried:
            try:
                segments = [await self._segment(ref) for ref in summary.segments]
            except PayloadLost as error:
                log.warning("carried_tokens_lost", index=summary.index, error=str(error))
            else:
                inherit(samples[summary.index], summary, segments, max_new_tokens=task.sampling.max_new_tokens)
        return samples

    async def _segment(self, ref: SegmentRef) -> Segment:
        return (await self._bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position]
