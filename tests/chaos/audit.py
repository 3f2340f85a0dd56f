"""Invariants of a finished run's log, whichever processes were killed during the run."""

from collections import Counter
from collections.abc import Collection, Sequence
from random import Random

import msgspec

from messages import (
    ActorExited,
    ActorStarted,
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    GroupCompleted,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    RunFinished,
    SampleStatus,
    SegmentsPublished,
    SnapshotTaken,
    TrainerStarted,
    WeightsAnnounced,
    WeightsApplied,
    WeightsLost,
)
from runtime.bus.bus import Bus
from runtime.ledger.archive import history
from runtime.ledger.fold import FOLD_VERSION, LEDGER_EVENTS, Books, LedgerState, fold
from runtime.ledger.snapshots import content_of
from tests.chaos.harness import EVENTS_PER_STEP, Run
from tests.support.ledger_log import check_that_the_accountant_agrees

Log = Sequence[tuple[int, Message]]  # log sequence and event


async def audit(
    run: Run,
    *,
    killed: Sequence[str] | None = (),
    also: str | None = None,
    ordered: bool = True,
    repeats: Collection[int] = (),
) -> Books:
    """Read the whole log of a finished run from its store and check it. Return its final books.

    Args:
        run: The finished run.
        killed: Processes that were killed while their node daemon lived, in any order. None: unknown.
        also: Beginning of the reason for which other processes may have been killed, too.
        ordered: Whether the order of the data alone determines the groups of each batch: no filter, no over-sampling.
        repeats: Sequences of events that a test stored again. Only the check of the ledger includes them.
    """
    async with run.reopened() as bus:
        log = await read_all(bus, run)
        state = check_ledger(log)
        check_that_the_accountant_agrees(log)
        log = [(seq, event) for seq, event in log if seq not in repeats]
        check_the_end(log, run.num_steps)
        if killed is not None:
            check_kills(log, killed, also)
        check_batches(log, run)
        check_samples(log)
        check_line_of_training(log, run.num_steps)
        check_weights(log)
        check_evaluations(log, run)
        if ordered:
            check_order_of_the_data(log, state, run.topology.rollout.rollout_batch_size)
        await check_payloads(bus, log, state)
    return state.books()


async def killed_in_turn(run: Run, names: Sequence[str], moments: Random) -> Books:
    """Kill a process every two train steps, at a random event; let the run end, and audit its log."""
    async with run.started() as command:
        for number, name in enumerate(names, start=1):
            await command.log.until_trained(2 * number)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            await command.log.until_alive(name)
            command.log.kill(name)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    return await audit(run, killed=names)


async def read_all(bus: Bus, run: Run) -> Log:
    """Read every event of the run, including those in its archive."""
    async with history(bus, run.directory) as events:
        log = [(received.seq, received.message) async for received in events.so_far()]
    assert events.first_seq == 1, f"what was before event {events.first_seq} is lost"
    return log


def check_ledger(log: Log) -> LedgerState:
    """Check that the books close after every event, and that every snapshot equals the folded log."""
    state = LedgerState()
    states: dict[int, bytes] = {}
    snapshots = [event for _, event in log if isinstance(event, SnapshotTaken)]
    covered = {snapshot.covers for snapshot in snapshots}
    for seq, event in log:
        if not isinstance(event, LEDGER_EVENTS):
            continue
        fold(state, event, seq)
        assert state.books().closed, f"the books do not close after {seq} {event}: {state.books()}"
        if seq in covered:
            states[seq] = msgspec.json.encode(state)
    assert snapshots, "no snapshot was taken"
    for snapshot in snapshots:
        assert snapshot.fold_version == FOLD_VERSION
        if not snapshot.chunks:  # a large state is on the data plane, and may be purged
            content = msgspec.json.encode(content_of(snapshot))
            assert content == states[snapshot.covers], f"the snapshot at {snapshot.covers} is another state"
    return state


def check_the_end(log: Log, num_steps: int) -> None:
    """Check that the run finished once, with all steps and without dead letters."""
    (finished,) = [event for _, event in log if isinstance(event, RunFinished)]
    assert finished.steps == num_steps
    assert not [event for _, event in log if isinstance(event, MessageDeadLettered)]


