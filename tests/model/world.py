"""A small run as one state: the folded log, and what every actor would do next. Pure.

The state is decoded from bytes before each action and encoded after it, so each state is also a buffer that restarted
there. Sequences of the log and of the data stream are numbered anew after each action, in their order: only their order
decides anything. Two histories that differ in nothing that anybody may still read are one state.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from actors.buffer.deciding.decide import Schedule, decide, halt_by_hand
from actors.buffer.deciding.selection import Chosen, Selection
from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointSaved,
    EvalCompleted,
    EvalIssued,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsIssued,
    Message,
    Outcome,
    PayloadsMissing,
    RoundHalted,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SegmentsSpilled,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.ledger.changes import Change, Closed
from runtime.ledger.fold import LedgerState, fold
from runtime.ledger.steps import Settled

KEPT_CHECKPOINTS = 2
NO_FAULT = frozenset({"decide", "complete", "keep", "item", "trainer"})  # actions of a run in which nothing goes wrong

Action = tuple[str, int]  # what happens, and to which group, item or trainer
Point = Literal["announce", "wait", "trained", "missing", "announce again", "write", "saved"]
Line = dict[int, tuple[int, ...]]  # groups that weights were trained on, by step


class Faults(msgspec.Struct, kw_only=True):
    """How often each may still happen."""

    fail: int = 0  # an attempt cannot succeed
    spill: int = 0  # a rollout actor stores tokens, dies, and the task comes again
    late: int = 0  # an end of an attempt is published again
    drop: int = 0  # a filter drops a group
    lose: int = 0  # payloads of a batch are gone
    die: int = 0  # the trainer is killed
    damage: int = 0  # and its newest checkpoint is damaged
    freeze: int = 0  # the trainer is replaced and does not know it
    at_once: int = 0  # and its successor has the same incarnation
    restart: int = 0  # the buffer is replaced
    halt: int = 0  # a person halts the round


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is explored: a recipe and its faults."""

    name: str
    schedule: Schedule
    faults: Faults
    verdicts: bool = False  # whether there is a filter
    save_interval: int = 1


class Trainer(msgspec.Struct):
    """One start of the trainer: where it is in its work, and its next fact's content."""

    incarnation: int
    start: str
    step: int
    line: Line
    frontier: int
    version: int
    point: Point
    oldest: int = 0  # step of the oldest checkpoint when it wrote one
    missing: tuple[GroupRef, ...] = ()

    @property
    def who(self) -> dict[str, Any]:
        return {"incarnation": self.incarnation, "start": self.start}


class Batched(msgspec.Struct):
    """A batch as the trainer reads it: its groups, and the lowest data message of each."""

    groups: tuple[GroupRef, ...]
    payloads: tuple[int, ...]


class World(msgspec.Struct):
    """The folded log and everybody who writes it."""

    state: LedgerState
    faults: Faults
    trainer: Trainer
    tasks: dict[int, tuple[int, int]] = {}  # attempt and round by group
    unjudged: list[tuple[int, int, int]] = []  # group, attempt, log sequence
    ended: list[tuple[int, int, int, int]] = []  # group, attempt, round, data sequence, while an end may come late
    items: list[tuple[int, int, int]] = []  # step, version, item
    payload: dict[int, int] = {}  # data sequence of the newest completion, by group
    batches: dict[int, Batched] = {}
    checkpoints: dict[int, Line] = msgspec.field(default_factory=lambda: {0: {}})
    frozen: list[Trainer] = []
    trained: dict[int, int] = {}  # groups that the ledger counts as trained, with their steps
    halted: int = -1
    data_seq: int = 0
    starts: int = 0


