"""The health of a run in one word, and the numbers beside it."""

from collections.abc import Sequence

import pytest

from actors.observer.health import RunState, health_of, left_s, state_of
from actors.observer.observed import Observed
from messages import (
    ActorStarted,
    BufferStarted,
    EventLoopBlocked,
    Message,
    RunFailed,
    RunFinished,
    RunStalled,
    RunStopped,
)
from tests.build.events import issued
from tests.support.log_of_a_run import LOG, done

STALL = RunStalled(idle_s=300.0, waiting={"trainer": "a batch", "buffer": "verdicts"})
SILENT = RunStalled(idle_s=300.0, waiting={})
BLOCKED = EventLoopBlocked(actor="rollout.policy.0", node="n", pid=1, blocked_s=5.0, ended=False)
FAILED = RunFailed(incarnation=1, steps=1, reason="all graders: failed")
BEGUN = (BufferStarted(incarnation=1), issued(0), done(0))


def folded(events: Sequence[Message], num_steps: int = 10) -> Observed:
    observed = Observed("r", num_steps)
    for seq, event in enumerate(events, 1):
        observed.apply(event, seq, 1000.0 + seq)
    return observed


@pytest.mark.parametrize(("events", "live", "expected"), [
    ((), True, (RunState.STARTING, "no sample is complete yet")),
    (BEGUN[:2], True, (RunState.STARTING, "no sample is complete yet")),
    (BEGUN, True, (RunState.RUNNING, "")),
    ((*BEGUN, BufferStarted(incarnation=2)), True, (RunState.STARTING, "no sample is complete yet")),
    ((*BEGUN, BufferStarted(incarnation=2), done(1)), True, (RunState.RUNNING, "")),
    ((*BEGUN, STALL), True, (RunState.STALLED, "trainer waits for a batch; buffer waits for verdicts")),
    ((*BEGUN, SILENT), True, (RunState.STALLED, "nothing was logged, and no process answers")),
    ((*BEGUN, STALL, BLOCKED), True, (RunState.STALLED, "trainer waits for a batch; buffer waits for verdicts")),
    ((*BEGUN, STALL, done(1)), True, (RunState.RUNNING, "")),
    ((*BEGUN[:2], STALL), True, (RunState.STALLED, "trainer waits for a batch; buffer waits for verdicts")),
    ((*BEGUN, FAILED), True, (RunState.FAILED, "all graders: failed")),
    ((*BEGUN, FAILED), False, (RunState.FAILED, "all graders: failed")),
    ((*BEGUN, STALL, FAILED), False, (RunState.FAILED, "all graders: failed")),
    ((*BEGUN, FAILED, BufferStarted(incarnation=2)), True, (RunState.STARTING, "no sample is complete yet")),
    ((*BEGUN, RunFinished(incarnation=1, steps=1, reason="10 steps")), False, (RunState.FINISHED, "10 steps")),
    ((*BEGUN, RunStopped(node="n", reason="SIGINT", exit_code=130)), False, (RunState.STOPPED, "SIGINT")),
    (BEGUN, False, (RunState.NOT_RUNNING, "no node daemon runs it, and the log does not say how it ended")),
])  # fmt: skip
def test_the_state_is_one_word_with_its_reason(
    events: Sequence[Message], live: bool, expected: tuple[RunState, str]
) -> None:
    observed = folded(events)
    assert state_of(observed, live=live) == expected
    assert state_of(observed, live=live, share_read=0.5) == (RunState.READING, "reading the log, 50 %")
    assert state_of(observed, live=live, problem="gone", share_read=0.5) == (RunState.UNREADABLE, "gone")
    assert health_of(Observed.decoded(observed.encoded()), live=live) == health_of(observed, live=live)


def test_numbers_of_groups_and_restarts_are_those_of_the_ledger_and_the_processes() -> None:
    restarts = [
        ActorStarted(actor=name, node="n", pid=1, restarts=number) for name, number in (("a", 2), ("b", 0), ("c", 1))
    ]
    health = health_of(folded([*LOG, *restarts], num_steps=4), live=True)
    assert (health["issued"], health["failed"], health["dropped"], health["restarts"]) == (8, 1, 2, 3)


def test_the_time_left_is_that_of_the_rest_at_the_pace_of_the_newest_steps() -> None:
    observed = folded(LOG, num_steps=4)  # 2 steps are trained, one of which has ended
    (step,) = observed.step_times.items
    assert left_s(observed) == pytest.approx(2 * (step.end - step.begin))
    assert health_of(observed, live=True)["left_s"] == left_s(observed)
    assert health_of(observed, live=False)["left_s"] is None
    assert left_s(folded(LOG, num_steps=0)) is None
    assert left_s(folded(BEGUN)) is None
    assert left_s(folded(LOG, num_steps=1)) == 0
