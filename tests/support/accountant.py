"""A naive second count of a run's groups, from the pages docs/understand/ledger.md and docs/reference/messages.md.

It shares nothing with runtime/ledger: no import of it, no state that goes on from event to event for a group. Each
answer about a group is derived again from the plain list of all events that name it. Only what concerns batches is
noted once, in log order (`marks`), since whether a batch counts depends on the states of its groups at that moment.

How it was written: a first version was made by a reader of the two pages alone. It could not read events, because
the pages named no fields, and asked 21 questions. The pages answer them now, and this version follows those answers.
It was written by an author of the pages, who had read the fold.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

Event = dict[str, Any]  # a message as JSON, with its type
ENDS: Final = ("group_completed", "group_aborted", "group_failed")
BOOKED_AS: Final = {  # where the equation of the books counts a state
    "completed": "in_flight",
    "in flight": "in_flight",
    "batched": "ready",
    "passed over": "ready",
    "ready": "ready",
    "spare": "pooled",
    "pooled": "pooled",
}
TERMS: Final = ("trained", "skipped", "dropped", "failed", "pooled", "ready", "in_flight")
FOREVER: Final = 1 << 62
ENDINGS: Final = 3  # undecodable ends of a group, after which it has failed


@dataclass
class Audit:
    """What the log says of its groups."""

    books: dict[str, int] = field(default_factory=dict)
    groups: dict[int, tuple[str, int | None, str | None]] = field(default_factory=dict)  # state, step, reason
    steps: dict[int, list[int]] = field(default_factory=dict)  # groups that each step trained
    complaints: list[str] = field(default_factory=list)


@dataclass
class Told:
    """One event, as far as it concerns one group."""

    seq: int
    type: str
    event: Event
    entry: Event  # the part of it that names the group


@dataclass
class Mark:
    """What became of the batch of a step at an event."""

    seq: int
    kind: str  # made | taken back | settled
    step: int
    groups: dict[int, Event]  # by id, as the batch names them
    named: frozenset[int] = frozenset()  # taken back: groups with lost payloads; settled: skipped ones
    passed_over: frozenset[int] = frozenset()


class Accountant:
    """Reads a log, given as (sequence, event) in its order."""

    def __init__(self, events: Iterable[tuple[int, Event]]) -> None:
        self.lines = sorted(events, key=lambda line: line[0])
        self.complaints: list[str] = []
        self.of_group: dict[int, list[Told]] = {}
        self.marks: list[Mark] = []
        for seq, event in self.lines:
            for group, entry in _named(event):
                self.of_group.setdefault(group, []).append(Told(seq, event["type"], event, entry))
        self.starts = [line for line in self.lines if line[1]["type"] in ("buffer_started", "trainer_started")]
        self.valid = {seq for seq, event in self.lines if self._counts(seq, event)}
        self.filters = [
            (seq, event["verdicts"]) for seq, event in self.lines if "verdicts" in event and seq in self.valid
        ]
        self._read_batches()

    # which writers count

    def _counts(self, seq: int, event: Event) -> bool:
        """Whether a decision is of no replaced buffer, or a fact of no replaced trainer."""
        before = [start for at, start in self.starts if at < seq]
        buffers = [earlier["incarnation"] for earlier in before if earlier["type"] == "buffer_started"]
        match event["type"]:
            case "buffer_started":
                return event["incarnation"] > max(buffers, default=0)
            case "groups_issued" | "batch_ready" | "groups_closed" | "run_finished":
                return event["incarnation"] >= max(buffers, default=0)
            case "trainer_started":
                starts = [(one["incarnation"], one["start"]) for one in before if one["type"] == "trainer_started"]
                newest = max([incarnation for incarnation, _ in starts], default=0)
                return event["incarnation"] >= newest and (event["incarnation"], event["start"]) not in starts
            case "batch_trained" | "payloads_missing" | "checkpoint_saved":
                return self._is_current(before, event)
            case _:
                return True

    @staticmethod
    def _is_current(before: list[Event], event: Event) -> bool:
        starts = [one for one in before if one["type"] == "trainer_started"]
        newest = max([one["incarnation"] for one in starts], default=0)
        if event["incarnation"] != newest:
            return event["incarnation"] > newest
        ids: list[str] = []
        for one in starts:
            if one["incarnation"] == newest and one["start"] not in ids:
                ids.append(one["start"])
        return event["start"] not in ids[:-1]

    # batches

    def _read_batches(self) -> None:
        parts: list[Event] = []
        for seq, event in self.lines:
            if seq not in self.valid:
                continue
            match event["type"]:
                case "batch_ready":
                    parts = [*parts, event] if _follows(parts, event) else [event] if not event["index"] else []
                    if parts and event["index"] + 1 == event["num_events"]:
                        self._make(seq, parts)
                        parts = []
                case "batch_trained":
                    if self._waits_for_another(event["step"], seq):
                        continue
                    self._settle(seq, {event["step"]}, frozenset(event["skipped_groups"]))
                case "trainer_started":
                    self._settle(seq, {mark.step for mark in self.marks if mark.step < event["step"]})
                case "checkpoint_saved":
                    self._settle(seq, {mark.step for mark in self.marks if mark.step < event["oldest_step"]})
                case "payloads_missing":
                    self._take_back(seq, event)
                case "groups_issued":
                    self._check_issue(seq, event)
                case "run_finished":
                    open_steps = [step for step in range(event["steps"]) if not self._settled(step)]
                    if open_steps:
                        self.complaints.append(
                            f"seq {seq}: the run is finished, and steps {open_steps} are not trained"
                        )
                case _:
                    pass

    def _check_issue(self, seq: int, event: Event) -> None:
        for entry in event["groups"]:
            state = self.state(entry["group_id"], seq)[0]
            if state != ("pooled" if entry["attempt"] else "not issued") and not self._came_before(seq, event):
                self.complaints.append(f"seq {seq}: group {entry['group_id']} is issued while it is {state}")

    def _of_step(self, step: int) -> list[Mark]:
        return [mark for mark in self.marks if mark.step == step]

    def _standing(self, step: int) -> dict[int, Event]:
        """The groups of a step's batch; none if it has no batch."""
        marks = self._of_step(step)
        return marks[-1].groups if marks and marks[-1].kind != "taken back" else {}

    def _settled(self, step: int) -> bool:
        return any(mark.kind == "settled" for mark in self._of_step(step))

    def _waits_for_another(self, step: int, seq: int) -> bool:
        marks = [mark for mark in self._of_step(step) if mark.seq < seq]
        return bool(marks) and marks[-1].kind == "taken back"

    def _make(self, seq: int, parts: list[Event]) -> None:
        step = parts[0]["step"]
        entries = {entry["group_id"]: entry for part in parts for entry in part["groups"]}
        newest = max([mark.step for mark in self.marks if mark.kind == "made"], default=-1)
        if step <= newest and not self._waits_for_another(step, seq):
            if not self._came_before(seq, parts[-1]):
                self.complaints.append(f"seq {seq}: step {step} has a batch already")
            return
        lost = {
            entry["event_seq"]
            for mark in self._of_step(step)
            if mark.kind == "taken back"
            for group, entry in mark.groups.items()
            if group in mark.named
        }
        if any(entry["event_seq"] in lost for entry in entries.values()):
            return
        kept: dict[int, Event] = {}
        for group, entry in entries.items():
            state, _, _, end = self.state(group, seq)
            if state in ("ready", "spare") and end == entry["event_seq"]:
                kept[group] = entry
            else:
                self.complaints.append(
                    f"seq {seq}: the batch of step {step} names group {group}, which is {state} by event {end}, "
                    f"and cites {entry['event_seq']}"
                )
        if kept:
            passed_over = frozenset(group for part in parts for group in part["passed_over"])
            self.marks.append(Mark(seq, "made", step, kept, passed_over=passed_over))

    def _came_before(self, seq: int, event: Event) -> bool:
        """Whether an event is stored again."""
        return any(event == earlier for at, earlier in self.lines if at < seq)

    def _settle(self, seq: int, steps: set[int], skipped: frozenset[int] = frozenset()) -> None:
        for step in sorted(steps):
            groups = self._standing(step)
            if groups and not self._settled(step):
                self.marks.append(Mark(seq, "settled", step, groups, named=skipped))

    def _take_back(self, seq: int, event: Event) -> None:
        groups = self._standing(event["step"])
        named = frozenset(entry["group_id"] for entry in event["groups"] if entry in list(groups.values()))
        if named and not self._settled(event["step"]):
            self.marks.append(Mark(seq, "taken back", event["step"], groups, named=named))

    # groups

    def state(self, group: int, upto: int = FOREVER) -> tuple[str, int | None, str | None, int]:
        """Return state, step, reason and the event that ended the attempt, from all events before `upto`."""
        told: list[tuple[int, Told | Mark | bool]] = [(one.seq, one) for one in self.of_group.get(group, [])]
        told += [(mark.seq, mark) for mark in self.marks]
        told += self.filters
        state, step, reason = "not issued", None, None
        attempt, end, undecodable, asked, filtered = -1, 0, 0, 0, True
        for seq, one in sorted(told, key=lambda item: (item[0], isinstance(item[1], Told))):
            if seq >= upto:
                break
            if isinstance(one, bool):
                filtered = one
                state = "ready" if state == "completed" and not filtered else state
                continue
            if isinstance(one, Mark):
                state, step, reason = _by_mark(group, one, state, step, reason)
                end = seq if one.kind == "taken back" and group in one.named and state == "pooled" else end
                continue
            if seq not in self.valid:
                continue
            match one.type:
                case "groups_issued":
                    new = one.entry["attempt"]
                    if (state == "not issued" and not new) or (state == "pooled" and new > attempt):
                        state, attempt, reason, asked = "in flight", new, None, one.event["num_samples"]
                case "group_completed" | "group_aborted" | "group_failed":
                    if state == "in flight" and one.entry["attempt"] == attempt:
                        state, reason = _ended(one.event, asked, filtered)
                        end = seq
                case "verdict_given":
                    if state == "completed" and one.entry["event_seq"] == end:
                        outcome = one.event["outcome"]
                        state = {"keep": "ready", "spare": "spare", "drop": "dropped", "failed": "failed"}[outcome]
                        reason = None if outcome == "keep" else one.event["reason"] or f"filter_{outcome}"
                case "groups_closed":
                    if state in BOOKED_AS:
                        state, step, reason = one.event["outcome"], None, one.event["reason"]
                case "message_dead_lettered":
                    if state == "in flight" and one.entry["attempt"] == attempt:
                        undecodable += one.entry["what"] == "ending"
                        if one.entry["what"] == "task" or undecodable == ENDINGS:
                            state, reason = "failed", f"{one.entry['what']}: {one.event['reason']}"
                case _:
                    pass
        return state, step, reason, end