class Broken(AssertionError):
    """A law does not hold in a state."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(World)


def encoded(world: World) -> bytes:
    """Return the state as bytes, equal for equal states."""
    _number_anew(world)
    return _ENCODER.encode(world)


def decoded(key: bytes) -> World:
    """Return a copy of a state that may be changed."""
    return _DECODER.decode(key)


def first(setup: Setup) -> tuple[World, list[Message]]:
    """Return the state in which buffer and trainer have just started, and the log so far."""
    world = World(state=LedgerState(), faults=msgspec.structs.replace(setup.faults), trainer=_no_trainer())
    events = _add(world, BufferStarted(incarnation=1, verdicts=setup.verdicts))
    return world, [*events, *_start_trainer(world, at_once=False, damaged=False)]


def next_decision(world: World, setup: Setup) -> Message | None:
    """Return what the buffer appends next. A user's function chooses the oldest groups."""
    decision = decide(world.state, setup.schedule)
    if isinstance(decision, Selection):
        ids = tuple(sorted(group.group_id for group in decision.groups)[: decision.count])
        decision = decide(world.state, setup.schedule, Chosen(kind=decision.kind, group_ids=ids))
        assert not isinstance(decision, Selection)
    return decision


def actions(world: World, *, decides: bool) -> Iterator[Action]:
    """Yield all that may happen next; `decides` says whether the buffer has a decision."""
    faults, state = world.faults, world.state
    if decides:
        yield "decide", 0
    for group_id, (_, round) in world.tasks.items():
        yield "complete", group_id
        if round <= world.halted:
            yield "abort", group_id
        if faults.fail:
            yield "fail", group_id
        if faults.spill:
            yield "spill", group_id
    for number in range(len(world.unjudged)):
        yield "keep", number
        if faults.drop:
            yield "drop", number
    if faults.late:
        yield from (("late", number) for number in range(len(world.ended)))
    yield from (("item", number) for number in range(len(world.items)))
    for number, trainer in enumerate((world.trainer, *world.frozen)):
        if trainer.point != "wait" or trainer.step in world.batches:
            yield "trainer", number
        if number:
            yield "fenced", number
    if faults.lose and world.trainer.point == "wait" and world.trainer.step in world.batches:
        yield "lose", 0
    if faults.die:
        yield "die", 0
        if faults.damage and len(world.checkpoints) > 1:
            yield "die", 1
    if faults.freeze:
        yield "freeze", 0
        if faults.at_once:
            yield "freeze", 1
    if faults.restart and state.incarnation:
        yield "restart", 0
    if faults.halt and halt_by_hand(state) is not None:
        yield "halt", 0


def act(world: World, setup: Setup, action: Action) -> list[Message]:
    """Let something happen; return the events that it adds to the log. Raises Broken."""
    what, number = action
    match what:
        case "decide":
            decision = next_decision(world, setup)
            assert decision is not None
            return _add(world, decision)
        case "complete" | "abort" | "fail" | "spill":
            return _end_task(world, setup, what, number)
        case "keep" | "drop":
            group_id, attempt, seq = world.unjudged.pop(number)
            world.faults.drop -= what == "drop"
            spare = Outcome.SPARE if setup.schedule.keep_when_insufficient else Outcome.DROP
            outcome = Outcome.KEEP if what == "keep" else spare
            return _add(world, VerdictGiven(group_id=group_id, attempt=attempt, event_seq=seq, outcome=outcome))
        case "late":
            world.faults.late -= 1
            group_id, attempt, round, seq = world.ended.pop(number)
            return _add(world, _completed(group_id, attempt, round, (SegmentRef(seq=seq, position=0),), 1))
        case "item":
            step, version, item = world.items.pop(number)
            one = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5)
            return _add(
                world, EvalCompleted(step=step, set="e", item=item, version=version, instance="r", samples=(one,))
            )
        case "trainer":
            return _go_on(world, setup, (world.trainer, *world.frozen)[number])
        case "fenced":
            del world.frozen[number - 1]
            return []
        case "lose":
            world.faults.lose -= 1
            world.trainer.missing, world.trainer.point = world.batches[world.trainer.step].groups[:1], "missing"
            return []
        case "die":
            world.faults.die -= 1
            world.faults.damage -= number
            return _start_trainer(world, at_once=False, damaged=bool(number))
        case "freeze":
            world.faults.freeze -= 1
            world.faults.at_once -= number
            world.frozen.append(world.trainer)
            return _start_trainer(world, at_once=bool(number), damaged=False)
        case "restart":
            world.faults.restart -= 1
            return _add(world, BufferStarted(incarnation=world.state.incarnation + 1, verdicts=setup.verdicts))
        case _:
            world.faults.halt -= 1
            halt = halt_by_hand(world.state)
            assert halt is not None
            return _add(world, halt)


