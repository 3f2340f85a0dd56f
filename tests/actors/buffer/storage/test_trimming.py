"""Trimming the log: what anybody needs to start is left, and the archive has the rest."""

import gzip
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.buffer.deciding.decide import EvalPlan, Schedule
from actors.buffer.ledger_log import LedgerLog
from actors.buffer.storage.trimming import WHOLE_LOG, Landmarks, Needs, needs_of, trim_point, with_earlier
from actors.registry import hosted
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    EvalIssued,
    GroupCompleted,
    GroupsIssued,
    LogTrimmed,
    Message,
    Outcome,
    Phase,
    PhaseChanged,
    Plane,
    PromptsLoaded,
    RoundHalted,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SnapshotTaken,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.ledger.archive import RunEvents, archived_events, archived_files
from runtime.ledger.books import LedgerReport
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, Stage, fold
from runtime.ledger.group_life import GroupLife
from runtime.ledger.snapshots import content_of
from runtime.process.actor import InputError
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.actors.buffer.test_whole_runs import World
from tests.build.events import snapshot
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually, segments
from tests.support.rollout import announcement, next_event

pytestmark = pytest.mark.anyio

MODEL = Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"
NUM_STEPS = 4


# what is needed


class TrimmedWorld(World):
    """A world whose log is trimmed after every snapshot."""

    def __init__(self, *args: Any) -> None:
        self.first_seq = 1
        self.landmarks = Landmarks()
        self.earlier = WHOLE_LOG
        super().__init__(*args)

    def add(self, event: Message) -> int:
        seq = super().add(event)
        self.landmarks.take(event, seq)
        if isinstance(event, SnapshotTaken):
            needs = needs_of(self.state, event.covers)
            point = trim_point(with_earlier(needs, self.earlier), self.landmarks)
            self.earlier = needs
            assert 0 < point <= seq
            self.first_seq = max(self.first_seq, point)
        if self.first_seq > 1:
            self.check_what_is_left()
        return seq

    def end_item(self) -> None:
        """An evaluation often lasts over several snapshots."""
        if self.random.random() < 0.05:
            super().end_item()

    def check_what_is_left(self) -> None:
        left = [(seq, event) for seq, event in enumerate(self.log, start=1) if seq >= self.first_seq]
        newest = [event for _, event in left if isinstance(event, SnapshotTaken)][-2:]
        assert len(newest) == 2  # where the newest cannot be read, the one before it leads to the same state
        for state in (content_of(newest[0]), content_of(newest[1])):
            assert state.last_seq + 1 >= self.first_seq
            for seq, event in left:
                fold(state, event, seq)
            assert msgspec.json.encode(state) == msgspec.json.encode(self.state)
        there = {seq for seq, _ in left}
        cited = [ref.event_seq for batch in state.batches.values() for ref in batch.groups]
        cited += [g.event_seq for g in state.groups.values() if g.stage in (Stage.COMPLETED, Stage.READY)]
        assert there.issuperset(cited)
        announced = [event.version for _, event in left if isinstance(event, WeightsAnnounced)]
        assert state.version in announced
        if state.evaluation is not None:
            assert state.evaluation.version in announced
            assert [event for _, event in left if isinstance(event, EvalIssued)]
        halted = max([event.round for _, event in left if isinstance(event, RoundHalted)], default=-1)
        in_flight = [group.round for group in state.groups.values() if group.stage is Stage.IN_FLIGHT]
        assert not [round for round in in_flight if halted < round <= state.halted_round]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), surplus=st.integers(0, 4), save_interval=st.sampled_from([1, 2]))
def test_what_a_starting_actor_looks_for_is_left_whatever_happened(seed: int, surplus: int, save_interval: int) -> None:
    schedule = Schedule(
        num_steps=9,
        rollout_batch_size=2,
        over_sampling_batch_size=2 + surplus,
        max_staleness=seed % 3,
        evals=(EvalPlan(name="e", interval=50 if seed % 2 else 2, num_items=2, skip_before_train=False),),
    )
    random = Random(seed)
    world = TrimmedWorld(schedule, random, save_interval)
    while not world.finished and len(world.log) < 2000:
        chance = random.random()
        if chance < 0.02:
            world.restart_buffer()
        elif chance < 0.6:
            world.decide()
        elif not world.act():
            world.decide()
    assert world.first_seq > 1


