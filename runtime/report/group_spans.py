"""Spans of prompt groups and train steps, made from the log after the fact, with the times of its events. A pure fold.

A trace of a group has its whole life, from its issue to its end. Its root links to the step that trained it.
"""

from typing import Final

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Message,
    Outcome,
    TrainerStarted,
    VerdictGiven,
)
from runtime.report.rows import mean_of
from runtime.report.trainer_work import work_of

MAX_GROUPS: Final = 50_000  # live ones; the oldest are left out
MAX_CHILDREN: Final = 64  # of a group that is issued again and again; the newest are kept
MAX_BATCHES: Final = 1_000
MAX_TEXT: Final = 200  # characters of a reason

Value = str | int | float


class OtlpSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span. Its key names it in the run; the key of a trace's root names the trace."""

    root: str  # key of the root of its trace
    key: str
    parent: str = ""  # key; empty: it is the root
    name: str
    begin: float  # Unix time
    end: float
    attributes: dict[str, Value] = {}
    link: str = ""  # key of a root in another trace
    error: str = ""


class Live(msgspec.Struct):
    """A group that has not ended."""

    group_id: int
    issued: float
    attempt: int  # newest
    begun: float  # issue of that attempt
    completed: float = 0.0  # of that attempt; 0: not yet
    ready: float = 0.0  # verdict on it
    num_children: int = 0
    children: list[OtlpSpan] = []
    attributes: dict[str, Value] = {}

    @property
    def key(self) -> str:
        """Key of its root."""
        return f"group/{self.group_id}"

    def add(self, name: str, begin: float, end: float, attributes: dict[str, Value]) -> None:
        """Add a child."""
        self.num_children += 1
        key = f"{self.key}/{self.num_children}"
        values = {"physarum.attempt": self.attempt, **{k: v for k, v in attributes.items() if v != ""}}
        begin = max(begin, self.issued)  # clocks of two processes
        end = max(begin, end)
        self.children.append(
            OtlpSpan(root=self.key, key=key, parent=self.key, name=name, begin=begin, end=end, attributes=values)
        )
        del self.children[:-MAX_CHILDREN]


