"""The spans of a run in the JSON format of Perfetto. Pure."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from runtime.report.fold.spans import Span

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
    "replayed": (TRAINER, "steps"),
    "part": (TRAINER, "parts"),
    "phase": (TRAINER, "phases"),
    "checkpoint": (TRAINER, "checkpoint"),
    "update": (ENGINES, ""),
    "evaluation": (EVALUATION, "evaluation"),
    "down": (PROCESSES, ""),
}


class Trace:
    """Keeps spans. Times are microseconds since the run's first event."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self.num_left_out = 0
        self._began = 0.0
        self._rows: dict[tuple[int, str], int] = {}  # of a lane, by name

    def add(self, spans: Iterable[Span], began: float) -> None:
        """Add spans of a run that began at a Unix time."""
        self._began = began
        for span in spans:
            if span.kind in PLACES:
                self._add(span)
            elif span.group >= 0 and span.kind != "group":
                self._add_group(span)

    def encoded(self) -> bytes:
        """The trace as a file."""
        lanes = [_name("process_name", lane, 0, name) for lane, name in LANES.items()]
        rows = [_name("thread_name", lane, row, name) for (lane, name), row in self._rows.items()]
        return msgspec.json.encode({"traceEvents": [*lanes, *rows, *self.events], "displayTimeUnit": "ms"})

    def _add_group(self, span: Span) -> None:
        """Add a span of a group. Groups overlap, so each has a row of its own, by its number."""
        start = self._micros(span.begin)
        common = {"cat": "group", "id": span.group, "pid": GROUPS, "tid": 0, "name": span.name}
        about = {"group": span.group, "attempt": span.attempt, **({"on": span.row} if span.row else {})}
        self._put({**common, "ph": "b", "ts": start, "args": about})
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
        return max(0, round((time - self._began) * 1e6))


def _name(kind: str, lane: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": lane, "tid": row, "args": {"name": name}}
