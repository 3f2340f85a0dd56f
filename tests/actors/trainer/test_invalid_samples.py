"""Samples that cannot be true cost themselves: not their groups, and not the run. On a real bus."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from messages import BatchReady, BatchTrained, Float32Array, GroupRef, Int32Array, Outcome, Segment, VerdictGiven
from runtime.bus.bus import Bus
from tests.actors.trainer.hosting import of, running, said_until
from tests.actors.trainer.logs import completed, payload, publish_group
from tests.actors.trainer.tiny import VOCAB
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]


def with_id(segment: Segment, token: int) -> Segment:
    return replace(segment, response_ids=Int32Array([*segment.response_ids[:-1], token]))


def with_log_prob(segment: Segment, log_prob: float) -> Segment:
    return replace(segment, rollout_log_probs=Float32Array([*segment.rollout_log_probs[:-1], log_prob]))


async def publish(bus: Bus, group_id: int, change: Callable[[int, Segment], Segment], **positions: int) -> GroupRef:
    """A group whose segments are changed, and of which some references lead elsewhere."""
    message = payload(group_id)
    segments = tuple(change(index, segment) for index, segment in enumerate(message.segments))
    event = completed(group_id, await bus.publish(replace(message, segments=segments)))
    samples = [
        replace(sample, segments=(replace(sample.segments[0], position=positions[f"of_{sample.index}"]),))
        if f"of_{sample.index}" in positions
        else sample
        for sample in event.samples
    ]
    event_seq = await bus.publish(replace(event, samples=tuple(samples)))
    await bus.publish(VerdictGiven(group_id=group_id, attempt=0, event_seq=event_seq, outcome=Outcome.KEEP))
    return GroupRef(group_id=group_id, attempt=0, event_seq=event_seq)


async def test_a_sample_that_cannot_be_true_is_left_out_and_named_and_the_others_train(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 1}, algorithm={"use_rollout_logprobs": True})

    def ids(index: int, segment: Segment) -> Segment:
        return with_id(segment, (VOCAB, 3, -1, 10**9)[index])

    def log_probs(index: int, segment: Segment) -> Segment:
        return with_log_prob(segment, (-1e39, -3.4e38, float("nan"), -2.0)[index])

    refs = (
        await publish(bus, 0, ids),
        await publish(bus, 1, log_probs),
        await publish(bus, 2, lambda _, segment: segment, of_0=1, of_3=9),
        await publish_group(bus, 3),
    )
    await bus.publish(BatchReady(incarnation=1, step=0, groups=refs))
    async with running(topology, bus, tmp_path / "run"):
        (trained,) = of(await said_until(bus, BatchTrained), BatchTrained)
    assert [(item.group_id, item.reason, item.samples) for item in trained.untrained] == [
        (0, "invalid", ((0, 0), (2, 0), (3, 0))),
        (1, "invalid", ((0, 0), (1, 0), (2, 0))),
        (2, "invalid", ((0, 0), (3, 0))),
    ]
    assert (trained.num_groups, trained.num_samples, trained.not_finite) == (4, 8, ())
    assert abs(trained.metrics["train/loss"]) < 100
