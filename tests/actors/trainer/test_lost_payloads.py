"""Payloads that are gone, and checkpoints that are asked for, on a real bus."""

from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from actors.trainer.data.feed import FedBatch, Feed
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    GroupRef,
    Message,
    PayloadsMissing,
    Plane,
    StatsGiven,
    StatsRequested,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.actors.trainer.hosting import errors_of, names, of, running, said_until
from tests.actors.trainer.logs import publish_batch, publish_group, publish_groups
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]


@pytest.fixture
def topology(make_topology: MakeTopology) -> Topology:
    return make_topology(train={"num_steps": 3})


async def lose_first_payload(bus: Bus) -> None:
    """Purge the oldest payload that there is."""
    await bus.purge(Plane.DATA, below_seq=(await bus.state(Plane.DATA)).first_seq + 1)


async def end_of_log(bus: Bus) -> int:
    return (await bus.state(Plane.EVENT)).last_seq


async def make_again(bus: Bus, step: int, groups: tuple[GroupRef, ...]) -> None:
    """What the buffer does once the first group was generated again."""
    again = await publish_group(bus, groups[0].group_id, attempt=1)
    await bus.publish(BatchReady(incarnation=1, step=step, groups=(again, *groups[1:])))


async def test_a_batch_whose_payload_was_purged_is_told_and_trained_when_it_was_made_again(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    groups = await publish_groups(bus, 0)
    await lose_first_payload(bus)
    async with running(topology, bus, tmp_path / "run"):
        await bus.publish(BatchReady(incarnation=1, step=0, groups=groups))
        (missing,) = of(await said_until(bus, PayloadsMissing), PayloadsMissing)
        assert (missing.step, missing.incarnation, missing.groups) == (0, 1, groups[:1])
        assert "has no message 1" in missing.reason
        await make_again(bus, 0, groups)
        (trained,) = of(await said_until(bus, BatchTrained), BatchTrained)
    assert (trained.step, trained.replay, trained.num_groups, trained.num_samples) == (0, False, 3, 12)
    assert trained.metrics["train/num_lost_groups"] == 0


async def test_a_trainer_that_died_after_it_told_of_a_loss_does_not_tell_again(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    groups = await publish_groups(bus, 0)
    await lose_first_payload(bus)
    async with running(topology, bus, tmp_path / "run"):
        await bus.publish(BatchReady(incarnation=1, step=0, groups=groups))
        await said_until(bus, PayloadsMissing)
    last_seq = await end_of_log(bus)
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced, from_seq=last_seq + 1)
        await make_again(bus, 0, groups)
        again = await said_until(bus, BatchTrained, from_seq=last_seq + 1)
    assert names(again) == ["TrainerStarted", "WeightsAnnounced", "BatchTrained"]


async def test_a_loss_in_the_batch_after_is_told_when_its_turn_comes(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    later = await publish_groups(bus, 1)
    await lose_first_payload(bus)
    await publish_batch(bus, 0)
    await bus.publish(BatchReady(incarnation=1, step=1, groups=later))
    async with running(topology, bus, tmp_path / "run"):
        events = await said_until(bus, PayloadsMissing)
    assert names(events) == [
        "TrainerStarted",
        "WeightsAnnounced",
        "BatchTrained",
        "WeightsAnnounced",
        "PayloadsMissing",
    ]
    assert of(events, PayloadsMissing)[0].step == 1


async def test_of_a_step_that_was_trained_before_a_crash_what_is_left_is_trained_and_counted(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    """The ledger has settled its groups: nobody would make them again."""
    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 0)
        await said_until(bus, WeightsAnnounced, 2)
    await lose_first_payload(bus)
    last_seq = await end_of_log(bus)
    async with running(topology, bus, tmp_path / "run"):
        events = await said_until(bus, WeightsAnnounced, from_seq=last_seq + 1)
    assert names(events) == ["TrainerStarted", "BatchTrained", "WeightsAnnounced"]
    (trained,) = of(events, BatchTrained)
    assert (trained.replay, trained.num_groups, trained.num_samples) == (True, 2, 8)
    assert trained.metrics["train/num_lost_groups"] == 1


async def test_of_a_step_that_a_zombie_trained_meanwhile_what_is_left_is_trained(
    topology: Topology, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has settled that batch and takes it back no more: telling of the loss again would be for ever."""
    collect = Feed.batch

    async def batch(feed: Feed, step: int) -> FedBatch:
        fed = await collect(feed, step)
        await bus.publish(BatchTrained(step=0, incarnation=0, num_groups=3, num_samples=12, num_tokens=60, metrics={}))
        await feed.until(lambda: 0 in feed.history.trained)
        return fed

    monkeypatch.setattr(Feed, "batch", batch)
    groups = await publish_groups(bus, 0)
    await lose_first_payload(bus)
    async with running(topology, bus, tmp_path / "run"):
        await bus.publish(BatchReady(incarnation=1, step=0, groups=groups))
        events = await said_until(bus, WeightsAnnounced, 2)
    assert not of(events, PayloadsMissing)
    assert of(events, BatchTrained)[-1].metrics["train/num_lost_groups"] == 1


async def test_a_trainer_trains_no_batch_that_its_predecessor_gave_back_while_it_started(
    topology: Topology, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word comes after its log was read, and before its start is in the log. So it counts, and it has to know."""
    groups = await publish_groups(bus, 0)
    await bus.publish(BatchReady(incarnation=1, step=0, groups=groups))
    published = Bus.publish

    async def publish(self: Bus, message: Message) -> int:
        if isinstance(message, TrainerStarted):
            lost = PayloadsMissing(step=0, incarnation=0, start="first", groups=groups[:1], reason="gone")
            await published(self, lost)
        return await published(self, message)

    monkeypatch.setattr(Bus, "publish", publish)
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced)
        await make_again(bus, 0, groups)
        events = await said_until(bus, WeightsAnnounced, 2)
    (trained,) = of(events, BatchTrained)
    assert trained.num_groups == len(groups)
    assert names(events)[-2:] == ["BatchTrained", "WeightsAnnounced"]


async def test_steps_that_no_checkpoint_and_no_batch_holds_any_more_end_the_trainer(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    """It would wait for ever: the log says that a later checkpoint has them, and that one is gone."""
    await publish_batch(bus, 0)
    trained = BatchTrained(step=0, incarnation=1, num_groups=3, num_samples=12, num_tokens=60, metrics={})
    for event in (trained, CheckpointSaved(step=1, incarnation=1, path="", oldest_step=1, took_s=0.0)):
        await bus.publish(event)
    (error,) = await errors_of(topology, bus, tmp_path / "run")
    assert "contains 0 train steps, but the log no longer has the batch of step 1" in str(error)


def asked(step: int) -> CheckpointRequested:
    return CheckpointRequested(step=step, stream="data", used=0.7)


async def test_a_checkpoint_that_is_asked_for_is_saved_while_the_trainer_waits_and_once(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 0)
        await said_until(bus, WeightsAnnounced, 2)
        await bus.publish(asked(1))
        await said_until(bus, CheckpointSaved)
        for step in (0, 1):  # at or below the one that was saved
            await bus.publish(asked(step))
        await publish_batch(bus, 1)
        events = await said_until(bus, WeightsAnnounced, 3)
    assert names(events)[-5:] == [
        "BatchTrained", "WeightsAnnounced", "CheckpointSaved", "BatchTrained", "WeightsAnnounced",
    ]  # fmt: skip
    assert of(events, CheckpointSaved)[0].step == 1


async def test_a_checkpoint_that_was_asked_for_during_a_step_is_saved_after_it(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced)
        await bus.publish(asked(1))  # by a buffer that knows of the step's end first
        await publish_batch(bus, 0)
        events = await said_until(bus, CheckpointSaved)
    assert names(events)[-3:] == ["BatchTrained", "WeightsAnnounced", "CheckpointSaved"]
    assert of(events, CheckpointSaved)[0].step == 1


async def test_a_checkpoint_that_was_asked_for_before_a_crash_is_saved_when_the_lost_steps_are_trained_again(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    async with running(topology, bus, tmp_path / "run"):
        for step in range(2):
            await publish_batch(bus, step)
        await said_until(bus, WeightsAnnounced, 3)
    await bus.publish(asked(2))
    last_seq = await end_of_log(bus)
    async with running(topology, bus, tmp_path / "run"):
        events = await said_until(bus, CheckpointSaved, from_seq=last_seq + 1)
    assert names(events) == ["TrainerStarted", "BatchTrained", "BatchTrained", "WeightsAnnounced", "CheckpointSaved"]
    assert (of(events, TrainerStarted)[0].step, of(events, CheckpointSaved)[0].step) == (0, 2)


async def test_a_trainer_says_which_batch_it_waits_for(topology: Topology, bus: Bus, tmp_path: Path) -> None:
    async def told(beginning: str) -> None:
        with anyio.fail_after(200):
            while True:
                answer = await bus.call("trainer", StatsRequested(), StatsGiven, timeout_s=40.0)
                if answer.waits_for.startswith(beginning):
                    return

    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 0)
        await said_until(bus, WeightsAnnounced, 2)
        await told("batch 1, for ")
        groups = await publish_groups(bus, 1)
        await bus.publish(BatchReady(incarnation=1, step=1, groups=(replace(groups[0], event_seq=1), *groups[1:])))
        await told("batch 1, which is assembled again because some of its payloads are lost, for ")
        for step in (1, 2):
            await publish_batch(bus, step)
        await told("nothing: all steps are trained, for ")
