"""Where a trainer begins in a log whose older part was archived."""

from pathlib import Path

import anyio
import pytest

from actors.buffer.storage.trimming import LANDMARKS, Landmarks, needs_of, trim_point
from actors.trainer.data.feed import Feed
from messages import BatchReady, BatchTrained, GroupRef, Plane, TrainerStarted, WeightsAnnounced
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost
from runtime.ledger.fold import FOLD_VERSION, LEDGER_EVENTS, LedgerState, fold
from runtime.process.actor import InputError
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.actors.trainer.hosting import names, of, running, said_until
from tests.actors.trainer.logs import publish_batch, publish_groups
from tests.build.events import snapshot
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]


@pytest.fixture
def topology(make_topology: MakeTopology) -> Topology:
    return make_topology(train={"num_steps": 5, "save_interval": 2})


async def take_snapshot(bus: Bus, *, fold_version: int = FOLD_VERSION) -> tuple[LedgerState, int]:
    """Fold the log and publish what it says, as the buffer does; return that and what it covers."""
    state = LedgerState()
    async with bus.read(*LEDGER_EVENTS) as events:
        async for received in events.so_far():
            fold(state, received.message, received.seq)
    await bus.publish(snapshot(state, fold_version=fold_version))
    return state, state.last_seq


async def trim(bus: Bus, state: LedgerState, covers: int) -> int:
    """Purge what the buffer would."""
    landmarks = Landmarks()
    async with bus.read(*LANDMARKS) as events:
        async for received in events.so_far():
            landmarks.take(received.message, received.seq)
    below_seq = trim_point(needs_of(state, covers), landmarks)
    await bus.purge(Plane.EVENT, below_seq=below_seq)
    return below_seq


@pytest.mark.parametrize("trimmed", [True, False])
async def test_a_restart_goes_on_from_a_snapshot_as_it_would_from_the_whole_log(
    topology: Topology, bus: Bus, tmp_path: Path, trimmed: bool
) -> None:
    """Three steps are trained, two are in the checkpoint; the groups of the fourth are complete, in no batch yet."""
    async with running(topology, bus, tmp_path / "run"):
        for step in range(3):
            await publish_batch(bus, step)
        first = await said_until(bus, WeightsAnnounced, 4)
    groups = await publish_groups(bus, 3)  # complete, in no batch yet
    if trimmed:
        below_seq = await trim(bus, *await take_snapshot(bus))
        assert 1 < below_seq <= groups[0].event_seq
    await bus.publish(BatchReady(incarnation=1, step=3, groups=groups))
    last_seq = (await bus.state(Plane.EVENT)).last_seq
    async with running(topology, bus, tmp_path / "run"):
        second = await said_until(bus, WeightsAnnounced, 2, from_seq=last_seq + 1)
    assert names(second) == ["TrainerStarted", "BatchTrained", "WeightsAnnounced", "BatchTrained", "WeightsAnnounced"]
    (started,) = of(second, TrainerStarted)
    assert (started.incarnation, started.step) == (2, 2)
    assert [(event.step, event.replay) for event in of(second, BatchTrained)] == [(2, True), (3, False)]
    assert [(event.version, event.step) for event in of(second, WeightsAnnounced)] == [(5, 3), (6, 4)]
    lost, replayed = of(first, BatchTrained)[2].metrics, of(second, BatchTrained)[0].metrics
    assert {name: replayed[name] for name in lost if not name.startswith("perf/")} == {
        name: value for name, value in lost.items() if not name.startswith("perf/")
    }
    assert of(second, WeightsAnnounced)[0].checksum == of(first, WeightsAnnounced)[3].checksum


async def caught_up(feed: Feed) -> Feed:
    async with anyio.create_task_group() as group:
        group.start_soon(feed.run)
        with anyio.fail_after(200):
            await feed.caught_up.wait()
        group.cancel_scope.cancel()
    return feed


async def test_a_snapshot_of_another_fold_is_passed_over(bus: Bus) -> None:
    await publish_batch(bus, 0)
    await take_snapshot(bus, fold_version=FOLD_VERSION + 1)
    feed = await caught_up(Feed(bus))
    assert (feed.history.covered, feed.history.batches.keys()) == (0, {0})


async def test_a_snapshot_that_can_be_used_is_waited_for_after_a_change_of_the_fold(bus: Bus) -> None:
    await publish_batch(bus, 0)
    state, covers = await take_snapshot(bus, fold_version=FOLD_VERSION - 1)
    await bus.purge(Plane.EVENT, below_seq=3)
    feed = Feed(bus)
    async with anyio.create_task_group() as group:
        group.start_soon(feed.run)
        await bus.publish(snapshot(state, incarnation=2))
        with anyio.fail_after(200):
            await feed.caught_up.wait()
        group.cancel_scope.cancel()
    assert (feed.history.covered, feed.history.batches.keys()) == (covers, {0})


async def test_a_log_without_its_beginning_and_without_a_snapshot_of_it_is_refused(bus: Bus) -> None:
    await publish_batch(bus, 0)
    await take_snapshot(bus, fold_version=FOLD_VERSION + 1)
    await bus.purge(Plane.EVENT, below_seq=3)
    with pytest.raises(ExceptionGroup) as caught:
        await caught_up(Feed(bus, snapshot_timeout_s=0.2))
    (error,) = flatten(caught.value)
    assert isinstance(error, InputError)
    assert "the event log begins at event 3" in str(error)


async def test_a_completed_group_that_comes_slowly_is_not_lost(bus: Bus) -> None:
    ref, gone = await publish_groups(bus, 0), GroupRef(group_id=9, attempt=0, event_seq=1)
    await bus.purge(Plane.EVENT, below_seq=2)
    feed = Feed(bus, event_timeout_s=0.0)
    assert (await feed._completed(ref[0])).group_id == 0
    with pytest.raises(PayloadLost, match="no completed group at 1"):
        await feed._completed(gone)


async def test_a_log_that_is_trimmed_while_a_trainer_starts_is_read_again_from_the_newer_snapshot(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_batch(bus, 0)
    older, _ = await take_snapshot(bus)
    await bus.publish(TrainerStarted(incarnation=4, step=0))
    await bus.publish(WeightsAnnounced(version=7, step=0, incarnation=4, path="", checksum="", size_bytes=0))
    newer, covers = await take_snapshot(bus)
    await bus.purge(Plane.EVENT, below_seq=covers + 1)
    feed = Feed(bus)
    found = [older, newer]

    async def newest_snapshot(_: Bus) -> LedgerState:
        return found.pop(0)

    monkeypatch.setattr("actors.trainer.data.feed.newest_snapshot", newest_snapshot)
    await caught_up(feed)
    assert (feed.history.incarnation, feed.history.version, feed.history.covered) == (4, 7, newer.last_seq)
    assert found == []


async def test_payloads_are_kept_until_their_batch_is_released(bus: Bus) -> None:
    await publish_batch(bus, 0)
    feed = await caught_up(Feed(bus))
    fed = await feed.batch(0)
    await bus.purge(Plane.DATA, below_seq=(await bus.state(Plane.DATA)).last_seq + 1)
    again = await feed.batch(0)
    assert (fed.lost, again.lost) == ((), ())
    assert fed.batch is not None
    feed.release(fed.refs)
    assert (await feed.batch(0)).lost == fed.refs
    assert len(fed.batch.tokens_N) == fed.batch.lengths_B.sum()  # the batch has its own copy
