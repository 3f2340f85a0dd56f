"""Audit of a simulated run: its books close, twice counted; what was trained is what the ledger says; nothing leaks."""

from types import SimpleNamespace
from typing import Any

import msgspec

from messages import GroupCompleted, Message, Plane, RolloutRequested, SnapshotTaken, decode
from messages.subjects import stream_of
from runtime.ledger.books import LedgerReport
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.snapshots import content_of
from tests.chaos.audit import (
    Log,
    check_batches,
    check_evaluations,
    check_line_of_training,
    check_samples,
    check_the_end,
)
from tests.simulate.consumers import Consumer
from tests.simulate.world import RUN, Broken, World
from tests.support.ledger_log import check_that_the_accountant_agrees


def audit(world: World) -> None:
    """Check a run that has ended.

    Raises:
        Broken: something is wrong.
    """
    log = world.log()
    num_steps = world.recipe.num_steps
    run: Any = SimpleNamespace(num_steps=num_steps, topology=world.topology)
    try:
        state = check_ledger(log)
        check_that_the_accountant_agrees(log)
        check_the_end(log, num_steps)
        check_evaluations(log, run)
        check_leases(world, log)
        if not world.lost_payloads:  # batches are made again then, and a replayed step may lack groups
            check_batches(log, run)
            check_samples(log)
            check_line_of_training(log, num_steps)
            check_weights(world, log)
            check_payloads(world, log, state)
    except AssertionError as error:
        raise Broken(f"audit: {str(error)[:2000]}") from error


def check_ledger(log: Log) -> LedgerState:
    """Check that the books close after every event, and that every snapshot is the folded log."""
    state, states = LedgerState(), dict[int, bytes]()
    snapshots = [event for _, event in log if isinstance(event, SnapshotTaken)]
    covered = {snapshot.covers for snapshot in snapshots}
    for seq, event in log:
        if not isinstance(event, LEDGER_EVENTS):
            continue
        fold(state, event, seq)
        assert state.books().closed, f"the books do not close after {seq} {event}: {state.books()}"
        if seq in covered:
            states[seq] = msgspec.json.encode(state)
    for snapshot in snapshots:
        if not snapshot.chunks:
            content = msgspec.json.encode(content_of(snapshot))
            assert content == states[snapshot.covers], f"the snapshot at {snapshot.covers} is another state"
    return state


def check_weights(world: World, log: Log) -> None:
    """Check that the last checkpoint's weights were trained on the groups that the ledger says, step by step."""
    report = LedgerReport()
    for seq, event in log:
        report.take(event, seq)
    (steps, _), line = max(world.disk.checkpoints.items())
    assert steps == world.recipe.num_steps, f"the last checkpoint has {steps} steps"
    told = {step: sorted(groups) for step, groups in report.summary("run", live=False).trained if groups}
    trained = {step: sorted(groups) for step, groups in line}
    assert trained == told, f"the weights were trained on {trained}, the ledger says {told}"


def check_payloads(world: World, log: Log, state: LedgerState) -> None:
    """Check that no payload is purged that a batch in the books cites."""
    stored = world.server.streams[stream_of(RUN, Plane.DATA)].messages
    completed = {seq: event for seq, event in log if isinstance(event, GroupCompleted)}
    for batch in state.batches.values():
        for ref in batch.groups:
            cited = {part.seq for sample in completed[ref.event_seq].samples for part in sample.segments}
            assert cited <= stored.keys(), f"group {ref.group_id} cites payloads that are gone: {cited - stored.keys()}"


def check_leases(world: World, log: Log) -> None:
    """Check that every task which is still queued or held belongs to a group that is open."""
    state = LedgerState()
    for seq, event in log:
        if isinstance(event, LEDGER_EVENTS):
            fold(state, event, seq)
    work = world.server.streams[stream_of(RUN, Plane.WORK)]
    for message in work.messages.values():
        task: Message = decode(message.data, message.headers)
        if isinstance(task, RolloutRequested):
            group = state.groups.get(task.group_id)
            is_open = group is not None and group.attempt == task.attempt
            assert is_open, f"the task of group {task.group_id}, attempt {task.attempt}, is left: {group}"
    for consumer in work.followers.values():
        if isinstance(consumer, Consumer):
            assert consumer.unacked.keys() <= work.messages.keys(), f"{consumer.name} holds tasks that are gone"
