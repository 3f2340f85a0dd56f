"""A report that takes events one after the other, made by hand."""

from messages import (
    BatchReady,
    BatchTrained,
    GroupCompleted,
    GroupRef,
    GroupsIssued,
    IssuedGroup,
    Message,
    Outcome,
    SampleStatus,
    SampleSummary,
    VerdictGiven,
)
from runtime.report.report import Line, Notice, Report, RowDone

STARTED = 1000.0


class Story:
    """Tells a report one event after the other and remembers what it showed."""

    def __init__(self, num_steps: int = 4) -> None:
        self.report = Report("r", num_steps, STARTED)
        self.seq = 0
        self.now = STARTED
        self.notices: list[Notice] = []
        self.completed: dict[int, int] = {}  # log sequence by group

    def tell(self, event: Message, *, after_s: float = 0.0) -> int:
        self.seq += 1
        self.now += after_s
        self.notices += self.report.apply(event, self.seq, self.now)
        return self.seq

    def issue(self, *groups: int, round: int = 0, attempt: int = 0) -> None:
        issued = tuple(IssuedGroup(group_id=group, attempt=attempt, prompt=group) for group in groups)
        self.tell(GroupsIssued(incarnation=1, round=round, min_version=1, groups=issued))

    def complete(self, group: int, *rewards: float, attempt: int = 0, after_s: float = 0.0, truncated: int = 0) -> int:
        statuses = [SampleStatus.TRUNCATED] * truncated + [SampleStatus.COMPLETED] * len(rewards)
        samples = tuple(
            SampleSummary(
                index=index, status=statuses[index], prompt_len=4, response_len=10 * (index + 1), reward=reward
            )
            for index, reward in enumerate(rewards)
        )
        event = GroupCompleted(
            group_id=group,
            attempt=attempt,
            lease="x",
            round=0,
            instance="rollout.0",
            data="d",
            samples=samples,
            rollout_time_s=0.5,
            reward_time_s=0.25,
        )
        self.completed[group] = self.tell(event, after_s=after_s)
        return self.completed[group]

    def judge(self, group: int, seq: int, outcome: Outcome = Outcome.KEEP, reason: str | None = None) -> None:
        self.tell(VerdictGiven(group_id=group, attempt=0, event_seq=seq, outcome=outcome, reason=reason))

    def train(self, step: int, *groups: int, after_s: float = 1.0, **metrics: float) -> None:
        refs = tuple(GroupRef(group_id=group, attempt=0, event_seq=self.completed.get(group, 0)) for group in groups)
        self.tell(BatchReady(incarnation=1, step=step, groups=refs))
        named = {key.replace("__", "/"): value for key, value in metrics.items()}
        self.tell(
            BatchTrained(step=step, incarnation=1, num_groups=1, num_samples=2, num_tokens=68, metrics=named),
            after_s=after_s,
        )

    def lines(self) -> list[str]:
        return [notice.text for notice in self.notices if isinstance(notice, Line)]

    def rows(self) -> list[dict[str, object]]:
        return [notice.row for notice in self.notices if isinstance(notice, RowDone)]


def one_step(story: Story, step: int, *rewards: float) -> None:
    story.issue(step, round=step)
    story.judge(step, story.complete(step, *rewards, after_s=1.0))
    story.train(step, step, train__loss=0.5, perf__train_wait_time=1.0, perf__train_time=1.0)
