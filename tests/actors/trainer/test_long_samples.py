"""Samples that are longer than the trainer's ranks take, on a real bus."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from messages import BatchReady, BatchTrained, GroupRef, Outcome, VerdictGiven
from runtime.bus.bus import Bus
from runtime.process.actor import InputError
from tests.actors.trainer.hosting import errors_of, of, running, said_until
from tests.actors.trainer.logs import completed, payload, publish_group
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]

LIMIT = 20
NOWHERE = 10_000  # on the data plane


async def publish_long(bus: Bus, group_id: int, *long: int) -> GroupRef:
    """A group whose named samples have too many tokens by their lengths, and lie where nothing is stored."""
    event = completed(group_id, await bus.publish(payload(group_id)))
    samples = [
        replace(sample, prompt_len=LIMIT, response_len=1, segments=(replace(sample.segments[0], seq=NOWHERE),))
        if sample.index in long
        else sample
        for sample in event.samples
    ]
    event_seq = await bus.publish(replace(event, samples=tuple(samples)))
    await bus.publish(VerdictGiven(group_id=group_id, attempt=0, event_seq=event_seq, outcome=Outcome.KEEP))
    return GroupRef(group_id=group_id, attempt=0, event_seq=event_seq)


async def test_a_sample_over_the_limit_is_told_by_its_length_and_never_fetched(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 1, "max_tokens_per_gpu": LIMIT})
    refs = (await publish_long(bus, 0, 1, 3), await publish_long(bus, 1, 0, 1, 2, 3), await publish_group(bus, 2))
    await bus.publish(BatchReady(incarnation=1, step=0, groups=refs))
    async with running(topology, bus, tmp_path / "run"):
        (trained,) = of(await said_until(bus, BatchTrained), BatchTrained)
    assert [(item.group_id, item.reason, item.samples) for item in trained.untrained] == [
        (0, "too_long", ((1, 0), (3, 0))),
        (1, "too_long", ((0, 0), (1, 0), (2, 0), (3, 0))),
    ]
    assert (trained.skipped_groups, trained.num_groups, trained.num_samples) == ((1,), 2, 6)
    assert trained.metrics["train/num_untrained_samples"] == 6
    assert trained.metrics["train/global_batch_size"] == 12  # their votes count


async def test_on_too_long_fail_ends_with_the_sample_and_the_settings(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 1, "max_tokens_per_gpu": LIMIT, "on_too_long": "fail"})
    await bus.publish(BatchReady(incarnation=1, step=0, groups=(await publish_long(bus, 0, 3),)))
    (error,) = await errors_of(topology, bus, tmp_path / "run")
    assert isinstance(error, InputError)
    assert "sample 3 of group 0 has 21 tokens; 20 fit (train.max_tokens_per_gpu" in str(error)
