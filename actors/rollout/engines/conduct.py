"""How engines that are up answer requests: failures in a row, and when each last answered well. Pure; times are given.

An engine may be alive, hold the right weights, and still answer nothing that can be used. A request that fails
everywhere looks alike, so an engine is only judged by the requests of several prompt groups. The samples of two bad
prompts fail at one moment, so it is only judged when it gave no good answer for some seconds meanwhile.
"""

import math
from dataclasses import dataclass, field
from typing import Final

FAILURES_IN_A_ROW: Final = 5  # after which an engine is quarantined or restarted
FAILING_FOR_S: Final = 5.0  # since the first of them, without a good answer
NUM_GROUPS: Final = 2  # whose requests failed in that time; the prompt of one alone may be the cause itself


@dataclass
class Record:
    """One engine's failures since its last good answer."""

    failures: int = 0
    failed_at: float = math.inf  # the first of them
    groups: set[str] = field(default_factory=set[str])  # whose requests failed; no more than are needed
    blamed_by: set[str] = field(default_factory=set[str])  # those of them that failed while it was not busy
    answered_at: float = -math.inf  # seconds of the caller's clock
    reason: str = ""  # of the last failure


class Conduct:
    """What came of the requests to each engine."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def answered(self, engine: str, at: float) -> None:
        """An answer of an engine can be used."""
        self._records[engine] = Record(answered_at=at)

    def failed(self, engine: str, group: str, reason: str, at: float, *, counts: bool) -> None:
        """A request of a prompt group failed at an engine; one that the engine was too busy for does not count."""
        record = self._records.setdefault(engine, Record())
        record.failures += counts
        record.failed_at = min(record.failed_at, at) if counts else record.failed_at
        record.reason = reason if counts else record.reason
        if len(record.groups) < NUM_GROUPS:
            record.groups.add(group)
        if counts and len(record.blamed_by) < NUM_GROUPS:
            record.blamed_by.add(group)

    def forget(self, engine: str) -> None:
        """Begin anew: the engine was restarted, or is tried again."""
        self._records.pop(engine, None)

    def keeps_failing(self, engine: str, now: float) -> bool:
        """Whether an engine failed too often in a row, for some seconds, with requests of several prompt groups."""
        record = self._records.get(engine, Record())
        is_row = record.failures >= FAILURES_IN_A_ROW and now - record.failed_at >= FAILING_FOR_S
        return is_row and len(record.blamed_by) >= NUM_GROUPS

    def reason(self, engine: str) -> str:
        """Why an engine's last request failed."""
        return self._records.get(engine, Record()).reason

    def answers(self, engine: str) -> bool:
        """Whether an engine's last request was answered well."""
        record = self._records.get(engine, Record())
        return not record.groups and record.answered_at > -math.inf

    def any_answered_since(self, at: float) -> bool:
        """Whether any engine answered well since a time."""
        return any(record.answered_at >= at for record in self._records.values())

    def fails_alone(self, group: str) -> bool:
        """Whether no request but those of one prompt group failed lately."""
        return all(record.groups <= {group} for record in self._records.values())