@pytest.mark.parametrize(
    ("needs", "point"),
    [
        (Needs(below=90, version=0, halt=False, evaluation=False), 90),
        (Needs(below=90, version=3, halt=False, evaluation=False), 70),
        (Needs(below=90, version=2, halt=False, evaluation=False), 40),
        (Needs(below=30, version=3, halt=False, evaluation=False), 30),
        (Needs(below=90, version=3, halt=True, evaluation=False), 50),
        (Needs(below=90, version=3, halt=True, evaluation=True), 45),
        (Needs(below=90, version=4, halt=False, evaluation=False), 0),  # not found: nothing is trimmed
    ],
)
def test_the_point_lies_below_every_landmark_that_is_needed(needs: Needs, point: int) -> None:
    landmarks = Landmarks()
    for seq, version in ((10, 1), (40, 2), (70, 3)):
        landmarks.take(announcement(version), seq)
    landmarks.take(EvalIssued(incarnation=1, step=1, version=2, sets=()), 45)
    landmarks.take(RoundHalted(incarnation=1, round=1), 50)
    assert trim_point(needs, landmarks) == point
    landmarks.take(PhaseChanged(phase=Phase.TRAIN, step=1, incarnation=1), 5)
    assert trim_point(needs, landmarks) == min(point, 5)  # who starts has to learn whose turn it is


# on a real bus


def topology_of(tmp_path: Path, *, trim_min_events: int, event_bytes: int | None = None) -> Topology:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": str(number), "label": "1"}) + "\n" for number in range(10)))
    return topology_with(
        model={"hf_checkpoint": str(MODEL)},
        data=[{"name": "d", "path": str(path), "rm_type": "exact_match"}],
        rollout={"dynamic_filter": "nonzero_std"},  # `complete` gives its verdicts
        train={"num_steps": NUM_STEPS},
        buffer={"trim_min_events": trim_min_events},
        bus={"event_bytes": event_bytes},
    )


@asynccontextmanager
async def buffer(bus: Bus, topology: Topology, run_dir: Path) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, run_dir)])
        yield
        group.cancel_scope.cancel()


async def complete(bus: Bus, group_id: int) -> None:
    samples = tuple(
        SampleSummary(
            index=index, status=SampleStatus.COMPLETED, reward=1.0, segments=(SegmentRef(seq=group_id + 1, position=0),)
        )
        for index in range(2)
    )
    who: dict[str, Any] = {"lease": "l", "round": 0, "instance": "rollout", "data": "d"}
    seq = await bus.publish(GroupCompleted(group_id=group_id, attempt=0, samples=samples, **who))
    await bus.publish(VerdictGiven(group_id=group_id, attempt=0, event_seq=seq, outcome=Outcome.KEEP))


async def play(bus: Bus, run_dir: Path, *, steps: range, trimmed: bool) -> None:
    """All that the other actors say; after each train step a checkpoint is saved."""
    if steps.start == 0:
        await bus.publish(announcement(1))
    for step in steps:
        await said(bus, run_dir, lambda event, step=step: isinstance(event, GroupsIssued) and event.round == step)
        for group_id in (2 * step, 2 * step + 1):
            await complete(bus, group_id)
        await said(bus, run_dir, lambda event, step=step: isinstance(event, BatchReady) and event.step == step)
        told: dict[str, Any] = {"num_groups": 2, "num_samples": 4, "num_tokens": 8, "metrics": {}}
        await bus.publish(BatchTrained(step=step, incarnation=1, **told))
        await bus.publish(announcement(step + 2, step=step + 1))
        done = step + 1
        saved = await bus.publish(CheckpointSaved(step=done, incarnation=1, path="", oldest_step=done, took_s=0))
        trims = trimmed and step > 0  # below the snapshot before the newest
        await next_event(bus, LogTrimmed if trims else SnapshotTaken, from_seq=saved)
    if steps.stop == NUM_STEPS:
        await next_event(bus, RunFinished)


async def said(bus: Bus, run_dir: Path, holds: Callable[[Message], bool]) -> None:
    """Wait for an event of which something holds, which may have been trimmed meanwhile."""

    async def is_there() -> bool:
        return any(holds(event) for _, event in await history_of(bus, run_dir))

    await eventually(is_there)


async def history_of(bus: Bus, run_dir: Path) -> list[tuple[int, Message]]:
    async with bus.read(buries=False) as events:
        return [(received.seq, received.message) async for received in RunEvents(events, run_dir).so_far()]


