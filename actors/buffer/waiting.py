"""Describes what the buffer waits for. Pure, except for the clock of the current activity."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

from actors.buffer.deciding.decide import Schedule
from runtime.ledger.fold import Evaluation, LedgerState, Stage
from runtime.settings.tables.prompts import DataConfig
from runtime.util.formatting import count_of, duration

LONG_S: Final = 1.0
STAGE_TEXTS: Final = {
    Stage.READY: "ready",
    Stage.COMPLETED: "waiting for a verdict",
    Stage.IN_FLIGHT: "being generated",
}


class Activity:
    """The current activity outside the event loop, and its start.

    Args:
        long_s: seconds below which an activity is not reported.
    """

    def __init__(self, *, long_s: float = LONG_S) -> None:
        self._long_s = long_s
        self._what = ""
        self._since = 0.0

    @contextmanager
    def __call__(self, what: str) -> Generator[None]:
        """Set the activity for the duration of a block; blocks do not overlap."""
        self._what, self._since = what, time.monotonic()
        try:
            yield
        finally:
            self._what = ""

    def words(self) -> str:
        """The activity and its duration; empty if it runs for less than `long_s`."""
        took_s = time.monotonic() - self._since
        return f"{self._what}, for {duration(took_s)}" if self._what and took_s >= self._long_s else ""


def describe_source(data: Sequence[DataConfig]) -> str:
    """Name the source of the prompts; a user's function is named because it may hang."""
    sources = [item.source or item.source_class for item in data if item.path is None]
    return f"the data source {sources[0]}" if sources else "the data to be loaded"


def describe_wait(state: LedgerState, schedule: Schedule) -> str:
    """Describe what the next decision waits for."""
    if state.finished is not None or state.gave_up is not None:
        return "the end of the run"
    if state.version == 0:
        return "the first weights"
    waits = [_evaluation(state.evaluation)] if state.evaluation is not None else []
    untrained = [step for step, batch in state.batches.items() if not batch.trained]
    if untrained:
        waits.append(f"the batch of step {min(untrained) + 1} to be trained")
    if state.num_halting:
        waits.append(f"{count_of(state.num_halting, 'group')} of a round that was halted by hand to end")
    step = state.taken_back[0] if state.taken_back else state.round  # its payloads were lost: the batch is rebuilt
    if step < schedule.num_steps:
        waits.append(_round(state, schedule, step))
    elif state.checkpoint_step < schedule.num_steps:
        waits.append("the last checkpoint")
    return "; ".join(waits) or "the running groups to end"


def _round(state: LedgerState, schedule: Schedule, step: int) -> str:
    least = step - schedule.max_staleness
    if state.version_step < least:
        return f"weights of step {least} (newest: v{state.version} of step {state.version_step})"
    sizes = {words: len(state.in_stage(stage)) for stage, words in STAGE_TEXTS.items()}
    counts = ", ".join(f"{size} {words}" for words, size in sizes.items() if size)
    return (
        f"{count_of(schedule.rollout_batch_size, 'group')} for the batch of step {step + 1}: {counts or 'none issued'}"
    )


def _evaluation(running: Evaluation) -> str:
    parts = [
        f"{len(running.items[name])} of {count_of(size, 'item')} of {name}" for name, size in running.sizes.items()
    ]
    return f"the evaluation after step {running.step}: {', '.join(parts)}"
