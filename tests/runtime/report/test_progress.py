"""The line that shows that a long step lives."""

from messages import (
    BatchReady,
    BatchTrained,
    EvalCompleted,
    EvalIssued,
    EvalSetSize,
    GroupCompleted,
    GroupRef,
    GroupsIssued,
    IssuedGroup,
    Message,
    Outcome,
    SampleStatus,
    SampleSummary,
    TrainerStarted,
    VerdictGiven,
)
from runtime.report.report import Report

STARTED = 1000.0
SAMPLE = SampleSummary(index=0, status=SampleStatus.COMPLETED, prompt_len=4, response_len=300, reward=1.0)


class Told:
    """A report that is told events at times, in seconds since the start."""

    def __init__(self) -> None:
        self.report = Report("r", 10, STARTED, step_groups=4)
        self._seq = 0

    def at(self, seconds: float, event: Message) -> int:
        self._seq += 1
        self.report.apply(event, self._seq, STARTED + seconds)
        return self._seq

    def line(self, seconds: float) -> str:
        return self.report.progress_line(STARTED + seconds)


def issued(told: Told, seconds: float, round: int, *groups: int) -> None:
    issues = tuple(IssuedGroup(group_id=group, attempt=0, prompt=group) for group in groups)
    told.at(seconds, GroupsIssued(incarnation=1, round=round, min_version=1, groups=issues, num_samples=1))


def kept(told: Told, seconds: float, round: int, group: int) -> GroupRef:
    completed = GroupCompleted(
        group_id=group,
        attempt=0,
        lease="x",
        round=round,
        instance="i",
        data="d",
        samples=(SAMPLE,),
        rollout_time_s=10.0,
    )
    seq = told.at(seconds, completed)
    told.at(seconds, VerdictGiven(group_id=group, attempt=0, event_seq=seq, outcome=Outcome.KEEP))
    return GroupRef(group_id=group, attempt=0, event_seq=seq)


def test_before_anything_is_issued_it_starts() -> None:
    assert Told().line(45) == "starting for 45s"


def test_a_step_says_how_many_groups_are_done_how_fast_and_what_takes_longest() -> None:
    """Each group is generated for 10 s."""
    told = Told()
    issued(told, 10, 0, 0, 1, 2, 3)
    assert told.line(12) == "step 1/10: 0 of 4 groups, longest rollout 2.0s, 2.0s so far"
    refs = [kept(told, 20, 0, group) for group in range(3)]
    assert told.line(30) == "step 1/10: 3 of 4 groups, 45 tok/s, longest rollout 20s, 20s so far"
    refs.append(kept(told, 40, 0, 3))
    told.at(40, BatchReady(incarnation=1, step=0, groups=tuple(refs)))
    assert told.line(50) == "step 1/10: 4 of 4 groups, 30 tok/s, longest queue 20s, 40s so far"
    assert told.line(100) == "step 1/10: 4 of 4 groups, 13 tok/s, longest train 1m00s, 1m30s so far"
    trained = BatchTrained(step=0, incarnation=1, num_groups=4, num_samples=4, num_tokens=1216, metrics={})
    told.at(100, trained)
    issued(told, 101, 1, 4, 5, 6, 7)
    assert told.line(111) == "step 2/10: 0 of 4 groups, longest rollout 10s, 11s so far"


def test_an_evaluation_says_how_many_items_are_done() -> None:
    told = Told()
    issue = EvalIssued(incarnation=1, step=0, version=1, sets=(EvalSetSize(set="held_out", num_items=20),))
    told.at(5, issue)
    item = EvalCompleted(step=0, set="held_out", item=3, version=1, instance="i", samples=(SAMPLE,))
    told.at(15, item)
    assert told.line(65) == "evaluation after step 0: 1 of 20 items, 5 tok/s, longest evaluation 1m00s, 1m00s so far"


def test_steps_that_are_trained_again_after_a_restart_are_counted() -> None:
    told = Told()
    for step in range(5):
        issued(told, step, step, step)
        told.at(step, BatchReady(incarnation=1, step=step, groups=(kept(told, step, step, step),)))
        told.at(step, trained(step))
    told.at(10, TrainerStarted(incarnation=2, step=3))
    assert told.line(20).startswith("steps 4 to 5 are trained again, on the same samples, ")
    told.at(30, trained(3))
    assert told.line(42) == "step 5 is trained again, on the same samples, 12s so far"
    told.at(50, trained(4))
    assert told.line(51).startswith("step 6/10: ")


def trained(step: int) -> BatchTrained:
    return BatchTrained(step=step, incarnation=1, num_groups=1, num_samples=1, num_tokens=304, metrics={})


def test_after_the_last_step_no_further_one_is_spoken_of() -> None:
    told = Told()
    issued(told, 10, 9, 0)
    told.at(20, BatchReady(incarnation=1, step=9, groups=(kept(told, 20, 9, 0),)))
    trained = BatchTrained(step=9, incarnation=1, num_groups=1, num_samples=1, num_tokens=304, metrics={})
    told.at(30, trained)
    assert told.line(40).startswith("all 10 steps are trained, ")


def test_a_run_without_a_loss_says_nothing_of_it_in_its_result() -> None:
    import msgspec

    result = msgspec.to_builtins(Told().report.result(STARTED + 1))
    assert {"loss_first", "loss_last"}.isdisjoint(result)
    assert {"reward_first", "reward_last", "eval_last"} <= result.keys()