# what each action does


def _add(world: World, event: Message) -> list[Message]:
    """Put an event in the log; fold it, check the laws, and let those who follow the log know."""
    changes = fold(world.state, event, world.state.last_seq + 1)
    for change in changes:
        _check_change(world, change)
    if not world.state.books().closed:
        raise Broken(f"the books do not close: {world.state.books()}")
    match event:
        case GroupsIssued():
            for issued in event.groups:
                world.tasks[issued.group_id] = issued.attempt, event.round
        case RoundHalted():
            world.halted = event.round
        case BatchReady():
            if event.step in world.batches:
                raise Broken(f"step {event.step} gets a second batch")
            payloads = tuple(world.payload[ref.group_id] for ref in event.groups)
            world.batches[event.step] = Batched(event.groups, payloads)
        case EvalIssued():
            (size,) = event.sets
            world.items = [(event.step, event.version, item) for item in range(size.num_items)]
        case PayloadsMissing() if event.step in world.state.taken_back:
            world.batches.pop(event.step, None)
        case _:
            pass
    _check_payloads(world)
    return [event]


def _check_change(world: World, change: Change) -> None:
    if isinstance(change, Closed) and change.group.group_id in world.trained:
        raise Broken(f"group {change.group.group_id} is trained, and {change.reason}")
    if isinstance(change, Settled):
        for ref in change.groups:
            if world.trained.setdefault(ref.group_id, change.step) != change.step:
                raise Broken(f"group {ref.group_id} is in steps {world.trained[ref.group_id]} and {change.step}")


def _check_payloads(world: World) -> None:
    """Nothing is purged that a trainer may still read."""
    low = world.state.low_water()
    for step, batch in world.batches.items():
        if step >= min(world.checkpoints) and min(batch.payloads, default=low) < low:
            raise Broken(f"payloads below {low} may be purged, and step {step} needs {min(batch.payloads)}")


def _completed(group_id: int, attempt: int, round: int, refs: tuple[SegmentRef, ...], version: int) -> GroupCompleted:
    sample = SampleSummary(
        index=0,
        segments=refs,
        response_len=len(refs),
        first_version=version,
        last_version=version,
        status=SampleStatus.COMPLETED,
        reward=1.0,
    )
    return GroupCompleted(**_who(group_id, attempt, round), data="d", samples=(sample,))


def _who(group_id: int, attempt: int, round: int) -> dict[str, Any]:
    return {"group_id": group_id, "attempt": attempt, "lease": "l", "round": round, "instance": "r"}


def _end_task(world: World, setup: Setup, what: str, group_id: int) -> list[Message]:
    attempt, round = world.tasks.pop(group_id)
    who = _who(group_id, attempt, round)
    if what == "fail":
        world.faults.fail -= 1
        return _add(world, GroupFailed(**who, reason="poison"))
    carried = world.state.groups[group_id].carried if setup.schedule.on_halt == "resume" else ()
    version = min([world.state.version, *(sample.first_version or world.state.version for sample in carried)])
    world.data_seq += 1
    refs = *(ref for sample in carried for ref in sample.segments), SegmentRef(seq=world.data_seq, position=0)
    so_far = SampleSummary(
        index=0, segments=refs, response_len=len(refs), first_version=version, status=SampleStatus.ABORTED
    )
    if what == "spill":
        world.faults.spill -= 1
        world.tasks[group_id] = attempt, round
        return _add(world, SegmentsSpilled(**who, samples=(so_far,)))
    if what == "abort":
        return _add(world, GroupAborted(**who, samples=(so_far,) if setup.schedule.on_halt == "resume" else ()))
    world.payload[group_id] = min(ref.seq for ref in refs)
    if world.faults.late:
        world.ended.append((group_id, attempt, round, world.data_seq))
    events = _add(world, _completed(group_id, attempt, round, refs, version))
    if setup.verdicts:
        world.unjudged.append((group_id, attempt, world.state.last_seq))
    return events


