"""The events of a small run, written by hand."""

from messages import (
    BufferStarted,
    EvalCompleted,
    EvalIssued,
    EvalSetSize,
    GroupCompleted,
    GroupsClosed,
    Message,
    Outcome,
    RoundHalted,
    RunFinished,
    SampleStatus,
    SampleSummary,
    TrainerStarted,
)
from tests.build.events import aborted, announced, batch, completed, failed, issued, saved, trained, verdict

SAMPLE = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5)
INSTANCE = "rollout.policy.0"


def done(group_id: int, attempt: int = 0) -> GroupCompleted:
    return completed(group_id, attempt, samples=(SAMPLE,), instance=INSTANCE)


# Eight groups. Step 0 trains 0 and 1; 2 is dropped, 3 is aborted and issued again, 4 fails. The trainer trains step 1
# (groups 3 and 5), saves it and dies before it publishes the event. Group 6 is closed, 7 stays in flight.
LOG: tuple[Message, ...] = (
    BufferStarted(incarnation=1),  # 1
    announced(1, 0),
    issued(0, 1, 2, 3, 4),
    done(0),
    verdict(0, 4),
    done(1),  # 6
    done(2),
    verdict(2, 7, Outcome.DROP, reason="zero_std"),
    verdict(1, 6),
    batch(0, (0, 4), (1, 6)),
    RoundHalted(incarnation=1, round=0),  # 11
    aborted(3, samples=(), instance=INSTANCE),
    failed(4, "no score", instance=INSTANCE),
    trained(0, num_tokens=9),
    announced(2, 1),
    issued(3, attempt=1, round=1),  # 16
    issued(5, 6, 7, round=1),
    done(3, attempt=1),
    done(3),  # a late result of the first attempt
    verdict(3, 18, attempt=1),
    done(5),  # 21
    verdict(5, 21),
    batch(1, (3, 1, 18), (5, 21)),
    GroupsClosed(incarnation=1, group_ids=(6,), outcome="dropped", reason="too_stale"),
    saved(2, path="c", took_s=0.1),
    TrainerStarted(incarnation=2, step=2),  # 26
    announced(3, 2, incarnation=2),
    EvalIssued(incarnation=1, step=2, version=3, sets=(EvalSetSize(set="heldout", num_items=2),)),
    EvalCompleted(step=2, set="heldout", item=0, version=3, instance=INSTANCE, samples=(SAMPLE,)),
)
THE_END = RunFinished(incarnation=1, steps=2, reason="trained 2 steps")
