"""When the trainer did what in a train step. Pure."""

from collections.abc import Mapping
from typing import NamedTuple


class TrainerWork(NamedTuple):
    """The trainer's work in a step, as Unix times: wait and fetch at its begin, training and weights at its end.

    With colocation memory is handed over between `fetched` and `training`.
    """

    begin: float  # of the wait for the batch
    waited: float
    fetched: float
    training: float  # begin of training
    trained: float
    end: float

    @property
    def parts(self) -> tuple[tuple[str, float, float], ...]:
        """Name, begin and end of each part."""
        return (
            ("wait", self.begin, self.waited),
            ("fetch", self.waited, self.fetched),
            ("train", self.training, self.trained),
            ("weights", self.trained, self.end),
        )


def work_of(metrics: Mapping[str, float], end: float) -> TrainerWork:
    """Place the durations that the trainer reported in a step that ended at a time."""
    wait_s, fetch_s = metrics.get("perf/train_wait_time", 0.0), metrics.get("perf/fetch_time", 0.0)
    train_s, weights_s = metrics.get("perf/train_time", 0.0), metrics.get("perf/update_weights_time", 0.0)
    known_s = wait_s + fetch_s + train_s + weights_s
    waited = end - max(known_s, metrics.get("perf/step_time", 0.0)) + wait_s
    trained = end - weights_s
    return TrainerWork(waited - wait_s, waited, waited + fetch_s, trained - train_s, trained, end)
