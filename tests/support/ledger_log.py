"""A hand-written log, its folded state and the decisions on it; a second count of any log."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from actors.buffer.deciding.decide import Schedule, decide
from messages import GroupsIssued, IssuedGroup, Message, Outcome
from runtime.ledger.books import LedgerReport
from runtime.ledger.fold import LedgerState, Stage, fold
from runtime.ledger.groups import MAX_REASONS
from tests.build.events import announced, completed, trained, verdict
from tests.support.accountant import audit


def check_that_a_restart_decides_the_same(state: LedgerState, schedule: Schedule) -> None:
    """A restarted buffer reads a snapshot, and has indices of its own."""
    restarted = msgspec.json.decode(msgspec.json.encode(state), type=LedgerState)
    assert decide(state, schedule) == decide(restarted, schedule)


def check_that_the_accountant_agrees(log: Iterable[tuple[int, Message]]) -> None:
    """Count a log a second time (accountant.py), and compare every group with what the ledger says."""
    report, events = LedgerReport(), list(log)
    for seq, event in events:
        report.take(event, seq)
    found = audit((seq, msgspec.json.decode(msgspec.json.encode(event))) for seq, event in events)
    assert not found.complaints
    summary = report.summary("run", live=False)
    closes = found.books.pop("closes")
    assert closes == summary.books.closed
    assert found.books == {name: getattr(summary.books, name) for name in found.books}
    steps = {step: sorted(groups) for step, groups in summary.trained}
    assert {step: groups for step, groups in found.steps.items() if groups} == {s: g for s, g in steps.items() if g}
    ended = {"dropped": summary.dropped, "failed": summary.failed}
    for state, tally in ended.items():
        reasons = Counter(reason for its, _, reason in found.groups.values() if its == state)
        assert reasons == tally or len(tally) >= MAX_REASONS
    live = {
        group: state for group, (state, _, _) in found.groups.items() if state not in ("trained", "skipped", *ended)
    }
    assert live == {group.group_id: NAMES.get(group.stage, group.stage) for group in report.state.groups.values()}


NAMES = {Stage.IN_FLIGHT: "in flight", Stage.PASSED_OVER: "passed over"}  # as the pages have them


class Log:
    """A log and its folded state. `decide` appends decisions until there are none."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {"num_steps": 3, "rollout_batch_size": 2, "over_sampling_batch_size": 2}
        self.schedule = Schedule(**{**defaults, **settings})
        self.events: list[Message] = []
        self.state = LedgerState()

    def add(self, event: Message) -> int:
        self.events.append(event)
        fold(self.state, event, len(self.events))
        check_that_a_restart_decides_the_same(self.state, self.schedule)
        return len(self.events)

    def decide(self) -> list[Message]:
        made: list[Message] = []
        while (decision := decide(self.state, self.schedule)) is not None:
            made.append(decision)
            self.add(decision)
            assert len(made) < 100, "decides without end"
        return made

    def announce(self, step: int) -> None:
        self.add(announced(self.state.version + 1, step))

    def complete(self, group_id: int, reward: float = 1.0, outcome: Outcome = Outcome.KEEP) -> None:
        seq = self.add(completed(group_id, self.state.groups[group_id].attempt, reward=reward))
        self.add(verdict(group_id, seq, outcome, attempt=self.state.groups[group_id].attempt))

    def train(self, step: int) -> None:
        self.add(trained(step))
        self.announce(step + 1)


def kinds(events: list[Message]) -> list[type[Message]]:
    return [type(event) for event in events]


def stored_log() -> Log:
    """Two groups whose prompts lie in the data messages 11 to 13."""
    log = Log()
    parts = ((11, 12), (13,))
    groups = tuple(IssuedGroup(group_id=i, attempt=0, prompt=i, prompt_parts=parts[i]) for i in (0, 1))
    log.announce(0)
    log.add(GroupsIssued(incarnation=1, round=0, min_version=1, groups=groups))
    return log
