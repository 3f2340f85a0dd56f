"""A naive second accountant of a run: keeps plain lists of what the log says of each group, and replays them.

It was written by a reader of docs/understand/ledger.md and docs/reference/messages.md who had seen nothing else of the
project: neither code nor tests. It is as that reader left it, but for its format and this paragraph. So where it and
the ledger differ, one of them or the pages are wrong.
"""
# ruff: noqa: PERF401

import json
import re
from dataclasses import dataclass, field

ENDED = ("trained", "skipped", "dropped", "failed")
TASK = re.compile(r"(?:^|\.)work\.rollout\.(\d+)\.(\d+)$")
END = re.compile(r"(?:^|\.)event\.group\.(?:completed|aborted|failed)\.(\d+)\.(\d+)$")


@dataclass
class Audit:
    books: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    steps: dict = field(default_factory=dict)
    complaints: list = field(default_factory=list)


@dataclass
class Group:
    """What a list says of its group at its end."""

    state: str = "none"
    attempt: int = -1
    asked: int = 0
    done_seq: int = -1  # of the completion that counted
    step: int | None = None
    reason: str | None = None
    letters: set = field(default_factory=set)  # dead-lettered ends


def replay(entries):
    """Tells the life of one group from the list of all that names it: tuples (seq, what, ...)."""
    group = Group()
    for seq, what, *rest in entries:
        is_its = group.state == "in flight" and rest[:1] == [group.attempt]  # used where rest begins with the attempt
        if what == "issued":
            attempt, asked = rest
            is_new = group.state == "none" and attempt == 0
            if is_new or (group.state == "pooled" and attempt > group.attempt):
                group.state, group.attempt, group.asked, group.done_seq = "in flight", attempt, asked, -1
        elif what == "completed" and is_its:
            number, verdicts = rest[1:]
            if group.asked != 0 and number != group.asked:
                group.state, group.reason = "failed", f"{number} samples where {group.asked} were asked for"
            else:
                group.state, group.done_seq = ("completed" if verdicts else "ready"), seq
        elif what == "aborted" and is_its:
            group.state = "pooled"
        elif what in ("failed", "task letter") and is_its:
            group.state, group.reason = "failed", rest[1]
        elif what == "end letter" and is_its:
            group.letters.add(rest[2])
            if len(group.letters) >= 3:
                group.state, group.reason = "failed", rest[1]
        elif what == "no filter" and group.state == "completed":
            group.state = "ready"
        elif what == "verdict":
            event_seq, outcome, reason = rest
            if group.state == "completed" and event_seq == group.done_seq:
                if outcome in ("keep", "spare"):
                    group.state = "ready" if outcome == "keep" else "spare"
                elif outcome in ("drop", "failed"):
                    group.state = "dropped" if outcome == "drop" else "failed"
                    group.reason = f"filter_{outcome}" if reason is None else reason
        elif what == "in batch":
            step, event_seq = rest
            if group.state in ("ready", "spare") and event_seq == group.done_seq:
                group.state, group.step = "batched", step
        elif what == "not in batch":  # a batch was made; rest: whether it names the group as passed over
            if group.state == "spare" or (group.state == "ready" and rest[0]):
                group.state = "passed over"
        elif what == "settled":
            step, is_skipped = rest
            if group.state == "batched" and group.step == step:
                group.state = "skipped" if is_skipped else "trained"
        elif what == "batch taken back":
            step, is_missing = rest
            if group.state == "batched" and group.step == step:
                group.state, group.step = ("pooled" if is_missing else "ready"), None
        elif what == "closed":
            outcome, reason = rest
            if group.state not in ENDED and outcome in ("dropped", "failed"):
                group.state, group.step, group.reason = outcome, None, reason
    return group


