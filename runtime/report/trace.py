"""The spans of a run in the JSON format of Perfetto. Pure."""

from collections import deque
from typing import Any, Final

import msgspec

from messages import Message
from runtime.report.spans import Span, Spans

MAX_SPANS: Final = 500_000  # the newest ones; about 100 MB
TRAINER, GROUPS, ENGINES, EVALUATION, PROCESSES = range(1, 6)  # lanes, which the format calls processes
LANES: Final = {
    TRAINER: "trainer",
    GROUPS: "groups",
    ENGINES: "weight updates",
    EVALUATION: "evaluation",
    PROCESSES: "processes that are down",
}
PLACES: Final = {  # lane and row of a kind of span; an empty row: that of the span
    "step": (TRAINER, "steps"),
    "wait": (TRAINER, "work"),
    "fetch": (TRAINER, "work"),
    "train": (TRAINER, "work"),
    "weights": (TRAINER, "work"),
    "phase": (TRAINER, "phases"),
    "checkpoint": (TRAINER, "checkpoint"),
    "update": (ENGINES, ""),
    "evaluation": (EVALUATION, "evaluation"),
    "down": (PROCESSES, ""),
}


class Trace:
    """Folds the events of a run into spans. Times are microseconds since the first event."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self.num_left_out = 0
        self._began: float | None = None
        self._spans = Spans()
        self._rows: dict[tuple[int, str], int] = {}  # of a lane, by name

    def apply(self, event: Message, time: float) -> None:
        """Fold the next event, logged at a Unix time."""
        self._began = time if self._began is None else self._began
        for span in self._spans.apply(event, time):
            if span.group is None:
                self._add(span)
            else:
                self._add_group(span, span.group)

    def encoded(self) -> bytes:
        """The trace as a file."""
        lanes = [_name("process_name", lane, 0, name) for lane, name in LANES.items()]
        rows = [_name("thread_name", lane, row, name) for (lane, name), row in self._rows.items()]
        return msgspec.json.encode({"traceEvents": [*lanes, *rows, *self.events], "displayTimeUnit": "ms"})

    def _add_group(self, span: Span, group: int) -> None:
        """Add a span of a group. Groups overlap, so each has a row of its own, by its number."""
        start = self._micros(span.begin)
        common = {"cat": "group", "id": group, "pid": GROUPS, "tid": 0, "name": span.name}
        self._put({**common, "ph": "b", "ts": start, "args": {"group": group, **span.facts}})
        self._put({**common, "ph": "e", "ts": max(start, self._micros(span.end))})

    def _add(self, span: Span) -> None:
        lane, row = PLACES[span.kind]
        number = self._rows.setdefault((lane, row or span.row), 1 + len(self._rows))
        start = self._micros(span.begin)
        placed = {"ph": "X", "cat": LANES[lane], "pid": lane, "tid": number, "name": span.name}
        self._put({**placed, "ts": start, "dur": max(0, self._micros(span.end) - start), "args": span.facts})

    def _put(self, event: dict[str, Any]) -> None:
        self.num_left_out += len(self.events) == MAX_SPANS
        self.events.append(event)

    def _micros(self, time: float) -> int:
        return max(0, round((time - (self._began or 0.0)) * 1e6))


def _name(kind: str, lane: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": lane, "tid": row, "args": {"name": name}}
