"""Whole runs of the ledger's two functions, with every actor played by chance, its deaths included: each run ends."""

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.buffer.deciding.decide import EvalPlan, Schedule, decide, halt_by_hand
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
    RunFinished,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SegmentsSpilled,
    SnapshotTaken,
    TrainerStarted,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.ledger.fold import LedgerState, Stage, fold
from runtime.ledger.snapshots import content_of
from runtime.ledger.steps import Settled, TrainerFact
from tests.build.events import snapshot
from tests.support.ledger_log import check_that_a_restart_decides_the_same, check_that_the_accountant_agrees

MAX_EVENTS = 5000
KEPT_CHECKPOINTS = 2


Line = dict[int, tuple[GroupRef, ...]]  # the batches that weights were trained on, by step


class World:
    """The log and all who write it. Each `act` is something that one of them does next."""

    def __init__(self, schedule: Schedule, random: Random, save_interval: int, *, freezes: bool = True) -> None:
        self.schedule = schedule
        self.random = random
        self.save_interval = save_interval
        self.freezes = freezes  # whether a trainer may freeze, and be replaced before it goes on
        self.rejects = 0.9 if schedule.keep_when_insufficient else 0.2  # of what is judged
        self.log: list[Message] = []
        self.state = LedgerState()
        self.tasks: dict[int, tuple[int, int, tuple[SampleSummary, ...]]] = {}  # group: attempt, round, carried
        self.unjudged: list[tuple[int, int, int]] = []  # group, attempt, log sequence
        self.items: list[tuple[int, int, int]] = []  # step, version, item
        self.halted = -1
        self.data_seq = 0
        self.batches: dict[int, BatchReady] = {}
        self.checkpoints: dict[int, Line] = {0: {}}  # by step
        self.starts = self.incarnation = 0
        self.frozen: list[Trainer] = []  # replaced, and they do not know it yet
        self.trained: dict[int, int] = {}  # groups that the ledger counts as trained, with their steps
        self.finished = False
        self.start_trainer()

    def record(self, event: Message) -> int:
        """Put an event in the log and fold it."""
        self.log.append(event)
        seq = len(self.log)
        for change in fold(self.state, event, seq):
            if isinstance(change, Settled):
                self.trained |= {ref.group_id: change.step for ref in change.groups}
        assert self.state.books().closed, event
        check_that_a_restart_decides_the_same(self.state, self.schedule)
        return seq

    def add(self, event: Message) -> int:
        """Put an event in the log; fold it, and let those who follow the log know."""
        seq = self.record(event)
        match event:
            case GroupsIssued():
                for issued in event.groups:
                    group = self.state.groups[issued.group_id]
                    self.tasks[issued.group_id] = (issued.attempt, event.round, group.carried)
            case RoundHalted():
                self.halted = event.round
            case BatchReady():
                assert event.step not in self.batches
                assert len(event.groups) == self.schedule.rollout_batch_size
                self.batches[event.step] = event
            case EvalIssued():
                (size,) = event.sets
                self.items = [(event.step, event.version, item) for item in range(size.num_items)]
            case PayloadsMissing() if event.step in self.state.taken_back:
                self.batches.pop(event.step, None)
            case RunFinished():
                self.finished = True
            case _:
                pass
        self.check_payloads()
        return seq

    def check_payloads(self) -> None:
        """Nothing is purged that somebody may still read."""
        low = self.state.low_water()
        for group in self.state.groups.values():
            assert all(ref.seq >= low for sample in group.carried for ref in sample.segments)
        for step in range(min(self.checkpoints), self.state.round):
            for ref in self.batches[step].groups if step in self.batches else ():
                completed = self.log[ref.event_seq - 1]
                assert isinstance(completed, GroupCompleted)
                assert all(cited.seq >= low for sample in completed.samples for cited in sample.segments)
        if any(group.stage is Stage.IN_FLIGHT for group in self.state.groups.values()):
            assert low <= self.data_seq + 1

    def decide(self) -> bool:
        decision = decide(self.state, self.schedule)
        if isinstance(decision, Selection):
            offered = [group.group_id for group in decision.groups]
            chosen = self.random.sample(offered, min(len(offered), decision.count))
            decision = decide(self.state, self.schedule, Chosen(kind=decision.kind, group_ids=tuple(chosen)))
            assert not isinstance(decision, Selection)
        rebuilt = bool(self.state.taken_back)  # from the groups that it had, of earlier rounds too
        if isinstance(decision, BatchReady) and self.schedule.on_surplus == "drop" and not rebuilt:
            assert all(self.state.groups[ref.group_id].round >= decision.step for ref in decision.groups)
        if decision is not None:
            self.add(snapshot(self.state) if isinstance(decision, SnapshotTaken) else decision)
        return decision is not None

    def act(self) -> bool:
        """One of the actors goes on; False when none can."""
        possible = [self.end_task] * bool(self.tasks) + [self.judge] * bool(self.unjudged)
        possible += [self.end_item] * bool(self.items) + [self.go_on] * self.trainer.can_go_on
        possible += [self.thaw] * bool(self.frozen)
        if not possible:
            return False
        self.random.choice(possible)()
        return True

    def end_task(self) -> None:
        group_id = self.random.choice(list(self.tasks))
        attempt, round, carried = self.tasks.pop(group_id)
        who: dict[str, Any] = {"group_id": group_id, "attempt": attempt, "lease": "l", "round": round, "instance": "r"}
        chance = self.random.random()
        if round <= self.halted and chance < 0.3:
            self.add(GroupAborted(**who, samples=carried if self.schedule.on_halt == "resume" else ()))
            return
        if chance < 0.05:
            self.add(GroupFailed(**who, reason="poison"))
            return
        self.data_seq += 1
        inherited = carried if self.schedule.on_halt == "resume" else ()
        refs = tuple(ref for sample in inherited for ref in sample.segments)
        refs = (*refs, SegmentRef(seq=self.data_seq, position=0))
        version = self.state.version
        oldest = min([version, *(sample.first_version or version for sample in inherited)])
        told: dict[str, Any] = {"index": 0, "segments": refs, "response_len": len(refs), "first_version": oldest}
        if chance < 0.1:  # it spills, dies, and the task is delivered again
            self.add(SegmentsSpilled(**who, samples=(SampleSummary(**told, status=SampleStatus.ABORTED),)))
            self.tasks[group_id] = (attempt, round, (SampleSummary(**told, status=SampleStatus.ABORTED),))
            return
        if round <= self.halted and chance < 0.8:
            sample = SampleSummary(**told, status=SampleStatus.ABORTED)
            self.add(GroupAborted(**who, samples=(sample,)))
            return
        sample = SampleSummary(**told, status=SampleStatus.COMPLETED, reward=self.random.random())
        self.unjudged.append((group_id, attempt, self.add(GroupCompleted(**who, data="d", samples=(sample,)))))

    def judge(self) -> None:
        group_id, attempt, seq = self.unjudged.pop(self.random.randrange(len(self.unjudged)))
        rejected = Outcome.SPARE if self.schedule.keep_when_insufficient else Outcome.DROP
        outcome = rejected if self.random.random() < self.rejects else Outcome.KEEP
        self.add(VerdictGiven(group_id=group_id, attempt=attempt, event_seq=seq, outcome=outcome))

    def end_item(self) -> None:
        step, version, item = self.items.pop(self.random.randrange(len(self.items)))
        sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5)
        self.add(EvalCompleted(step=step, set="e", item=item, version=version, instance="r", samples=(sample,)))

    def start_trainer(self) -> None:
        """Another trainer loads the newest undamaged checkpoint. Two that start at once take the same incarnation."""
        if len(self.checkpoints) > 1 and self.random.random() < 0.2:
            del self.checkpoints[max(self.checkpoints)]
        at_once = self.random.random() < 0.3
        self.starts += 1
        if not at_once:
            self.incarnation += 1
        self.trainer = Trainer(self, incarnation=self.incarnation, start=f"start {self.starts}")

    def go_on(self) -> None:
        """The trainer says its next fact. Before that it may die, or freeze: its successor starts meanwhile."""
        chance = self.random.random()
        if chance < 0.03:
            self.start_trainer()
        elif chance < 0.15 and self.freezes:
            self.frozen.append(self.trainer)
            self.start_trainer()
        else:
            self.trainer.say()

    def thaw(self) -> None:
        """A replaced trainer goes on where it froze, until it reads of its successor."""
        replaced = self.random.choice(self.frozen)
        if not replaced.can_go_on or self.random.random() < 0.1:
            self.frozen.remove(replaced)
        else:
            replaced.say()

    def restart_buffer(self) -> None:
        """Another buffer folds the newest snapshot and what follows it, or the whole log: to the same state."""
        from_snapshot, whole = LedgerState(), LedgerState()
        for event in self.log:
            if isinstance(event, SnapshotTaken):
                from_snapshot = content_of(event)
        for seq, event in enumerate(self.log, start=1):
            fold(from_snapshot, event, seq)
            fold(whole, event, seq)
        assert msgspec.json.encode(from_snapshot) == msgspec.json.encode(whole) == msgspec.json.encode(self.state)
        self.state = from_snapshot
        self.add(BufferStarted(incarnation=self.state.incarnation + 1))

    def halt(self) -> None:
        """A person halts the running round."""
        if (halt := halt_by_hand(self.state)) is not None:
            self.add(halt)

    def repeat(self, *, decisions: bool = True) -> None:
        """Any event comes again, after its writer was replaced too. The bus refuses to append a decision twice.

        In a world without freezes a replaced trainer is silent: its old events do not come again either.
        """
        event = self.random.choice(self.log)
        of_replaced = isinstance(event, TrainerFact) and event.start != self.trainer.who["start"]
        if (decisions or not event.topic.startswith("ledger.")) and (self.freezes or not of_replaced):
            self.record(event)


