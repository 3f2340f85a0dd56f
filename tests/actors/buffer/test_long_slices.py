"""With many groups nothing runs for long on the event loop: CPU time of the buffer's slices of work."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from actors.buffer.deciding.decide import MAX_CLOSED, Schedule, decide
from actors.buffer.storage.pressure import makes_room_later
from actors.buffer.storage.trimming import needs_of
from actors.registry import hosted
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    GroupAborted,
    GroupsClosed,
    GroupsIssued,
    IssuedGroup,
    Message,
    Plane,
    RoundHalted,
    SnapshotTaken,
    TrainerStarted,
)
from runtime.bus.bus import Bus
from runtime.ledger.fold import PART, LedgerState, fold, fold_in_parts
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.buffer import MODEL, complete
from tests.support.loop_watch import BOUND_S, watching_loop
from tests.support.rollout import announcement, next_event

MANY = 60_000  # groups in flight
NUM_ISSUED = 8_192  # groups of one issue on a real bus


def issue_of(first: int, number: int, attempt: int = 0) -> GroupsIssued:
    groups = tuple(IssuedGroup(group_id=first + i, attempt=attempt, prompt=first + i) for i in range(number))
    return GroupsIssued(incarnation=1, round=0, min_version=1, groups=groups, num_samples=8)


def aborted(group_id: int, attempt: int = 0) -> GroupAborted:
    return GroupAborted(group_id=group_id, attempt=attempt, round=0, lease="l", instance="r", samples=())


def folded(events: Sequence[Message]) -> LedgerState:
    state = LedgerState()
    for seq, event in enumerate(events, 1):
        fold(state, event, seq)
    return state


@pytest.mark.parametrize("number", [0, 1, PART - 1, PART, PART + 1, 3 * PART + 7])
def test_an_issue_folded_in_parts_gives_the_same_state(number: int) -> None:
    """New groups, and groups that are issued again."""
    before = [TrainerStarted(incarnation=1, step=0), issue_of(0, 40), *(aborted(group_id) for group_id in range(20))]
    groups = issue_of(0, 20, attempt=1).groups + issue_of(40, number).groups
    event = msgspec.structs.replace(issue_of(0, 0), groups=groups)
    whole, state = folded([*before, event]), folded(before)
    num_parts = sum(1 for _ in fold_in_parts(state, event, len(before) + 1))
    assert msgspec.json.encode(state) == msgspec.json.encode(whole)
    assert state.index.rounds == whole.index.rounds
    assert num_parts == (len(groups) - 1) // PART
    assert not list(fold_in_parts(state, event, len(before) + 1))  # a duplicate changes nothing
    assert msgspec.json.encode(state) == msgspec.json.encode(whole)


def least_s(work: Callable[[], object]) -> float:
    """CPU seconds of some work, the least of three runs."""
    took_s = list[float]()
    for _ in range(3):
        begin = time.thread_time()
        work()
        took_s.append(time.thread_time() - begin)
    return min(took_s)


@pytest.mark.slow
def test_no_decision_and_no_event_looks_at_all_groups() -> None:
    state = folded([TrainerStarted(incarnation=1, step=0), announcement(1), issue_of(0, MANY)])
    schedule = Schedule(num_steps=9, rollout_batch_size=256, over_sampling_batch_size=MANY)
    seq = state.last_seq
    gc.collect()
    gc.disable()
    try:
        assert least_s(lambda: needs_of(state, seq)) < BOUND_S
        assert least_s(lambda: makes_room_later(state, checkpoint_requested=False)) < BOUND_S
        assert least_s(lambda: decide(state, schedule)) < BOUND_S
        begin = time.thread_time()
        fold(state, announcement(2), seq + 1)
        assert time.thread_time() - begin < BOUND_S
    finally:
        gc.enable()
    assert state.version == 2


def test_many_groups_are_closed_by_several_events() -> None:
    number = 2 * MAX_CLOSED + 5
    events = [TrainerStarted(incarnation=1, step=0), announcement(1), issue_of(0, number)]
    state = folded([*events, RoundHalted(incarnation=1, round=0), *(aborted(group_id) for group_id in range(number))])
    schedule = Schedule(
        num_steps=9, rollout_batch_size=1, over_sampling_batch_size=1, on_halt="drop", max_barren_groups=2 * number
    )
    sizes = list[int]()
    while isinstance(event := decide(state, schedule), GroupsClosed):
        sizes.append(len(event.group_ids))
        fold(state, event, state.last_seq + 1)
    assert sizes == [MAX_CLOSED, MAX_CLOSED, 5]
    assert not state.groups


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": str(number), "label": "1"}) + "\n" for number in range(64)))
    data = [{"name": "d", "path": str(path), "rm_type": "exact_match"}]
    rollout = {"rollout_batch_size": 64, "over_sampling_batch_size": NUM_ISSUED, "dynamic_filter": "nonzero_std"}
    return topology_with(model={"hf_checkpoint": str(MODEL)}, data=data, rollout=rollout)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_buffer_with_many_groups_does_not_hold_up_its_event_loop(bus: Bus, topology: Topology) -> None:
    """Issue, tasks, a batch, its training, a checkpoint with a snapshot, and new weights."""
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, Path())])
        gc.collect()
        with watching_loop() as watch:
            await bus.publish(TrainerStarted(incarnation=1, step=0))
            await bus.publish(announcement(1))
            await next_event(bus, GroupsIssued)
            await eventually(lambda: num_tasks(bus, NUM_ISSUED))
            for group_id in range(64):
                await complete(bus, group_id)
            await next_event(bus, BatchReady)
            await bus.publish(
                BatchTrained(step=0, incarnation=1, num_groups=64, num_samples=128, num_tokens=9, metrics={})
            )
            await bus.publish(announcement(2, step=1))
            await bus.publish(CheckpointSaved(step=1, incarnation=1, path="p", oldest_step=0, took_s=0.0))
            await next_event(bus, SnapshotTaken)
        group.cancel_scope.cancel()
    assert watch.num_runs > NUM_ISSUED
    assert watch.over() == []


async def num_tasks(bus: Bus, number: int) -> bool:
    return (await bus.state(Plane.WORK)).messages >= number