def check_kills(log: Log, killed: Sequence[str], also: str | None = None) -> None:
    """Check that the killed processes died, no others unless for the reason `also`, and that each was restarted."""
    exits = [event for _, event in log if isinstance(event, ActorExited) and event.reason != "stopped"]
    others = [event for event in exits if also is not None and event.reason.startswith(also)]
    assert Counter(event.actor for event in exits if event not in others) == Counter(killed), exits
    restarts = Counter(event.actor for _, event in log if isinstance(event, ActorStarted) and event.restarts > 0)
    assert restarts == Counter(event.actor for event in exits)


def check_batches(log: Log, run: Run) -> None:
    """Check that each step has one batch, no group is in two, and each cites the completion of its attempt."""
    num_groups = run.num_steps * run.topology.rollout.rollout_batch_size
    completed = {seq: event for seq, event in log if isinstance(event, GroupCompleted)}
    batches = [event for _, event in log if isinstance(event, BatchReady)]
    assert [batch.step for batch in batches] == list(range(run.num_steps))
    refs = [ref for batch in batches for ref in batch.groups]
    assert len(refs) == len({ref.group_id for ref in refs}) == num_groups
    for ref in refs:
        group = completed[ref.event_seq]
        assert (group.group_id, group.attempt) == (ref.group_id, ref.attempt)


def check_samples(log: Log) -> None:
    """Check that each sample of a batch with tokens and a reward was trained, or is named as skipped."""
    completed = {seq: event for seq, event in log if isinstance(event, GroupCompleted)}
    batches: dict[int, BatchReady] = {}
    for seq, event in log:
        if isinstance(event, BatchReady):
            batches[event.step] = event
        if not isinstance(event, BatchTrained) or event.metrics.get("train/num_lost_groups"):
            continue
        groups = [completed[ref.event_seq] for ref in batches[event.step].groups]
        graded = {
            (group.group_id, sample.index, sample.part)
            for group in groups
            for sample in group.samples
            if sample.reward is not None and sample.segments and sample.status is not SampleStatus.FAILED
        }
        named = {(item.group_id, *place) for item in event.untrained for place in item.samples}
        assert named <= graded, f"{seq}: names samples that are in no batch: {named - graded}"
        assert event.num_samples == len(graded - named), f"{seq}: {event}"
        left = {group_id for group_id, _, _ in graded - named}
        assert set(event.skipped_groups) == {group_id for group_id, _, _ in named} - left, f"{seq}: {event}"


def check_line_of_training(log: Log, num_steps: int) -> None:
    """Check that the surviving trainers trained every step once.

    Each trainer must continue from its checkpoint, and mark replayed steps as replays.
    """
    saved, line, frontier, incarnation = {0}, 0, 0, 0
    sizes: dict[int, tuple[object, ...]] = {}
    for seq, event in log:
        match event:
            case TrainerStarted():
                assert event.step in saved or event.step == line, f"{seq}: there is no checkpoint of {event.step}"
                saved.add(event.step)  # the previous trainer may have died before it announced the checkpoint
                assert event.incarnation > incarnation, f"{seq}: incarnation {event.incarnation} came before"
                line, incarnation = event.step, event.incarnation
            case BatchTrained():
                assert (event.step, event.incarnation) == (line, incarnation), f"{seq}: {event}"
                assert event.replay == (event.step < frontier), f"{seq}: {event}"
                size = (event.num_groups, event.num_samples, event.num_tokens, event.untrained, event.skipped_groups)
                assert sizes.setdefault(event.step, size) == size, f"{seq}: replayed with another batch"
                line, frontier = line + 1, max(frontier, line + 1)
            case CheckpointSaved():
                assert event.step <= line, f"{seq}: {event}"  # a checkpoint is written while training continues
                saved.add(event.step)
            case _:
                pass
    assert line == num_steps


