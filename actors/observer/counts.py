"""Counts of events, and the newest value of each metric of train steps: what rows and states leave out. A pure fold."""

import re
from typing import Final

import msgspec

from messages import (
    ActorStarted,
    CheckpointSaved,
    EventLoopBlocked,
    GroupCompleted,
    Message,
    MessageDeadLettered,
    RunStalled,
)
from runtime.report.group_numbers import Samples, rollout_s
from runtime.report.rows import MetricRow

MAX_METRICS: Final = 256  # names of metrics of a train step
METRIC: Final = re.compile(  # without those whose names have values or reasons in them: the ledger has them
    r"(?!groups/|rollout/zero_std/|rollout/dynamic_filter/)[a-z]+/[\w@/.-]{1,80}", re.ASCII
)


class Counts(msgspec.Struct):
    """Counts the events of a run, from the first one on. Plain data, as `Observed`, which holds one."""

    restarts: dict[str, float] = {}  # by process
    blocked: dict[str, float] = {}  # seconds in which a call blocked the event loop, by process
    samples: dict[str, float] = {}  # by status
    totals: dict[str, float] = {}
    checkpoint_step: int = 0
    metrics: dict[str, tuple[int, float]] = {}  # step and newest value, by name

    def apply(self, event: Message, samples: Samples | None = None) -> None:
        """Fold the next event; `samples` are those of a completed group, if the caller has read them."""
        match event:
            case GroupCompleted():
                self._complete(event, samples or Samples.of(event.samples))
            case ActorStarted():
                _add(self.restarts, event.actor, event.restarts > 0)
            case EventLoopBlocked(ended=True):
                _add(self.blocked, event.actor, event.blocked_s)
            case CheckpointSaved():
                _add(self.totals, "checkpoints", 1)
                self.checkpoint_step = event.step
            case RunStalled():
                _add(self.totals, "stalls", 1)
            case MessageDeadLettered():
                _add(self.totals, "dead_letters", 1)
            case _:
                pass

    def _complete(self, event: GroupCompleted, samples: Samples) -> None:
        _add(self.totals, "groups_completed", 1)
        _add(self.totals, "rollout_seconds", rollout_s(event))
        _add(self.totals, "reward_seconds", event.reward_time_s)
        _add(self.totals, "response_tokens", sum(samples.response_len))
        for status in dict.fromkeys(samples.status):
            _add(self.samples, status.value, samples.status.count(status))

    def take(self, row: MetricRow) -> None:
        """Take the metrics of a row, unless those of a later step are known."""
        step = row["step"]
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or METRIC.fullmatch(name) is None:
                continue
            known = self.metrics.get(name)
            if step >= known[0] if known is not None else len(self.metrics) < MAX_METRICS:
                self.metrics[name] = step, float(value)


def _add(totals: dict[str, float], key: str, number: float) -> None:
    totals[key] = totals.get(key, 0.0) + number
