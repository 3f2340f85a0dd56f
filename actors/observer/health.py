"""Whether a run is healthy, at a glance: its state in one word, why, and the numbers that say more. Pure."""

from enum import StrEnum
from statistics import median
from typing import Any, Final

from actors.observer.observed import Observed
from actors.observer.terminal_lines import reading_line

RECENT_STEPS: Final = 10  # whose times say how long the rest takes


class RunState(StrEnum):
    """What a run does, in the words that a page shows."""

    UNREADABLE = "log cannot be read"
    READING = "reading the log"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    FAILED = "failed"
    STOPPED = "stopped"
    FINISHED = "finished"
    NOT_RUNNING = "not running"  # no event says how it ended: its machine or its node daemon died


ENDS: Final = RunState.FAILED, RunState.STOPPED, RunState.FINISHED


def health_of(observed: Observed, *, live: bool, problem: str = "", share_read: float | None = None) -> dict[str, Any]:
    """Return the health of a run, for a page.

    Args:
        observed: the run.
        live: whether a node daemon runs it.
        problem: why its log cannot be read.
        share_read: of its log; None: all.
    """
    state, detail = state_of(observed, live=live, problem=problem, share_read=share_read)
    books = observed.ledger_books()
    goes_on = state in (RunState.RUNNING, RunState.STALLED)
    return {
        "state": state,
        "detail": detail,
        "left_s": left_s(observed) if goes_on else None,
        "issued": books.issued,
        "failed": books.failed,
        "dropped": books.dropped,
        "restarts": observed.num_restarts,
    }


def state_of(
    observed: Observed, *, live: bool, problem: str = "", share_read: float | None = None
) -> tuple[RunState, str]:
    """Return the state of a run, and why it has it."""
    if problem:
        return RunState.UNREADABLE, problem
    if share_read is not None:
        return RunState.READING, reading_line(share_read)
    if observed.ended:
        word, _, reason = observed.ended.partition(": ")
        return next(state for state in ENDS if state == word), reason
    if not live:
        return RunState.NOT_RUNNING, "no node daemon runs it, and the log does not say how it ended"
    if observed.stalled_s:
        return RunState.STALLED, _waits_of(observed) or "nothing was logged, and no process answers"
    if not observed.has_begun:
        return RunState.STARTING, "no sample is complete yet"
    return RunState.RUNNING, ""


def _waits_of(observed: Observed) -> str:
    return "; ".join(f"{who} waits for {what}" for who, what in observed.waiting.items())


def left_s(observed: Observed) -> float | None:
    """Estimate the seconds until the last planned step, from the newest steps; None: unknown."""
    newest = observed.account.recent_s[-RECENT_STEPS:]
    if not observed.num_steps or not newest:
        return None
    return max(0, observed.num_steps - observed.steps) * median(newest)
