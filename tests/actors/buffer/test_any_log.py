"""Whatever the log says, in whatever order and however often: the books close and it folds to the same state."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actors.buffer.deciding.decide import EvalPlan, Schedule, decide
from actors.buffer.deciding.selection import Selection, first_come
from messages import (
    BatchReady,
    BatchTrained,
    BufferStarted,
    CheckpointSaved,
    EvalCompleted,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    Outcome,
    PayloadsMissing,
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
from runtime.ledger.spills import spilled_samples
from runtime.ledger.state import Index
from tests.build.events import snapshot
from tests.support.ledger_log import check_that_a_restart_decides_the_same

NUM_SAMPLES = 2
SCHEDULES = st.builds(
    Schedule,
    num_steps=st.just(6),
    rollout_batch_size=st.just(2),
    over_sampling_batch_size=st.integers(3, 5),
    num_samples=st.just(NUM_SAMPLES),
    refill=st.sampled_from(["batch", "group"]),
    over_sampling_filter=st.sampled_from([None, "sort_by_reward_std", "user:function"]),
    buffer_filter=st.sampled_from(["fifo", "newest", "by_reward", "user:function"]),
    keep_when_insufficient=st.booleans(),
    max_staleness=st.integers(0, 2),
    max_token_staleness=st.sampled_from([None, 2]),
    on_halt=st.sampled_from(["resume", "restart", "drop"]),
    on_surplus=st.sampled_from(["train", "drop"]),
    max_attempts=st.integers(2, 4),
    max_barren_groups=st.sampled_from([5, 1000]),
    evals=st.just((EvalPlan(name="e", interval=3, num_items=1, skip_before_train=True),)),
    eval_overlap=st.booleans(),
)
PICK = st.integers(0, 1000)  # one of however many there are
OUTCOMES = st.sampled_from([*Outcome, *[Outcome.KEEP] * 5])


def who(group_id: int, attempt: int) -> dict[str, Any]:
    return {"group_id": group_id, "attempt": attempt, "lease": "l", "round": 0, "instance": "r"}


def _is_late(state: LedgerState, event: Message) -> bool:
    """Whether an event speaks of an attempt that is over, judges another completion than the one that counts,
    trained a batch that was taken back since, or comes from a trainer that was replaced.
    """
    match event:
        case GroupCompleted() | GroupAborted() | GroupFailed() | SegmentsSpilled():
            group = state.groups.get(event.group_id)
            return group is None or group.stage is not Stage.IN_FLIGHT or group.attempt != event.attempt
        case VerdictGiven():
            group = state.groups.get(event.group_id)
            return group is None or group.stage is not Stage.COMPLETED or group.event_seq != event.event_seq
        case BatchTrained():
            return event.step in state.taken_back or state.is_replaced(event)
        case PayloadsMissing() | CheckpointSaved() | WeightsAnnounced():
            return state.is_replaced(event)
        case _:
            return False


def _told(state: LedgerState) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(state, last_seq=0))


class AnyLog(RuleBasedStateMachine):
    """Everyone who writes to the log, zombies included, and a buffer that restarts whenever it likes."""

    @initialize(schedule=SCHEDULES)
    def begin(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.log: list[Message] = []
        self.state = LedgerState()
        self.attempts: list[tuple[int, int]] = []  # group and attempt, of which somebody may still tell something
        self.completions: list[tuple[int, int, int]] = []  # group, attempt, log sequence
        self.trained: list[int] = []  # groups of settled batches
        self.contained = 0  # steps that every loadable checkpoint contains
        self.data_seq = 0
        self.version = 0
        self.trainer: dict[str, Any] = {"incarnation": 1, "start": "first"}
        self.replaced: list[dict[str, Any]] = []  # trainers that may still tell something
        self.add(TrainerStarted(**self.trainer, step=0))
        self.announce()

    def add(self, event: Message) -> int:
        late = _is_late(self.state, event)
        before = _told(self.state)
        waiting = [batch for batch in self.state.batches.values() if not batch.trained]
        self.log.append(event)
        fold(self.state, event, len(self.log))
        fold(self.state, event, len(self.log))  # delivered again, under the same sequence
        self.trained += [ref.group_id for batch in waiting if batch.trained for ref in batch.groups]
        assert not late or _told(self.state) == before, f"late, and yet it counts: {event}"
        check_that_a_restart_decides_the_same(self.state, self.schedule)
        return len(self.log)

    def sample(self, index: int, reward: float | None, *, tokens: int = 2) -> SampleSummary:
        self.data_seq += 1
        return SampleSummary(
            index=index,
            status=SampleStatus.ABORTED if reward is None else SampleStatus.COMPLETED,
            segments=(SegmentRef(seq=self.data_seq, position=0),),
            response_len=tokens,
            reward=reward,
            first_version=self.version,
            last_version=self.version,
        )

    def announce(self) -> None:
        self.version += 1
        event = {"step": self.state.trained_steps, "path": "", "checksum": "", "size_bytes": 0}
        self.add(WeightsAnnounced(version=self.version, **self.trainer, **event))

    # the buffer

    @rule(count=st.integers(1, 6))
    def decide(self, count: int) -> None:
        """Some decisions; what they issue is what others may tell of later."""
        for _ in range(count):
            decision = decide(self.state, self.schedule)
            if isinstance(decision, Selection):
                decision = decide(self.state, self.schedule, first_come(decision))
            if decision is None:
                break
            assert isinstance(decision, Message)
            if isinstance(decision, BatchReady):
                assert len(decision.groups) == self.schedule.rollout_batch_size
                if self.schedule.on_surplus == "drop" and not self.state.taken_back:
                    assert all(self.state.groups[ref.group_id].round >= decision.step for ref in decision.groups)
            self.add(snapshot(self.state) if isinstance(decision, SnapshotTaken) else decision)
            if isinstance(decision, GroupsIssued):
                self.attempts += [(group.group_id, group.attempt) for group in decision.groups]

    @rule(verdicts=st.booleans())
    def restart_buffer(self, verdicts: bool) -> None:
        """Also with a recipe that has a filter where it had none, or none where it had one."""
        self.state = self.refolded()
        self.add(BufferStarted(incarnation=self.state.incarnation + 1, verdicts=verdicts))
        assert verdicts or not self.state.in_stage(Stage.COMPLETED)

    def refolded(self) -> LedgerState:
        """From the newest snapshot, after it was seen to be the same as from the beginning."""
        whole, newest = LedgerState(), LedgerState()
        for seq, event in enumerate(self.log, start=1):
            if isinstance(event, SnapshotTaken) and event.covers >= newest.last_seq:  # else it comes again
                newest = content_of(event)
                assert event.covers < whole.last_seq or msgspec.json.encode(newest) == msgspec.json.encode(whole)
            fold(whole, event, seq)
        for seq, event in enumerate(islice(self.log, newest.last_seq, None), start=newest.last_seq + 1):
            fold(newest, event, seq)
        assert msgspec.json.encode(newest) == msgspec.json.encode(whole) == msgspec.json.encode(self.state)
        return newest

    # rollout

    @rule(pick=PICK, rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3))
    @precondition(lambda self: self.attempts)
    def complete(self, pick: int, rewards: list[float]) -> None:
        """Mostly with another number of samples than was asked for; also of attempts that ended long ago."""
        self.completed(*self.attempts[pick % len(self.attempts)], rewards)

    def completed(self, group_id: int, attempt: int, rewards: Sequence[float]) -> None:
        samples = tuple(self.sample(index, reward) for index, reward in enumerate(rewards))
        seq = self.add(GroupCompleted(**who(group_id, attempt), data="d", samples=samples))
        self.completions.append((group_id, attempt, seq))

    @rule(rewards=st.sampled_from([(0.0, 1.0), (1.0, 1.0)]), verdicts=st.lists(OUTCOMES, min_size=5, max_size=5))
    def work(self, rewards: tuple[float, ...], verdicts: list[Outcome]) -> None:
        """A stretch without disturbance: what is in flight ends and is judged."""
        self.decide(6)
        running = [group for group in self.state.groups.values() if group.stage is Stage.IN_FLIGHT]
        for group, outcome in zip(running, verdicts, strict=False):
            self.completed(group.group_id, group.attempt, rewards)
            self.judged(*self.completions[-1], outcome)
        self.decide(6)

    @rule(pick=PICK, tokens=st.integers(1, 5))
    @precondition(lambda self: self.attempts)
    def spill(self, pick: int, tokens: int) -> None:
        samples = (self.sample(pick % NUM_SAMPLES, None, tokens=tokens),)
        self.add(SegmentsSpilled(**who(*self.attempts[-1 - pick % min(4, len(self.attempts))]), samples=samples))

    @rule(pick=PICK, tokens=st.integers(0, 5))
    @precondition(lambda self: self.attempts)
    def abort(self, pick: int, tokens: int) -> None:
        samples = (self.sample(0, None, tokens=tokens),) if tokens else ()
        self.add(GroupAborted(**who(*self.attempts[-1 - pick % min(6, len(self.attempts))]), samples=samples))

    @rule(pick=PICK)
    @precondition(lambda self: self.attempts)
    def fail(self, pick: int) -> None:
        self.add(GroupFailed(**who(*self.attempts[pick % len(self.attempts)]), reason="poison"))

    @rule(pick=PICK)
    @precondition(lambda self: self.attempts)
    def lose_task(self, pick: int) -> None:
        group_id, attempt = self.attempts[-1 - pick % min(6, len(self.attempts))]
        subject = f"phy.r.work.rollout.{group_id}.{attempt}"
        self.add(MessageDeadLettered(subject=subject, reason="no such field", dead_seq=1))

    @rule()
    @precondition(lambda self: self.state.evaluation is not None)
    def evaluate(self) -> None:
        running = self.state.evaluation
        assert running is not None
        samples = (self.sample(0, 1.0),)
        who = {"step": running.step, "version": running.version, "instance": "r"}
        self.add(EvalCompleted(**who, set="e", item=0, samples=samples))

    # the filter

    @rule(pick=PICK, outcome=st.sampled_from(Outcome))
    @precondition(lambda self: self.completions)
    def judge(self, pick: int, outcome: Outcome) -> None:
        self.judged(*self.completions[pick % len(self.completions)], outcome)

    def judged(self, group_id: int, attempt: int, seq: int, outcome: Outcome) -> None:
        self.add(VerdictGiven(group_id=group_id, attempt=attempt, event_seq=seq, outcome=outcome))

    # the trainer

    @rule(told=st.booleans())
    @precondition(lambda self: self.state.trained_steps in self.state.batches)
    def train(self, told: bool) -> None:
        """The next step, and its weights unless the trainer dies before. Batches behind one taken back wait for it."""
        self.told_trained(self.state.trained_steps)
        if told:
            self.announce()
            self.decide(2)

    def told_trained(self, step: int) -> None:
        self.add(self.trained_event(step, self.trainer))

    def trained_event(self, step: int, trainer: dict[str, Any]) -> BatchTrained:
        return BatchTrained(step=step, **trainer, num_groups=2, num_samples=4, num_tokens=8, metrics={})

    @rule(pick=PICK)
    @precondition(lambda self: self.state.taken_back)
    def train_as_a_zombie(self, pick: int) -> None:
        """What the batch of a step was before its successor found payloads of it missing."""
        self.told_trained(self.state.taken_back[pick % len(self.state.taken_back)])

    @rule(back=st.integers(0, 2), at_once=st.booleans())
    def restart_trainer(self, back: int, at_once: bool) -> None:
        """Two that start at once take the same incarnation."""
        self.replaced.append(self.trainer)
        number = max(self.trainer["incarnation"] + 1 - at_once, 1)
        self.trainer = {"incarnation": number, "start": f"start {len(self.replaced)}"}
        self.add(TrainerStarted(**self.trainer, step=max(0, self.state.trained_steps - back)))
        self.announce()

    @rule(pick=PICK, kind=st.sampled_from([PayloadsMissing, BatchTrained, CheckpointSaved, WeightsAnnounced]))
    @precondition(lambda self: self.replaced and self.state.batches)
    def hear_a_replaced_trainer(self, pick: int, kind: type[Message]) -> None:
        """It froze before it said this."""
        who = self.replaced[pick % len(self.replaced)]
        step = [*self.state.batches][pick % len(self.state.batches)]
        if kind is PayloadsMissing:
            lost = self.state.batches[step].groups[:1]
            self.add(PayloadsMissing(step=step, **who, groups=lost, reason="purged"))
        elif kind is BatchTrained:
            self.add(self.trained_event(step, who))
        elif kind is CheckpointSaved:
            self.add(CheckpointSaved(step=step + 1, **who, path="", oldest_step=step + 1, took_s=0))
        else:
            unseen: dict[str, Any] = {"step": step + 1, "path": "", "checksum": "", "size_bytes": 0}
            self.version += 1  # of its own counting; no other trainer takes this number
            self.add(WeightsAnnounced(version=self.version, **who, **unseen))

    @rule(keep=st.integers(0, 2))
    def save(self, keep: int) -> None:
        step = self.state.trained_steps
        self.add(CheckpointSaved(step=step, **self.trainer, path="", oldest_step=max(0, step - keep), took_s=0))
        self.contained = max(self.contained, step - keep)

    @rule(pick=PICK, lost=st.integers(1, 2))
    @precondition(lambda self: self.asked_for())
    def lose_payloads(self, pick: int, lost: int) -> None:
        """Found out when a step's turn comes; of one trained since, the word comes late."""
        steps = self.asked_for()
        step = steps[pick % len(steps)]
        refs = self.state.batches[step].groups[:lost]
        self.add(PayloadsMissing(step=step, **self.trainer, groups=refs, reason="purged"))

    @rule(pick=PICK)
    def repeat(self, pick: int) -> None:
        """Store an earlier event again, under a new sequence."""
        self.add(self.log[pick % len(self.log)])

    def asked_for(self) -> list[int]:
        """Steps whose batch a trainer has asked for: it goes through them in order."""
        return [step for step in self.state.batches if step <= self.state.trained_steps]

    @invariant()
    def the_books_close(self) -> None:
        assert self.state.books().closed

    @invariant()
    def no_group_is_in_two_batches_or_trained_twice(self) -> None:
        waiting = [ref.group_id for batch in self.state.batches.values() if not batch.trained for ref in batch.groups]
        assert len(waiting) == len(set(waiting))
        assert len(self.trained) == len(set(self.trained)) == self.state.trained
        assert not set(waiting) & set(self.trained)
        assert not self.state.groups.keys() & set(self.trained)
        assert set(waiting) == self.state.in_stage(Stage.BATCHED).keys()

    @invariant()
    def every_step_has_a_batch_or_waits_for_another(self) -> None:
        steps = self.state.batches.keys() | set(self.state.taken_back)
        assert steps == set(range(self.contained, self.state.round))

    @invariant()
    def every_group_is_where_its_stage_says(self) -> None:
        known, fresh = self.state.index, Index(self.state.groups)
        assert (known.rounds, known.fruitless) == (fresh.rounds, fresh.fruitless)
        for stage in Stage:
            assert known.of(stage).keys() == fresh.of(stage).keys()

    @invariant()
    def nothing_is_purged_that_is_still_needed(self) -> None:
        low = self.state.low_water()
        for group in self.state.groups.values():
            needed = [ref.seq for sample in (*group.carried, *spilled_samples(group)) for ref in sample.segments]
            assert low <= group.payload_seq <= min(needed, default=group.payload_seq)
        for batch in self.state.batches.values():
            for ref in batch.groups:
                completed = self.log[ref.event_seq - 1]
                assert isinstance(completed, GroupCompleted)
                assert all(cited.seq >= low for sample in completed.samples for cited in sample.segments)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.refolded()


def test_whatever_the_log_says_the_books_close_and_it_folds_to_the_same_state() -> None:
    run_state_machine_as_test(
        AnyLog,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