# the trainer


def _no_trainer() -> Trainer:
    return Trainer(incarnation=0, start="", step=0, line={}, frontier=0, version=0, point="wait")


def _start_trainer(world: World, *, at_once: bool, damaged: bool) -> list[Message]:
    """Another trainer loads the newest undamaged checkpoint."""
    if damaged:
        del world.checkpoints[max(world.checkpoints)]
    world.starts += 1
    before, step = world.trainer, max(world.checkpoints)
    incarnation = before.incarnation + (not at_once)
    events = _add(world, TrainerStarted(incarnation=incarnation, start=f"s{world.starts}", step=step))
    frontier = world.state.trained_steps
    newest = max([trainer.version for trainer in (before, *world.frozen)])
    world.trainer = Trainer(
        incarnation=incarnation,
        start=f"s{world.starts}",
        step=step,
        line=dict(world.checkpoints[step]),
        frontier=frontier,
        version=newest,
        point="announce" if step >= frontier else "wait",
    )
    return events


def _has_done(trainer: Trainer, setup: Setup) -> bool:
    return trainer.step >= setup.schedule.num_steps


def _go_on(world: World, setup: Setup, trainer: Trainer) -> list[Message]:
    """A trainer says its next fact, or works until it has one."""
    match trainer.point:
        case "announce" | "announce again":
            trainer.version += 1
            fresh = trainer.point == "announce"
            trainer.point = "wait" if fresh and not _has_done(trainer, setup) else _after_step(trainer, setup)
            return _add(
                world,
                WeightsAnnounced(
                    **trainer.who, version=trainer.version, step=trainer.step, path="", checksum="", size_bytes=0
                ),
            )
        case "wait":
            groups = world.batches[trainer.step].groups
            trainer.line[trainer.step] = tuple(ref.group_id for ref in groups)
            trainer.step += 1
            trainer.point = "trained"
            if trainer is world.trainer:  # weights of a replaced one are never kept
                _check_line(trainer.line)
            return []
        case "trained":
            trainer.point = "announce again" if trainer.step >= trainer.frontier else _after_step(trainer, setup)
            done = BatchTrained(
                **trainer.who, step=trainer.step - 1, num_groups=1, num_samples=1, num_tokens=1, metrics={}
            )
            return _add(world, done)
        case "missing":
            lost, trainer.missing, trainer.point = trainer.missing, (), "wait"
            return _add(world, PayloadsMissing(**trainer.who, step=trainer.step, groups=lost, reason="purged"))
        case "write":  # the file is complete before its event; a replaced trainer never gets that far
            if trainer is world.trainer:
                saved = {**world.checkpoints, trainer.step: dict(trainer.line)}
                world.checkpoints = {step: saved[step] for step in sorted(saved)[-KEPT_CHECKPOINTS:]}
            trainer.oldest, trainer.point = min(world.checkpoints), "saved"
            return []
        case "saved":
            trainer.point = "wait"
            saved_step = CheckpointSaved(
                **trainer.who, step=trainer.step, path="", oldest_step=trainer.oldest, took_s=0
            )
            return _add(world, saved_step)


def _after_step(trainer: Trainer, setup: Setup) -> Point:
    return "write" if trainer.step % setup.save_interval == 0 or _has_done(trainer, setup) else "wait"


