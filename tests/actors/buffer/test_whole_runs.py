"""Whole runs of the ledger's two functions, with every actor played by chance, its deaths included: each run ends."""

from random import Random
from typing import Any

import msgspec
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
from tests.build.events import snapshot

MAX_EVENTS = 5000
KEPT_CHECKPOINTS = 2


class World:
    """The log and all who write it. Each `act` is something that one of them does next."""

    def __init__(self, schedule: Schedule, random: Random, save_interval: int) -> None:
        self.schedule = schedule
        self.random = random
        self.save_interval = save_interval
        self.rejects = 0.9 if schedule.keep_when_insufficient else 0.2  # of what is judged
        self.log: list[Message] = []
        self.state = LedgerState()
        self.tasks: dict[int, tuple[int, int, tuple[SampleSummary, ...]]] = {}  # group: attempt, round, carried
        self.unjudged: list[tuple[int, int, int]] = []  # group, attempt, log sequence
        self.items: list[tuple[int, int, int]] = []  # step, version, item
        self.halted = -1
        self.data_seq = 0
        self.batches: dict[int, BatchReady] = {}
        self.checkpoints = [0]
        self.step = 0  # of the trainer
        self.incarnation = 0
        self.version = 0
        self.finished = False
        self.restart_trainer()

    def add(self, event: Message) -> int:
        """Put an event in the log; fold it, and let those who follow the log know."""
        self.log.append(event)
        seq = len(self.log)
        fold(self.state, event, seq)
        assert self.state.books().closed, event
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
        for step in range(self.checkpoints[0], self.state.round):
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
        possible += [self.end_item] * bool(self.items) + [self.train] * (self.step in self.batches)
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
        oldest = min([self.version, *(sample.first_version or self.version for sample in inherited)])
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

    def train(self) -> None:
        """A train step in the trainer's order of telling; it may die after each part."""
        step, frontier = self.step, self.state.trained_steps
        if step >= frontier and self.random.random() < 0.1:
            refs = self.batches.pop(step).groups
            lost = tuple(self.random.sample(refs, self.random.randint(1, len(refs))))
            self.add(PayloadsMissing(step=step, incarnation=self.incarnation, groups=lost, reason="purged"))
            return
        self.step += 1
        if self.dies():
            return
        self.add(
            BatchTrained(step=step, incarnation=self.incarnation, num_groups=1, num_samples=1, num_tokens=1, metrics={})
        )
        if self.dies():
            return
        if self.step >= frontier:
            self.announce()
        last = self.step == self.schedule.num_steps
        if self.dies() or not (last or self.step % self.save_interval == 0):
            return
        self.save()

    def dies(self) -> bool:
        if self.random.random() < 0.05:
            self.restart_trainer()
            return True
        return False

    def restart_trainer(self) -> None:
        self.step, self.incarnation = self.checkpoints[-1], self.incarnation + 1
        self.add(TrainerStarted(incarnation=self.incarnation, step=self.step))
        if self.step >= self.state.trained_steps:
            self.announce()
        if self.step >= self.schedule.num_steps:
            self.save()

    def announce(self) -> None:
        self.version += 1
        self.add(
            WeightsAnnounced(
                version=self.version,
                step=self.step,
                incarnation=self.incarnation,
                path="",
                checksum="",
                size_bytes=0,
            )
        )

    def save(self) -> None:
        """The file is there before it is told of."""
        self.checkpoints = sorted({*self.checkpoints, self.step})[-KEPT_CHECKPOINTS:]
        if self.random.random() < 0.1:
            self.restart_trainer()
            return
        oldest = self.checkpoints[0]
        self.add(CheckpointSaved(step=self.step, incarnation=self.incarnation, path="", oldest_step=oldest, took_s=0))

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

    def repeat(self) -> None:
        """A zombie says again what it said, or what another one said of the same group."""
        event = self.random.choice(self.log)
        if not event.topic.startswith("ledger.") and not isinstance(event, TrainerStarted | CheckpointSaved):
            self.add(event)


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
    assert world.state.trained_steps == schedule.num_steps
    assert world.state.books().trained == schedule.num_steps * batch
    batched = [ref.group_id for ready in world.batches.values() for ref in ready.groups]
    assert len(batched) == len(set(batched))