def check_weights(log: Log) -> None:
    """Check that versions rise and are never reused, and that every trainer computes the same weights for a step.

    Engines never go back to older weights while their rollout actor lives.
    """
    announcements = [event for _, event in log if isinstance(event, WeightsAnnounced)]
    announced = [event.version for event in announcements]
    assert announced == sorted(set(announced))
    checksums: dict[int, str] = {}
    for event in announcements:
        assert checksums.setdefault(event.step, event.checksum) == event.checksum, f"trained otherwise: {event}"
    applied: dict[str, int] = {}
    for seq, event in log:
        match event:
            case ActorStarted(actor=actor):
                applied.pop(actor, None)
            case WeightsApplied():
                assert event.version in announced
                assert event.version > applied.get(event.instance, 0), f"{seq}: {event}"
                applied[event.instance] = event.version
            case _:
                pass


def check_evaluations(log: Log, run: Run) -> None:
    """Check that each due evaluation ran once, on weights of its step, or on newer ones if those were lost."""
    announced = [event for _, event in log if isinstance(event, WeightsAnnounced)]
    steps = {event.version: event.step for event in announced}
    first = {event.version: event.again_of or event.version for event in announced}  # first version of these weights
    issued = [event for _, event in log if isinstance(event, EvalIssued)]
    ended = [event for _, event in log if isinstance(event, EvalEnded)]
    assert [event.step for event in issued] == evaluated_steps(run)
    assert [(event.step, event.version) for event in ended] == [(event.step, event.version) for event in issued]
    lost = {event.version for _, event in log if isinstance(event, WeightsLost)}
    for event, end in zip(issued, ended, strict=True):
        assert steps[event.version] == event.step
        counted = first_answers(log, event.step).values()
        versions = {v for answer in counted for s in answer.samples for v in (s.first_version, s.last_version)}
        newer = {version for version in versions if version is not None and first[version] != first[event.version]}
        assert max(newer, default=0) == end.newest_version, counted
        assert event.version in lost or {steps[version] for version in newer} <= {event.step}, counted


def first_answers(log: Log, step: int) -> dict[tuple[str, int], EvalCompleted]:
    """Return the first answer to each item, which alone counts.

    A restarted buffer requests items again whose answers it has not read, and a second answer may come late.
    """
    first: dict[tuple[str, int], EvalCompleted] = {}
    for _, event in log:
        if isinstance(event, EvalCompleted) and event.step == step:
            first.setdefault((event.set, event.item), event)
    return first


def evaluated_steps(run: Run) -> list[int]:
    """Train steps with an evaluation."""
    sets = run.topology.eval
    first = {0} if any(not item.skip_eval_before_train for item in sets) else set[int]()
    between = {step for item in sets for step in range(item.interval, run.num_steps, item.interval)}
    return sorted(first | between | ({run.num_steps} if sets else set()))


def check_order_of_the_data(log: Log, state: LedgerState, batch_size: int) -> None:
    """Check the batches of an undisturbed run: groups in order of issue, first attempts, weights of their step."""
    issued = [group for _, event in log if isinstance(event, GroupsIssued) for group in event.groups]
    assert all(group.prompt == group.group_id for group in issued), "prompts were not taken in their order"
    steps = {event.version: event.step for _, event in log if isinstance(event, WeightsAnnounced)}
    completed = {seq: event for seq, event in log if isinstance(event, GroupCompleted)}
    for batch in (event for _, event in log if isinstance(event, BatchReady)):
        first = batch.step * batch_size
        expected = [(group_id, 0) for group_id in range(first, first + batch_size)]
        assert [(ref.group_id, ref.attempt) for ref in batch.groups] == expected
        samples = [sample for ref in batch.groups for sample in completed[ref.event_seq].samples]
        versions = {version for sample in samples for version in (sample.first_version, sample.last_version)}
        assert {steps[version] for version in versions if version is not None} == {batch.step}
    books = state.books()
    assert books.issued == books.trained + books.skipped


async def check_payloads(bus: Bus, log: Log, state: LedgerState) -> None:
    """Check that all payloads needed to train on from a loadable checkpoint are stored."""
    completed = {seq: event for seq, event in log if isinstance(event, GroupCompleted)}
    groups = [completed[ref.event_seq] for batch in state.batches.values() for ref in batch.groups]
    for group in groups:
        for seq in {ref.seq for sample in group.samples for ref in sample.segments}:
            payload = await bus.fetch(SegmentsPublished, seq)
            assert payload.group_id == group.group_id
            assert payload.attempt <= group.attempt  # an earlier one, if the group was resumed
