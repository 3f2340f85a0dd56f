"""What completed groups add to their step's numbers, kept until the step is trained. Pure."""

from collections.abc import Iterable, Iterator

import msgspec

from messages import BatchReady, GroupCompleted, SampleStatus, SampleSummary


class GroupNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one completed group."""

    rewards: tuple[float, ...]
    response_lens: tuple[int, ...]  # tokens
    num_truncated: int
    num_ungraded: int  # samples that have a reward in the place of a score that failed
    round_numbers: tuple[float, ...]  # turns, of those samples that say so
    rollout_time_s: float
    reward_time_s: float


def is_ungraded(sample: SampleSummary) -> bool:
    """Whether its score failed and it is trained all the same, as `reward.on_failure = "zero"` has it."""
    return sample.reason is not None and sample.reward is not None


def _round_numbers(samples: Iterable[SampleSummary]) -> Iterator[float]:
    """Each sample speaks for itself: one that says nothing, or nonsense, hides no other's number."""
    for sample in samples:
        number = sample.metadata.get("round_number")
        if isinstance(number, (int, float)):
            yield float(number)


class BatchNumbers:
    """Collects the numbers of groups by the event that completed them, and hands them out by batch."""

    def __init__(self) -> None:
        self._completed: dict[int, GroupNumbers] = {}  # by log sequence
        self._batches: dict[int, tuple[GroupNumbers, ...]] = {}  # by step; not trained yet

    def complete(self, event: GroupCompleted, seq: int) -> None:
        """Note a completed group."""
        samples = event.samples
        self._completed[seq] = GroupNumbers(
            rewards=tuple(sample.reward for sample in samples if sample.reward is not None),
            response_lens=tuple(sample.response_len for sample in samples),
            num_truncated=sum(sample.status is SampleStatus.TRUNCATED for sample in samples),
            num_ungraded=sum(is_ungraded(sample) for sample in samples),
            round_numbers=tuple(_round_numbers(samples)),
            rollout_time_s=event.rollout_time_s,
            reward_time_s=event.reward_time_s,
        )

    def batch(self, event: BatchReady, waiting: Iterable[int]) -> None:
        """Put a batch together.

        Args:
            event: cites the completed groups.
            waiting: log sequences of completed groups that may still come into a batch; the others are forgotten.
        """
        cited = [self._completed.get(ref.event_seq) for ref in event.groups]
        self._batches[event.step] = tuple(numbers for numbers in cited if numbers is not None)
        self._completed = {seq: self._completed[seq] for seq in waiting if seq in self._completed}

    def settle(self, step: int) -> tuple[GroupNumbers, ...] | None:
        """The batch of a step is trained: hand out its groups; None if it was settled before."""
        return self._batches.pop(step, None)

    def unsettled_below(self, step: int) -> list[int]:
        """Steps below this one whose batches are not known to be trained."""
        return sorted(waiting for waiting in self._batches if waiting < step)