def life_of(group_id: int, log: list[tuple[int, Message]]) -> list[str]:
    life = GroupLife(group_id)
    return [type(event).__name__ for seq, event in log if life.take(event, seq) is not None]


async def first_seq(bus: Bus) -> int:
    return (await bus.state(Plane.EVENT)).first_seq


@pytest.fixture(params=[1, 10_000], ids=["trimmed", "whole"])
async def played(request: pytest.FixtureRequest, bus: Bus, tmp_path: Path) -> tuple[Bus, Path, bool]:
    """A run to its end, its buffer started again in the middle."""
    trimmed = request.param == 1
    topology = topology_of(tmp_path, trim_min_events=request.param)
    for steps in (range(2), range(2, NUM_STEPS)):
        async with buffer(bus, topology, tmp_path):
            await play(bus, tmp_path, steps=steps, trimmed=trimmed)
    return bus, tmp_path, trimmed


async def test_archive_and_log_tell_the_same_of_a_run_trimmed_or_not(played: tuple[Bus, Path, bool]) -> None:
    bus, run_dir, trimmed = played
    assert (await first_seq(bus) > 20) == trimmed
    log = await history_of(bus, run_dir)
    assert [seq for seq, _ in log] == list(range(1, len(log) + 1))
    report = LedgerReport()
    for seq, event in log:
        report.take(event, seq)
    assert report.first_seq == 1
    summary = report.summary("r", live=True)
    assert summary.trained == tuple((step, (2 * step, 2 * step + 1)) for step in range(NUM_STEPS))
    assert (summary.books.issued, summary.books.trained, summary.finished) == (8, 8, "all steps trained")
    life = ["GroupsIssued", "GroupCompleted", "VerdictGiven", "BatchReady", "BatchTrained"]
    assert life_of(0, log) == life_of(7, log) == life


async def test_a_snapshot_with_what_is_left_folds_to_the_state_of_the_whole_log(played: tuple[Bus, Path, bool]) -> None:
    bus, run_dir, _ = played
    whole, rest = LedgerState(), LedgerState()
    log = await history_of(bus, run_dir)
    left = [(seq, event) for seq, event in log if seq >= await first_seq(bus)]
    snapshots = [event for _, event in left if isinstance(event, SnapshotTaken)]
    rest = content_of(snapshots[-1])
    for state, events in ((whole, log), (rest, left)):
        for seq, event in events:
            if isinstance(event, LEDGER_EVENTS):
                fold(state, event, seq)
    assert msgspec.json.encode(rest) == msgspec.json.encode(whole)


async def test_a_line_of_the_archive_is_the_event_as_it_was(bus: Bus, tmp_path: Path) -> None:
    topology = topology_of(tmp_path, trim_min_events=1)
    subject = f"phy.{bus.run}.event.group.failed.1.1"
    await bus._store.put(subject, b"\xff no JSON", {})  # archived too, though nobody can read it
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(2), trimmed=True)
    (file,) = archived_files(tmp_path)
    lines = [json.loads(line) for line in gzip.open(file.path)]
    assert [line["seq"] for line in lines] == list(range(1, file.last_seq + 1))
    loaded = next(line for line in lines if line["type"] == "prompts_loaded")
    assert (loaded["event"]["type"], loaded["event"]["num_prompts"]) == ("prompts_loaded", 10)
    assert list(loaded) == ["seq", "time", "type", "event"]
    assert [line["seq"] for line in lines if "raw" in line] == [1]
    assert [received.seq for received in archived_events(tmp_path)] == list(range(2, file.last_seq + 1))
    trimmed, _ = await next_event(bus, LogTrimmed)
    assert isinstance(trimmed, LogTrimmed)
    assert (trimmed.below_seq, trimmed.num_events) == (file.last_seq + 1, file.last_seq)
    assert tmp_path / trimmed.path == file.path