class GroupSpans:
    """Folds the events of a run, from the first one on, into spans."""

    def __init__(self) -> None:
        self._live: dict[int, Live] = {}
        self._batches: dict[int, tuple[float, tuple[int, ...]]] = {}  # time and groups, by step

    def apply(self, event: Message, time: float) -> list[OtlpSpan]:
        """Fold the next event, logged at a Unix time; return the spans of the groups and the step that it ends."""
        match event:
            case GroupsIssued():
                for group in event.groups:
                    self._issue(group.group_id, group.attempt, time)
            case GroupCompleted():
                self._complete(event, time)
            case GroupAborted():
                if (live := self._of(event.group_id, event.attempt)) is not None:
                    live.add("halted", live.begun, time, {})
            case VerdictGiven():
                return self._judge(event, time)
            case GroupFailed():
                if self._of(event.group_id, event.attempt) is not None:
                    return self._end(event.group_id, "failed", time, reason=event.reason)
            case GroupsClosed():
                return [
                    span
                    for group_id in event.group_ids
                    for span in self._end(group_id, event.outcome, time, reason=event.reason)
                ]
            case BatchReady():
                before = self._batches[event.step][1] if event.index and event.step in self._batches else ()
                self._batches[event.step] = time, (*before, *(ref.group_id for ref in event.groups))
                while len(self._batches) > MAX_BATCHES:
                    del self._batches[next(iter(self._batches))]
            case BatchTrained():
                return self._train(event, time)
            case TrainerStarted():
                lost = [step for step in sorted(self._batches) if step < event.step]  # their steps have no span
                return [span for step in lost for span in self._settle(step, time, link="")]
            case _:
                pass
        return []

    def _issue(self, group_id: int, attempt: int, time: float) -> None:
        live = self._live.get(group_id)
        if live is None:
            self._live[group_id] = Live(group_id, time, attempt, time)
            while len(self._live) > MAX_GROUPS:
                del self._live[next(iter(self._live))]
        else:
            live.attempt, live.begun, live.completed, live.ready = attempt, time, 0.0, 0.0

    def _of(self, group_id: int, attempt: int) -> Live | None:
        """Return a live group, if this attempt is its newest one and still runs."""
        live = self._live.get(group_id)
        return live if live is not None and live.attempt == attempt and not live.completed else None

    def _complete(self, event: GroupCompleted, time: float) -> None:
        live = self._of(event.group_id, event.attempt)
        if live is None:
            return
        tokens, last = time - event.reward_time_s, event.last_sample
        begin = tokens - event.rollout_time_s
        live.add("queue", live.begun, begin + last.queue_time_s, {})
        live.add("rollout", begin + last.queue_time_s, tokens, {"physarum.engine": last.engine})
        live.add("scores", tokens, time, {"physarum.grader": last.grader})
        live.completed = time
        rewards = [sample.reward for sample in event.samples if sample.reward is not None]
        live.attributes = {
            "physarum.samples": len(event.samples),
            "physarum.response_tokens": sum(sample.response_len for sample in event.samples),
            **({"physarum.reward": mean_of(rewards) or 0.0} if rewards else {}),
        }

    def _judge(self, event: VerdictGiven, time: float) -> list[OtlpSpan]:
        live = self._live.get(event.group_id)
        if live is None or live.attempt != event.attempt or not live.completed or live.ready:
            return []
        live.add("filter", live.completed, time, {"physarum.outcome": event.outcome.value})
        live.ready = time
        if event.outcome in (Outcome.DROP, Outcome.FAILED):
            outcome = "dropped" if event.outcome is Outcome.DROP else "failed"
            return self._end(event.group_id, outcome, time, reason=event.reason or "")
        return []

    def _train(self, event: BatchTrained, time: float) -> list[OtlpSpan]:
        if event.step not in self._batches:
            return []
        parts, root = _parts_of(event, time), _step(event.step)
        attributes: dict[str, Value] = {
            "physarum.step": event.step + 1,
            "physarum.groups": event.num_groups,
            "physarum.samples": event.num_samples,
            "physarum.tokens": event.num_tokens,
        }
        begin = min((part.begin for part in parts), default=time)
        whole = OtlpSpan(root=root, key=root, name="train step", begin=begin, end=time, attributes=attributes)
        return [*self._settle(event.step, time, link=root), *parts, whole]

    def _settle(self, step: int, time: float, *, link: str) -> list[OtlpSpan]:
        """End the groups of a batch, which is trained."""
        ready, group_ids = self._batches.pop(step)
        for group_id in group_ids:
            if (live := self._live.get(group_id)) is not None:
                live.add("wait for the batch", live.ready or live.completed or ready, ready, {})
                live.add("wait for the step", ready, time, {})
                live.attributes["physarum.step"] = step + 1
        return [span for group_id in group_ids for span in self._end(group_id, "trained", time, link=link)]

    def _end(self, group_id: int, outcome: str, time: float, *, reason: str = "", link: str = "") -> list[OtlpSpan]:
        live = self._live.pop(group_id, None)
        if live is None:
            return []
        return [*live.children, _root_of(live, outcome, time, reason[:MAX_TEXT], link)]


def _root_of(live: Live, outcome: str, time: float, reason: str, link: str) -> OtlpSpan:
    return OtlpSpan(
        root=live.key,
        key=live.key,
        name="prompt group",
        begin=live.issued,
        end=max(time, live.issued),
        attributes={
            "physarum.group": live.group_id,
            "physarum.attempts": live.attempt + 1,
            "physarum.outcome": outcome,
            **({"physarum.reason": reason} if reason else {}),
            **live.attributes,
        },
        link=link,
        error=reason or outcome if outcome == "failed" else "",
    )


def _parts_of(event: BatchTrained, time: float) -> list[OtlpSpan]:
    """Return the parts of a step that took time."""
    work, root = work_of(event.metrics, time), _step(event.step)
    return [
        OtlpSpan(root=root, key=f"{root}/{name}", parent=root, name=name, begin=max(begin, work.begin), end=end)
        for name, begin, end in work.parts
        if end > max(begin, work.begin)
    ]


def _step(step: int) -> str:
    return f"step/{step + 1}"
