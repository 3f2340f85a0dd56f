"""Stores the current segments of a group's samples, and restores them in another attempt or delivery."""

from collections.abc import Sequence
from typing import Any, Final

import anyio
import msgspec
import numpy as np
import structlog

from actors.rollout.samples.held import HeldGroup
from actors.rollout.samples.sample import OpenSample, fresh_samples, inherit
from actors.rollout.samples.tasks import GroupTask
from messages import (
    Prompt,
    RolloutRequested,
    SampleKey,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    SegmentsSpilled,
    SpillsGiven,
    SpillsRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.consumer import Delivery
from runtime.bus.errors import BusError, MessageTooLarge, PayloadLost
from runtime.bus.roster import Roster
from runtime.data.stored_prompts import SHOWN_CHARS
from runtime.ledger.groups import longest

log = structlog.get_logger()

SPILLS_TIMEOUT_S: Final = 3.0  # for the buffer's response with spilled samples


async def store(bus: Bus, message: SegmentsPublished) -> Sequence[SegmentRef]:
    """Publish segments, split into several messages if the server's size limit requires it; return their references.

    Raises:
        MessageTooLarge: a single segment exceeds the limit.
    """
    segments = message.segments
    try:
        seq = await bus.publish(message)
    except MessageTooLarge:
        if len(segments) <= 1:
            raise
        half = len(segments) // 2
        parts = [msgspec.structs.replace(message, segments=part) for part in (segments[:half], segments[half:])]
        return [ref for part in parts for ref in await store(bus, part)]
    return [SegmentRef(seq=seq, position=position) for position in range(len(segments))]


def text_of(prompt: Prompt) -> str:
    """Return the prompt text to store with samples: all of it, or its start if the prompt is stored separately."""
    return prompt.text[:SHOWN_CHARS] if prompt.parts else prompt.text


def label_of(prompt: Prompt) -> Any:
    """Return the label to store with samples; None if the prompt is stored separately."""
    return None if prompt.parts else prompt.label


class SegmentStore:
    """Takes segments from the buffers of a group's samples, and stores them."""

    def __init__(self, task: GroupTask, samples: Sequence[OpenSample], bus: Bus) -> None:
        self._task = task
        self._samples = samples
        self._bus = bus
        self._outbox: list[tuple[OpenSample, Segment]] = []
        self._storing = anyio.Lock()
        # of each sample by index and part: segments, columns and reward in events
        self._told: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def take(self, sample: OpenSample) -> None:
        """Take the new tokens of a sample; `flush` stores them."""
        task = self._task
        key = SampleKey(group_id=task.group_id, attempt=task.attempt, index=sample.index, part=sample.part)
        segment = sample.take(key, sample.prompt_of(task.prompt.prompt_ids))
        if segment is not None:
            self._outbox.append((sample, segment))

    async def flush(self) -> None:
        """Store all taken segments. Those that are taken during a store are stored together afterwards.

        If a store fails or is cancelled, the next call stores its segments.
        """
        async with self._storing:
            while self._outbox:
                taken, self._outbox, is_stored = self._outbox, [], False
                try:
                    await self._store([sample for sample, _ in taken], [segment for _, segment in taken])
                    is_stored = True
                finally:
                    if not is_stored:
                        self._outbox = [*taken, *self._outbox]

    async def start_again(self, sample: OpenSample) -> None:
        """Forget the tokens of a sample, which begins again from its prompt and has no request running."""
        await self.flush()  # afterwards nothing of it is being stored
        for part in sample.parts:
            self._told.pop((part.index, part.part), None)
        sample.start_again()

    async def spill(self) -> None:
        """Store and report the current samples, including tokens of running requests."""
        for sample in self._parts():
            if sample.request is None:
                continue
            for reader in sample.request.readers:
                if reader.is_busy or reader.ended or not reader.num_new:
                    continue
                if reader.is_trusted and reader.is_recent(self._task.min_version):
                    self.take(sample)
        await self.flush()
        await self._tell()

    async def _tell(self) -> None:
        """Publish what was stored since the last event, if anything was."""
        task, stored = self._task, [sample for sample in self._parts() if sample.refs and sample.stored]
        facts = {(s.index, s.part): (len(s.refs), len(s.columns), s.reward is not None) for s in stored}
        changed = [s for s in stored if self._told.get((s.index, s.part)) != facts[s.index, s.part]]
        if not changed or task.round is None:
            return
        starts = [self._told_segments(sample) for sample in changed]
        spilled = SegmentsSpilled(
            group_id=task.group_id,
            attempt=task.attempt,
            lease=task.lease,
            round=task.round,
            instance=self._bus.name,
            samples=tuple(s.summary(from_segment=start) for s, start in zip(changed, starts, strict=True)),
            starts=tuple(starts),
        )
        await self._bus.publish(spilled)
        self._told |= {(s.index, s.part): facts[s.index, s.part] for s in changed}

    def _parts(self) -> list[OpenSample]:
        return [part for sample in self._samples for part in sample.parts]

    def _told_segments(self, sample: OpenSample) -> int:
        """Return how many segments of a sample events have. For one that began again, each event lists all.

        Events with fewer tokens than before are not used, so a later one must not refer to them.
        """
        if self._samples[sample.index].num_restarts:
            return 0
        return self._told.get((sample.index, sample.part), (0, 0, False))[0]

    async def _store(self, samples: Sequence[OpenSample], segments: Sequence[Segment]) -> None:
        """Publish segments and record their locations."""
        refs: Sequence[SegmentRef] = [SegmentRef(seq=0, position=position) for position in range(len(segments))]
        if self._task.store:
            message = SegmentsPublished(
                group_id=self._task.group_id,
                attempt=self._task.attempt,
                lease=self._task.lease,
                segments=tuple(segments),
                prompt=text_of(self._task.prompt),
                label=label_of(self._task.prompt),
            )
            refs = await store(self._bus, message)
        for sample, segment, ref in zip(samples, segments, refs, strict=True):
            sample.stored_at(ref, segment)


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

    async def samples(
        self, task: RolloutRequested, carried: Sequence[SampleSummary], held: HeldGroup | None = None
    ) -> list[OpenSample]:
        """Return the group's samples: those that are held, and others restored from earlier attempts where possible."""
        kept = {} if held is None else held.samples
        samples = fresh_samples(task.num_samples, task.prompt.prompt_ids, baseline=task.baseline)
        samples = [kept.get(sample.index, sample) for sample in samples]
        for sample in samples:
            if sample.index in kept:
                continue
            summaries = sorted((one for one in carried if one.index == sample.index), key=lambda one: one.part)
            try:
                segments = [[await self._segment(ref) for ref in summary.segments] for summary in summaries]
            except PayloadLost as error:
                log.warning("carried_tokens_lost", index=sample.index, error=str(error))
                continue
            for summary, own in zip(summaries, segments, strict=True):
                part = sample
                if summary.part and not own:
                    continue  # it had no tokens, so nothing tells its prompt
                if summary.part:
                    part = sample.open_sibling(summary.part, own[0].prompt_ids)
                elif own and not np.array_equal(own[0].prompt_ids, task.prompt.prompt_ids):  # a function replaced it
                    part.own_prompt, part.prompt_len = own[0].prompt_ids, len(own[0].prompt_ids)
                inherit(part, summary, own, max_new_tokens=task.sampling.max_new_tokens)
        return samples

    async def _segment(self, ref: SegmentRef) -> Segment:
        return (await self._bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position]
