"""Completed groups and their payloads, as rollout would have published them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from messages import (
    BatchReady,
    GroupCompleted,
    GroupRef,
    GroupsIssued,
    IssuedGroup,
    Outcome,
    SampleKey,
    SampleSummary,
    Segment,
    SegmentsPublished,
    VerdictGiven,
)
from runtime.bus.bus import Bus
from tests.actors.trainer.tiny import VOCAB
from tests.build import events, samples

GROUPS = 3  # per published batch
NO_REWARDS: Mapping[int, float] = MappingProxyType({})


def payload(group_id: int, *, num_samples: int = 4, version: int = 1, attempt: int = 0) -> SegmentsPublished:
    """One segment per sample: contents depend on the group alone."""
    generator = np.random.default_rng(group_id)
    segments = []
    for index in range(num_samples):
        length = int(generator.integers(1, 6))
        segments.append(
            segment(
                SampleKey(group_id=group_id, attempt=attempt, index=index),
                generator.integers(0, VOCAB, 3),
                generator.integers(0, VOCAB, length),
                ((version, 0, length),),
                log_probs=-generator.random(length) * 4,
            )
        )
    return SegmentsPublished(group_id=group_id, attempt=attempt, lease="lease", segments=tuple(segments))


def segment(
    key: SampleKey,
    prompt: Any,
    response: Any,
    spans: tuple[tuple[int, int, int], ...],
    *,
    mask: Any = None,
    log_probs: Any = None,
) -> Segment:
    return samples.segment(response, prompt=prompt, key=key, log_probs=log_probs, mask=mask, spans=spans)


def completed(
    group_id: int, seq: int, *, num_samples: int = 4, attempt: int = 0, rewards: Mapping[int, float] = NO_REWARDS
) -> GroupCompleted:
    """All samples in one payload at `seq`; rewards rise with the index, but for those that are given by index."""
    members = tuple(
        summary(index, [(seq, index)], reward=rewards.get(index, float(index % 3 + group_id % 2)))
        for index in range(num_samples)
    )
    return group_of(group_id, members, attempt=attempt)


def group_of(group_id: int, members: tuple[SampleSummary, ...], *, attempt: int = 0) -> GroupCompleted:
    return events.completed(group_id, attempt, data="digits", samples=members)


def summary(index: int, refs: list[tuple[int, int]], *, reward: float | None = 1.0, **fields: Any) -> SampleSummary:
    return samples.summary(index, *refs, reward=reward, **fields)


async def publish_group(
    bus: Bus,
    group_id: int,
    *,
    attempt: int = 0,
    version: int = 1,
    rewards: Mapping[int, float] = NO_REWARDS,
) -> GroupRef:
    """Publish a group's issue, payload, completion and verdict, as buffer, rollout and filter do."""
    issued = IssuedGroup(group_id=group_id, attempt=attempt, prompt=group_id)
    round_ = group_id // GROUPS
    await bus.publish(GroupsIssued(incarnation=1, round=round_, min_version=version, groups=(issued,), num_samples=4))
    seq = await bus.publish(payload(group_id, version=version, attempt=attempt))
    event_seq = await bus.publish(completed(group_id, seq, attempt=attempt, rewards=rewards))
    await bus.publish(VerdictGiven(group_id=group_id, attempt=attempt, event_seq=event_seq, outcome=Outcome.KEEP))
    return GroupRef(group_id=group_id, attempt=attempt, event_seq=event_seq)


async def publish_groups(bus: Bus, step: int, *, version: int | None = None) -> tuple[GroupRef, ...]:
    """Publish the groups of a step."""
    version = step + 1 if version is None else version
    groups = range(step * GROUPS, (step + 1) * GROUPS)
    return tuple([await publish_group(bus, group_id, version=version) for group_id in groups])


async def publish_batch(bus: Bus, step: int, *, version: int | None = None) -> None:
    """Publish the groups of a step and its batch."""
    groups = await publish_groups(bus, step, version=version)
    await bus.publish(BatchReady(incarnation=1, step=step, groups=groups))


async def publish_pairs(bus: Bus, step: int) -> None:
    """Publish preference pairs as the groups of a step, and its batch: a sample of two parts each."""
    groups: list[GroupRef] = []
    for group_id in range(step * GROUPS, (step + 1) * GROUPS):
        stored = payload(group_id, num_samples=2)
        parts = tuple(
            msgspec.structs.replace(part, sample=SampleKey(group_id=group_id, attempt=0, index=0, part=number))
            for number, part in enumerate(stored.segments)
        )
        seq = await bus.publish(msgspec.structs.replace(stored, segments=parts))
        members = tuple(summary(0, [(seq, number)], reward=1.0 - number, part=number) for number in range(2))
        issued = IssuedGroup(group_id=group_id, attempt=0, prompt=group_id)
        await bus.publish(GroupsIssued(incarnation=1, round=step, min_version=1, groups=(issued,), num_samples=1))
        event_seq = await bus.publish(group_of(group_id, members))
        await bus.publish(VerdictGiven(group_id=group_id, attempt=0, event_seq=event_seq, outcome=Outcome.KEEP))
        groups.append(GroupRef(group_id=group_id, attempt=0, event_seq=event_seq))
    await bus.publish(BatchReady(incarnation=1, step=step, groups=tuple(groups)))