def _named(event: Event) -> list[tuple[int, Event]]:
    """The groups that an event names, each with the part that names it."""
    match event["type"]:
        case "groups_issued":
            return [(entry["group_id"], entry) for entry in event["groups"]]
        case "groups_closed":
            return [(group, {}) for group in event["group_ids"]]
        case "group_completed" | "group_aborted" | "group_failed" | "verdict_given":
            return [(event["group_id"], event)]
        case "message_dead_lettered":
            return _dead(event)
        case _:
            return []


def _dead(event: Event) -> list[tuple[int, Event]]:
    for topic, what in (("work.rollout", "task"), *((f"event.{end.replace('_', '.')}", "ending") for end in ENDS)):
        _, found, key = event["subject"].partition(f".{topic}.")
        group, _, attempt = key.partition(".")
        if found and group.isdecimal() and attempt.isdecimal():
            return [(int(group), {"attempt": int(attempt), "what": what})]
    return []


def _follows(parts: list[Event], event: Event) -> bool:
    return (
        bool(parts)
        and event["index"] == len(parts)
        and all(parts[0][name] == event[name] for name in ("incarnation", "step"))
    )


def _ended(event: Event, asked: int, filtered: bool) -> tuple[str, str | None]:
    if event["type"] == "group_aborted":
        return "pooled", None
    if event["type"] == "group_failed":
        return "failed", event["reason"]
    got = len({sample["index"] for sample in event["samples"]})
    if asked and got != asked:
        return "failed", f"{got} samples where {asked} were asked for"
    return "completed" if filtered else "ready", None


