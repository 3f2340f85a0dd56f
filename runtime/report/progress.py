"""Progress of the current train step or evaluation, for the progress line. Pure."""

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    GroupCompleted,
    GroupsIssued,
    Message,
    WeightsAnnounced,
    WeightsApplied,
)
from runtime.ledger.state import Evaluation, LedgerState, Stage
from runtime.util.formatting import duration

ROLLOUT, TRAIN, WEIGHTS, EVALUATION = "rollout", "train", "weights", "evaluation"


class StepProgress(msgspec.Struct):
    """Folds events into the progress of the current step."""

    _began: float = 0.0  # start of the step
    _running: dict[str, float] = {}  # running parts, with their start times
    _spent_s: dict[str, float] = {}  # durations of ended parts
    _tokens: int = 0  # generated tokens
    _any: bool = False

    def note(self, event: Message, time: float) -> None:
        """Fold an event."""
        match event:
            case GroupsIssued():
                self._begin(ROLLOUT, time)
            case GroupCompleted() | EvalCompleted():
                self._tokens += sum([sample.response_len for sample in event.samples])
            case BatchReady():
                self._end(ROLLOUT, time)
                self._begin(TRAIN, time)
            case BatchTrained():
                self._end(TRAIN, time)
                self._begin_step(time)
            case WeightsAnnounced():
                self._begin(WEIGHTS, time)
            case WeightsApplied():
                self._end(WEIGHTS, time)
            case EvalIssued():
                self._begin(EVALUATION, time)
            case EvalEnded():
                self._end(EVALUATION, time)
            case _:
                pass

    def line(
        self, ledger: LedgerState, *, step: int, num_steps: int, step_groups: int, started: float, now: float
    ) -> str:
        """Format the line as of `now`.

        Args:
            ledger: the state of the groups.
            step: number of the current step.
            num_steps: planned train steps.
            step_groups: prompt groups of a step; 0: unknown.
            started: Unix time of the command.
            now: Unix time.
        """
        lasted_s = max(0.0, now - self._began)
        if not self._any:
            return f"starting for {duration(max(0.0, now - started))}"
        evaluation = ledger.evaluation
        if evaluation is not None:
            done = _evaluated(evaluation)
        elif step > num_steps:
            done = f"all {num_steps} steps are trained"
        else:
            ready = len(ledger.in_stage(Stage.READY)) + len(ledger.in_stage(Stage.BATCHED))
            of = f" of {step_groups}" if step_groups else ""
            done = f"step {step}/{num_steps}: {min(ready, step_groups or ready)}{of} groups"
        rate = [f"{self._tokens / lasted_s:,.0f} tok/s"] if self._tokens and lasted_s >= 1 else []
        return ", ".join([done, *rate, *self._slowest(now), f"{duration(lasted_s)} so far"])

    def _slowest(self, now: float) -> list[str]:
        spent_s = dict(self._spent_s)
        for part, since in self._running.items():
            spent_s[part] = spent_s.get(part, 0.0) + max(0.0, now - since)
        if not spent_s:
            return []
        part = max(spent_s, key=lambda part: spent_s[part])
        return [f"slowest {part} {duration(spent_s[part])}"]

    def _begin(self, part: str, time: float) -> None:
        if not self._any:  # the time of the start belongs to no step
            self._any, self._began = True, time
        self._running.setdefault(part, time)

    def _end(self, part: str, time: float) -> None:
        since = self._running.pop(part, None)
        if since is not None:
            self._spent_s[part] = self._spent_s.get(part, 0.0) + max(0.0, time - since)

    def _begin_step(self, time: float) -> None:
        self._began, self._tokens = time, 0
        self._spent_s.clear()
        self._running = dict.fromkeys(self._running, time)


def _evaluated(evaluation: Evaluation) -> str:
    done, of = sum(map(len, evaluation.items.values())), sum(evaluation.sizes.values())
    return f"evaluation after step {evaluation.step}: {done} of {of} items"