class Accountant:
    def __init__(self):
        self.lists = {}  # group id -> list of (seq, what, ...)
        self.complaints = []
        self.buffer = None  # highest incarnation that started
        self.verdicts = True
        self.starts = []  # (incarnation, start) of trainers that counted, in order; the last one is current
        self.batches = {}  # step -> {group id: event_seq} of the batch that stands
        self.batch_seqs = {}  # step -> seq of the batch that stands
        self.settled = set()  # steps
        self.used_steps = set()  # steps of all batches so far
        self.missing = {}  # step -> completions that payloads_missing named
        self.uncounted_missing = []  # (seq, step) of payloads_missing of trainers that are not the current one
        self.parts = []  # (seq, event, is_repeat) of the batch that is not complete
        self.seen = set()  # contents of decisions
        self.spared = set()  # groups that a verdict made spare at some time

    def group(self, group_id):
        return replay(self.lists.get(group_id, []))

    def write(self, group_id, seq, what, *rest):
        if group_id in self.lists:
            self.lists[group_id].append((seq, what, *rest))

    def complain(self, seq, text):
        self.complaints.append(f"seq {seq}: {text}")

    def is_repeat(self, event):
        content = json.dumps(event, sort_keys=True)
        was_seen = content in self.seen
        self.seen.add(content)
        return was_seen

    def is_void_decision(self, event):
        return self.buffer is not None and event["incarnation"] < self.buffer

    def is_current_trainer(self, event):
        if not self.starts or event["incarnation"] != self.starts[-1][0]:
            return False
        start = event.get("start", "")
        if start == self.starts[-1][1]:
            return True
        return start == "" and (event["incarnation"], "") not in self.starts

    def settle(self, seq, step, skipped=()):
        if step in self.batches and step not in self.settled:
            self.settled.add(step)
            for group_id in self.batches[step]:
                self.write(group_id, seq, "settled", step, group_id in skipped)

    def settle_before(self, seq, step):
        for earlier in sorted(self.batches):
            if earlier < step:
                self.settle(seq, earlier)

    def on_group_completed(self, seq, event):
        number = len({sample["index"] for sample in event["samples"]})
        self.write(event["group_id"], seq, "completed", event["attempt"], number, self.verdicts)

    def on_group_aborted(self, seq, event):
        self.write(event["group_id"], seq, "aborted", event["attempt"])

    def on_group_failed(self, seq, event):
        self.write(event["group_id"], seq, "failed", event["attempt"], event["reason"])

    def on_segments_spilled(self, seq, event):
        self.write(event["group_id"], seq, "spilled")

    def on_verdict_given(self, seq, event):
        group_id, outcome = event["group_id"], event["outcome"]
        self.write(group_id, seq, "verdict", event["event_seq"], outcome, event.get("reason"))
        if self.group(group_id).state == "spare":
            self.spared.add(group_id)

    def on_message_dead_lettered(self, seq, event):
        task, end = TASK.search(event["subject"]), END.search(event["subject"])
        if task:
            self.write(int(task[1]), seq, "task letter", int(task[2]), "task: " + event["reason"])
        elif end:
            origin = event.get("origin") or ("dead", event.get("dead_seq"))
            self.write(int(end[1]), seq, "end letter", int(end[2]), "ending: " + event["reason"], origin)

    def on_buffer_started(self, seq, event):
        if self.buffer is not None and event["incarnation"] <= self.buffer:
            return
        self.buffer = event["incarnation"]
        self.verdicts = event.get("verdicts", True)
        if not self.verdicts:
            for group_id in self.lists:
                if self.group(group_id).state == "completed":
                    self.write(group_id, seq, "no filter")

    def on_groups_issued(self, seq, event):
        if self.is_void_decision(event):
            return
        is_repeat = self.is_repeat(event)
        self.verdicts = event.get("verdicts", True)
        for issue in event["groups"]:
            group_id, attempt = issue["group_id"], issue["attempt"]
            group, text = self.group(group_id), None
            if group_id == len(self.lists) and attempt == 0:
                self.lists[group_id] = []
            elif group_id not in self.lists and group_id != len(self.lists):
                text = f"group {group_id} is new and not the next one, which is {len(self.lists)}"
            elif group.state != "pooled":
                text = f"group {group_id} is issued as attempt {attempt}, and it is not pooled but {group.state}"
            elif attempt <= group.attempt:
                text = f"group {group_id} is issued again as attempt {attempt} after attempt {group.attempt}"
            self.write(group_id, seq, "issued", attempt, event.get("num_samples", 0))
            if text and not is_repeat:
                self.complain(seq, text)

    def on_batch_ready(self, seq, event):
        if self.is_void_decision(event):
            return
        is_repeat = self.is_repeat(event)
        if any(event == part for _, part, _ in self.parts):
            return  # stored again, while its batch is not complete
        index, number = event.get("index", 0), event.get("num_events", 1)
        if index == 0:
            self.parts = []
        else:
            same = ("incarnation", "step", "num_events")
            if index != len(self.parts) or any(event.get(key) != self.parts[0][1].get(key) for key in same):
                self.parts = []
                return
        self.parts.append((seq, event, is_repeat))
        if len(self.parts) == number:
            parts, self.parts = self.parts, []
            self.whole_batch(seq, event["step"], parts)

    def whole_batch(self, seq, step, parts):
        is_repeat = all(repeat for _, _, repeat in parts)
        refs = [(part_seq, ref) for part_seq, part, _ in parts for ref in part["groups"]]
        texts = []  # (seq, complaint)
        is_taken_back = step in self.used_steps and step not in self.batches
        if not is_taken_back and any(other >= step for other in self.used_steps):
            self.batch_without_room(seq, step, texts)
        else:
            lost = self.missing.get(step, set())
            cited = [ref["event_seq"] for _, ref in refs if ref["event_seq"] in lost]
            members = {}
            for part_seq, ref in refs:
                group_id, event_seq = ref["group_id"], ref["event_seq"]
                before = self.group(group_id)
                if not cited:
                    self.write(group_id, part_seq, "in batch", step, event_seq)
                if before.state not in ("ready", "spare"):
                    state = "never issued" if before.state == "none" else before.state
                    texts.append(
                        (
                            part_seq,
                            f"the batch of step {step} names group {group_id}, which is {state}, not ready or spare",
                        )
                    )
                    if before.step is not None and before.step != step:
                        texts.append((part_seq, f"group {group_id} is in two steps, {before.step} and {step}"))
                elif event_seq != before.done_seq:
                    texts.append(
                        (
                            part_seq,
                            f"the batch of step {step} cites event {event_seq} for group {group_id}, "
                            f"and its completion is {before.done_seq}",
                        )
                    )
                elif not cited:
                    members[group_id] = event_seq
                self.check_number(part_seq, step, group_id, event_seq, texts)
            for event_seq in cited:
                texts.append(
                    (seq, f"the batch of step {step} cites completion {event_seq}, whose payloads are missing")
                )
            if members:
                self.batches[step], self.batch_seqs[step] = members, seq
                self.used_steps.add(step)
                named = [group_id for _, part, _ in parts for group_id in part.get("passed_over", [])]
                for group_id in named:
                    self.write(group_id, seq, "not in batch", True)
                for group_id in sorted(self.spared):
                    self.write(group_id, seq, "not in batch", False)
                self.spared.clear()  # no group is spare now
        if not is_repeat:
            for text_seq, text in texts:
                self.complain(text_seq, text)

    def batch_without_room(self, seq, step, texts):
        if step not in self.batches:
            texts.append((seq, f"a batch of step {step} after one of a later step"))
            return
        texts.append((seq, f"a batch of step {step}, which has one since {self.batch_seqs[step]}"))
        for fact_seq, fact_step in self.uncounted_missing:
            if fact_step == step and fact_seq > self.batch_seqs[step]:
                trained = "trained " if step in self.settled else ""
                texts.append(
                    (
                        seq,
                        f"the batch of the {trained}step {step} is made again, because payloads_missing "
                        f"{fact_seq} of a replaced trainer was counted",
                    )
                )

    def check_number(self, seq, step, group_id, event_seq, texts):
        """Looks for more samples than asked for in the completion that a batch cites."""
        entries = self.lists.get(group_id, [])
        for entry_seq, what, *rest in entries:
            if entry_seq == event_seq and what == "completed":
                attempt, number, _ = rest
                asked = [entry[3] for entry in entries if entry[1] == "issued" and entry[2] == attempt][:1]
                if asked and 0 < asked[0] < number:
                    texts.append(
                        (
                            seq,
                            f"the batch of step {step} cites completion {event_seq} of group {group_id} with "
                            f"{number} samples where {asked[0]} were asked for",
                        )
                    )

    def on_groups_closed(self, seq, event):
        if self.is_void_decision(event):
            return
        for group_id in event["group_ids"]:
            self.write(group_id, seq, "closed", event["outcome"], event["reason"])

    def on_run_finished(self, seq, event):
        if self.is_void_decision(event) or self.is_repeat(event):
            return
        untrained = [step for step in range(event["steps"]) if step not in self.settled]
        if untrained:
            self.complain(seq, f"the run has finished, and these steps are not trained: {untrained[:20]}")

    def on_trainer_started(self, seq, event):
        start = (event["incarnation"], event.get("start", ""))
        if start in self.starts or any(incarnation > start[0] for incarnation, _ in self.starts):
            return
        self.starts.append(start)
        self.settle_before(seq, event["step"])

    def on_batch_trained(self, seq, event):
        if self.is_current_trainer(event):
            self.settle(seq, event["step"], event.get("skipped_groups", []))

    def on_checkpoint_saved(self, seq, event):
        if self.is_current_trainer(event):
            self.settle_before(seq, event["oldest_step"])

    def on_payloads_missing(self, seq, event):
        step = event["step"]
        if not self.is_current_trainer(event):
            self.uncounted_missing.append((seq, step))
            return
        batch = self.batches.get(step, {})
        named = {ref["group_id"] for ref in event["groups"] if batch.get(ref["group_id"]) == ref["event_seq"]}
        if not named or step in self.settled:
            return
        self.missing.setdefault(step, set()).update(ref["event_seq"] for ref in event["groups"])
        for group_id in batch:
            self.write(group_id, seq, "batch taken back", step, group_id in named)
        del self.batches[step], self.batch_seqs[step]

    def sum_up(self):
        audit = Audit(complaints=self.complaints, steps={step: [] for step in sorted(self.settled)})
        counts = dict.fromkeys(("trained", "skipped", "dropped", "failed", "pooled", "ready", "in_flight"), 0)
        place = {
            "spare": "pooled",
            "batched": "ready",
            "passed over": "ready",
            "completed": "in_flight",
            "in flight": "in_flight",
        }
        for group_id in sorted(self.lists):
            group = self.group(group_id)
            counts[place.get(group.state, group.state)] += 1
            audit.groups[group_id] = (group.state, group.step, group.reason)
            if group.state == "trained":
                audit.steps[group.step].append(group_id)
        audit.books = {"issued": len(self.lists), **counts, "closes": len(self.lists) == sum(counts.values())}
        return audit


def audit(events):
    """Audits a run. `events`: (seq, decoded JSON object with its "type") in log order."""
    accountant = Accountant()
    for seq, event in events:
        handler = getattr(accountant, "on_" + event.get("type", ""), None)
        if handler:
            handler(seq, event)
    return accountant.sum_up()