def _by_mark(
    group: int, mark: Mark, state: str, step: int | None, reason: str | None
) -> tuple[str, int | None, str | None]:
    """What a change of a batch makes of a group."""
    inside = group in mark.groups
    match mark.kind:
        case "made" if inside:
            return "batched", mark.step, None
        case "made" if state == "spare" or (state == "ready" and group in mark.passed_over):
            return "passed over", None, reason
        case "settled" if inside and state == "batched":
            return ("skipped" if group in mark.named else "trained"), mark.step, None
        case "taken back" if inside and state == "batched":
            return ("pooled", None, "payloads_missing") if group in mark.named else ("ready", None, None)
        case _:
            return state, step, reason


def audit(events: Iterable[tuple[int, Event]]) -> Audit:
    """Count the groups of a log, and complain of what its writers should not have written.

    Args:
        events: sequence and message of each event, as JSON with all fields.
    """
    log = Accountant(events)
    found = Audit(complaints=log.complaints)
    states = {group: log.state(group) for group in sorted(log.of_group)}
    issued = {group: each for group, each in states.items() if each[0] != "not issued"}
    found.groups = {group: each[:3] for group, each in issued.items()}
    if list(issued) != list(range(len(issued))):
        found.complaints.append(f"the numbers of groups have gaps: {list(issued)}")
    found.books = {"issued": len(issued), **dict.fromkeys(TERMS, 0)}
    for state, _, _ in found.groups.values():
        found.books[BOOKED_AS.get(state, state)] += 1
    for mark in log.marks:
        if mark.kind == "settled":
            found.steps[mark.step] = sorted(
                group for group in mark.groups if found.groups[group][:2] == ("trained", mark.step)
            )
    in_steps = [group for groups in found.steps.values() for group in groups]
    if len(in_steps) != found.books["trained"] or len(set(in_steps)) != len(in_steps):
        found.complaints.append(f"{found.books['trained']} groups are trained, and the steps have {in_steps}")
    return found