class Trainer:
    """One start of the trainer. It says its facts one by one, in the trainer's order, and may freeze before each."""

    def __init__(self, world: World, *, incarnation: int, start: str) -> None:
        self.world, self.who = world, {"incarnation": incarnation, "start": start}
        self.step = max(world.checkpoints)
        self.line = dict(world.checkpoints[self.step])
        world.add(TrainerStarted(**self.who, step=self.step))
        self.frontier = world.state.trained_steps
        self.version = max([event.version for event in world.log if isinstance(event, WeightsAnnounced)], default=0)
        self.facts = self.train()
        self.fact = next(self.facts)  # that it says next; None: it waits for a batch

    @property
    def can_go_on(self) -> bool:
        return self.fact is not None or self.step in self.world.batches

    def say(self) -> None:
        """Say a fact, and work until the next one."""
        if self.fact is not None:
            self.world.add(self.fact)
        self.fact = next(self.facts)

    def train(self) -> Iterator[Message | None]:
        world = self.world
        if self.step >= self.frontier:
            yield self.announce()
        while self.step < world.schedule.num_steps:
            while self.step not in world.batches:
                yield None
            refs = world.batches[self.step].groups
            if self.step >= self.frontier and world.random.random() < 0.1:
                lost = tuple(world.random.sample(refs, world.random.randint(1, len(refs))))
                yield PayloadsMissing(**self.who, step=self.step, groups=lost, reason="purged")
                continue
            self.line[self.step] = refs
            self.step += 1
            yield BatchTrained(**self.who, step=self.step - 1, num_groups=1, num_samples=1, num_tokens=1, metrics={})
            if self.step >= self.frontier:
                yield self.announce()
            if self.step % world.save_interval == 0:
                yield self.save()
        yield self.save()
        while True:
            yield None

    def announce(self) -> Message:
        self.version += 1
        return WeightsAnnounced(**self.who, version=self.version, step=self.step, path="", checksum="", size_bytes=0)

    def save(self) -> Message:
        """The file is complete before its event is published. A replaced trainer ends before its file is complete."""
        world = self.world
        if self is world.trainer:
            saved = {**world.checkpoints, self.step: dict(self.line)}
            world.checkpoints = {step: saved[step] for step in sorted(saved)[-KEPT_CHECKPOINTS:]}
        return CheckpointSaved(**self.who, step=self.step, path="", oldest_step=min(world.checkpoints), took_s=0)