async def test_a_purge_that_a_death_prevented_comes_with_the_next_start(bus: Bus, tmp_path: Path) -> None:
    """The checkpoint is in the log, and its payloads are still stored. A later checkpoint may be hours away."""
    topology = topology_of(tmp_path, trim_min_events=10_000)
    async with buffer(bus, topology, tmp_path):
        await bus.publish(announcement(1))
        await said(bus, tmp_path, lambda event: isinstance(event, GroupsIssued))
        for group_id in (0, 1):
            await bus.publish(segments(group_id))
            await complete(bus, group_id)
        await said(bus, tmp_path, lambda event: isinstance(event, BatchReady))
    told: dict[str, Any] = {"num_groups": 2, "num_samples": 4, "num_tokens": 8, "metrics": {}}
    await bus.publish(BatchTrained(step=0, incarnation=1, **told))
    await bus.publish(CheckpointSaved(step=1, incarnation=1, path="", oldest_step=1, took_s=0))
    state = LedgerState()
    for seq, event in await history_of(bus, tmp_path):
        if isinstance(event, LEDGER_EVENTS):
            fold(state, event, seq)
    await bus.publish(snapshot(state))  # the buffer ended after this one
    assert (await bus.state(Plane.DATA)).messages == 2
    async with buffer(bus, topology, tmp_path):

        async def is_purged() -> bool:
            return not (await bus.state(Plane.DATA)).messages

        await eventually(is_purged)


async def test_an_overlap_after_a_crash_before_the_purge_is_told_once(bus: Bus, tmp_path: Path) -> None:
    from runtime.ledger.archive import archive

    for number in range(1, 7):
        await bus.publish(announcement(number))
    await archive(bus, tmp_path, below_seq=4)  # and then it died
    path, num_events = await archive(bus, tmp_path, below_seq=6)
    assert num_events == 5
    (path.parent / "9.partial").write_bytes(b"half a fi")
    await bus.purge(Plane.EVENT, below_seq=5)
    assert [seq for seq, _ in await history_of(bus, tmp_path)] == [1, 2, 3, 4, 5, 6]


async def test_without_a_usable_snapshot_the_archive_is_folded(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = topology_of(tmp_path, trim_min_events=1)
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(2), trimmed=True)
    monkeypatch.setattr("runtime.ledger.snapshots.FOLD_VERSION", 99)
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(2, 3), trimmed=True)
    batches = [event for _, event in await history_of(bus, tmp_path) if isinstance(event, BatchReady)]
    assert [ref.group_id for batch in batches for ref in batch.groups] == list(range(6))


async def test_a_trimmed_log_without_its_archive_and_without_a_snapshot_is_refused(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = topology_of(tmp_path, trim_min_events=1)
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(2), trimmed=True)
    monkeypatch.setattr("runtime.ledger.snapshots.FOLD_VERSION", 99)
    with pytest.raises(ExceptionGroup) as failed:
        await host(bus, [hosted("buffer", topology, tmp_path / "elsewhere")])
    (error,) = flatten(failed.value)
    assert isinstance(error, InputError)
    assert "has no snapshot that this version can load" in str(error)


async def test_a_log_that_an_older_buffer_trims_meanwhile_is_not_taken_over(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever starts it again finds the older one's newer snapshot."""

    async def older(_: LedgerLog) -> None:
        for version in (1, 2):
            await bus.publish(announcement(version))
        await bus.purge(Plane.EVENT, below_seq=(await bus.state(Plane.EVENT)).last_seq)

    monkeypatch.setattr(LedgerLog, "load", older)
    with pytest.raises(ExceptionGroup) as caught, anyio.fail_after(200):
        await host(bus, [hosted("buffer", topology_of(tmp_path, trim_min_events=1), tmp_path)])
    (error,) = flatten(caught.value)
    assert "while it was read" in str(error)
    assert await bus.last_ledger_seq() == 0


async def test_changed_data_are_refused_after_their_fingerprint_was_trimmed(bus: Bus, tmp_path: Path) -> None:
    topology = topology_of(tmp_path, trim_min_events=1)
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(2), trimmed=True)
    async with bus.read(PromptsLoaded) as left:
        assert not left.pending
    (tmp_path / "prompts.jsonl").write_text('{"input": "7", "label": "2"}\n')
    with pytest.raises(ExceptionGroup) as failed:
        await host(bus, [hosted("buffer", topology, tmp_path)])
    (error,) = flatten(failed.value)
    assert "data d changed since this run began" in str(error)


async def test_a_folder_that_cannot_be_written_costs_the_trimming_only(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("in the way")
    async with buffer(bus, topology_of(tmp_path, trim_min_events=1), tmp_path):
        await play(bus, tmp_path, steps=range(NUM_STEPS), trimmed=False)
    assert await first_seq(bus) == 1
