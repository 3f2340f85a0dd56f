"""Health of engines by their answers: consecutive failures, time of the last good answer. Pure; callers pass the time.

An engine may be alive, hold the right weights, and still return only unusable answers. A bad request fails the same way
on every engine, so an engine is judged only by requests of several prompt groups. The samples of two bad prompts fail
at the same moment, so there must also be no good answer for some seconds.
"""

import math
from dataclasses import dataclass, field
from typing import Final

FAILURES_IN_A_ROW: Final = 5  # consecutive failures before it is quarantined or restarted
FAILING_FOR_S: Final = 5.0  # seconds since the first of them, without a good answer
NUM_GROUPS: Final = 2  # prompt groups with failures; with only one, its prompt may be the cause


@dataclass
class Record:
    """One engine's failures since its last good answer."""

    failures: int = 0
    failed_at: float = math.inf  # time of the first of them
    groups: set[str] = field(default_factory=set[str])  # prompt groups with failed requests, at most NUM_GROUPS
    blamed_by: set[str] = field(default_factory=set[str])  # those whose failures count: the engine was not busy
    answered_at: float = -math.inf  # seconds of the caller's clock
    reason: str = ""  # of the last failure


class RequestOutcomes:
    """Outcomes of the requests to each engine."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def answered(self, engine: str, at: float) -> None:
        """Record a usable answer of an engine."""
        self._records[engine] = Record(answered_at=at)

    def failed(self, engine: str, group: str, reason: str, at: float, *, counts: bool) -> None:
        """Record a failed request of a prompt group; `counts` is False if the engine was only too busy."""
        record = self._records.setdefault(engine, Record())
        record.failures += counts
        record.failed_at = min(record.failed_at, at) if counts else record.failed_at
        record.reason = reason if counts else record.reason
        if len(record.groups) < NUM_GROUPS:
            record.groups.add(group)
        if counts and len(record.blamed_by) < NUM_GROUPS:
            record.blamed_by.add(group)

    def forget(self, engine: str) -> None:
        """Reset an engine's record: it was restarted, or is retried after a quarantine."""
        self._records.pop(engine, None)

    def keeps_failing(self, engine: str, now: float) -> bool:
        """Whether an engine failed often in a row, for some seconds, on requests of several prompt groups."""
        record = self._records.get(engine, Record())
        is_row = record.failures >= FAILURES_IN_A_ROW and now - record.failed_at >= FAILING_FOR_S
        return is_row and len(record.blamed_by) >= NUM_GROUPS

    def reason(self, engine: str) -> str:
        """Return why an engine's last request failed."""
        return self._records.get(engine, Record()).reason

    def answers(self, engine: str) -> bool:
        """Whether an engine's last request succeeded."""
        record = self._records.get(engine, Record())
        return not record.groups and record.answered_at > -math.inf

    def any_answered_since(self, at: float) -> bool:
        """Whether any engine has returned a usable answer since a time."""
        return any(record.answered_at >= at for record in self._records.values())

    def fails_alone(self, group: str) -> bool:
        """Whether all recent failures belong to one prompt group."""
        return all(record.groups <= {group} for record in self._records.values())