@pytest.mark.parametrize("seed", range(4))
def test_every_event_of_a_run_may_come_again_at_any_later_time(seed: int) -> None:
    spares = bool(seed % 2)
    schedule = Schedule(
        num_steps=4,
        rollout_batch_size=2,
        over_sampling_batch_size=3,
        max_staleness=seed % 3,
        keep_when_insufficient=spares,
        max_barren_groups=20 if spares else 1024,
        evals=(EvalPlan(name="e", interval=2, num_items=2, skip_before_train=False),),
    )
    log = played(schedule, seed, save_interval=2).log
    state = LedgerState()
    for end, event in enumerate(log, start=1):
        fold(state, event, end)
        if end % 60 and end != len(log):
            continue
        before = msgspec.json.encode(msgspec.structs.replace(state, last_seq=0))
        for seq, again in enumerate(log[:end], start=end + 1):
            fold(state, again, seq)
            assert msgspec.json.encode(msgspec.structs.replace(state, last_seq=0)) == before, (end, again)
        state.last_seq = end


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 2),
    batch=st.integers(1, 3),
    surplus=st.integers(0, 4),
    refill=st.sampled_from(["batch", "group"]),
    over_sampling_filter=st.sampled_from([None, "sort_by_reward_std", "user:function"]),
    buffer_filter=st.sampled_from(["fifo", "newest", "by_reward", "user:function"]),
    keep_when_insufficient=st.booleans(),
    max_token_staleness=st.sampled_from([None, 2, 3]),
    eval_overlap=st.booleans(),
    on_halt=st.sampled_from(["resume", "restart", "drop"]),
    on_surplus=st.sampled_from(["train", "drop"]),
    max_attempts=st.integers(1, 4),
    save_interval=st.sampled_from([1, 2, 100]),
    interval=st.sampled_from([1, 3, 50]),
)
def test_every_run_ends_whatever_dies(
    seed: int, staleness: int, batch: int, surplus: int, save_interval: int, interval: int, **settings: Any
) -> None:
    schedule = Schedule(
        num_steps=5,
        rollout_batch_size=batch,
        over_sampling_batch_size=batch + surplus,
        max_staleness=staleness,
        max_barren_groups=20 if settings["keep_when_insufficient"] else 1024,
        **settings,
        evals=(EvalPlan(name="e", interval=interval, num_items=2, skip_before_train=bool(seed % 2)),),
    )
    world = played(schedule, seed, save_interval)
    assert world.state.trained_steps == schedule.num_steps
    assert world.state.books().trained == schedule.num_steps * batch
    batched = [ref.group_id for ready in world.batches.values() for ref in ready.groups]
    assert len(batched) == len(set(batched))
    weights = world.checkpoints[schedule.num_steps]
    assert world.trained == {ref.group_id: step for step, refs in weights.items() for ref in refs}
    check_that_the_accountant_agrees(enumerate(world.log, start=1))


def played(schedule: Schedule, seed: int, save_interval: int) -> World:
    """Play a run to its end, with deaths, freezes and repeated events by chance."""
    random = Random(seed)
    world = World(schedule, random, save_interval)
    while not world.finished:
        assert len(world.log) < MAX_EVENTS, "goes on without end"
        chance = random.random()
        if chance < 0.02:
            world.restart_buffer()
        elif chance < 0.06:
            world.repeat()
        elif chance < 0.07:
            world.halt()
        elif chance < 0.6:
            world.decide()
        elif not world.act():
            assert world.decide() or chance < 0.7, f"stands still: {world.state}"
    return world