def _check_line(line: Line) -> None:
    groups = [group for of_step in line.values() for group in of_step]
    if len(groups) != len(set(groups)):
        raise Broken(f"one checkpoint line trains a group twice: {line}")


# numbers


def _number_anew(world: World) -> None:
    """Number log and data sequences by their order, without gaps. Zero means none in both."""
    state = world.state
    trainers = (world.trainer, *world.frozen)
    log = {group.event_seq for group in state.groups.values()} | {state.checkpoint_seq}
    log.update(ref.event_seq for batch in state.batches.values() for ref in batch.groups)
    log.update(seq for seqs in state.lost.values() for seq in seqs)
    log.update(seq for _, _, seq in world.unjudged)
    log.update(ref.event_seq for batch in world.batches.values() for ref in batch.groups)
    log.update(ref.event_seq for trainer in trainers for ref in trainer.missing)
    of_log = _ranks(log)
    data = {state.newest_payload, world.data_seq, *world.payload.values()}
    data.update(group.payload_seq for group in state.groups.values())
    data.update(batch.payload_seq for batch in state.batches.values())
    data.update(seq for batch in world.batches.values() for seq in batch.payloads)
    data.update(seq for *_, seq in world.ended)
    for group in state.groups.values():
        samples = (*group.carried, *(each.sample for each in (*group.spilled, *group.anew)))
        data.update(ref.seq for sample in samples for ref in sample.segments)
        data.update(ref.seq for each in (*group.spilled, *group.anew) for ref in each.segments)
    if state.evaluation is not None:
        data.add(state.evaluation.payload_seq)
    of_data = _ranks(data)

    def refs(groups: Iterable[GroupRef]) -> tuple[GroupRef, ...]:
        return tuple(msgspec.structs.replace(ref, event_seq=of_log[ref.event_seq]) for ref in groups)

    def segments(of_sample: Iterable[SegmentRef]) -> list[SegmentRef]:
        return [msgspec.structs.replace(ref, seq=of_data[ref.seq]) for ref in of_sample]

    def numbered(sample: SampleSummary) -> SampleSummary:
        return msgspec.structs.replace(sample, segments=tuple(segments(sample.segments)))

    for group in state.groups.values():
        group.event_seq, group.payload_seq = of_log[group.event_seq], of_data[group.payload_seq]
        group.carried = tuple(map(numbered, group.carried))
        for each in (*group.spilled, *group.anew):
            each.sample, each.segments = numbered(each.sample), segments(each.segments)
    for batch in state.batches.values():
        batch.groups, batch.payload_seq = refs(batch.groups), of_data[batch.payload_seq]
    for batched in world.batches.values():
        batched.groups, batched.payloads = refs(batched.groups), tuple(of_data[seq] for seq in batched.payloads)
    for trainer in trainers:
        trainer.missing = refs(trainer.missing)
    state.lost = {step: tuple(of_log[seq] for seq in seqs) for step, seqs in state.lost.items()}
    state.checkpoint_seq, state.newest_payload = of_log[state.checkpoint_seq], of_data[state.newest_payload]
    state.last_seq = len(of_log)
    if state.evaluation is not None:
        state.evaluation.payload_seq = of_data[state.evaluation.payload_seq]
    world.unjudged = [(group_id, attempt, of_log[seq]) for group_id, attempt, seq in world.unjudged]
    world.ended = [(*who, of_data[seq]) for *who, seq in world.ended] if world.faults.late else []
    world.payload = {group_id: of_data[seq] for group_id, seq in world.payload.items() if group_id in state.groups}
    world.data_seq = of_data[world.data_seq]
    kept = min(world.checkpoints)
    world.batches = {step: batch for step, batch in world.batches.items() if step >= kept}


def _ranks(numbers: set[int]) -> dict[int, int]:
    return {number: rank for rank, number in enumerate(sorted(numbers | {0}))}
