"""Rewards, lengths and times of completed groups, for the metrics; and the check of the first scores. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from messages import EngineNumbers, GroupCompleted, SampleStatus, SampleSummary


class GroupNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards, lengths and times of one completed group, for the metrics of its step."""

    rewards: tuple[float, ...]
    response_lens: tuple[int, ...]  # tokens
    num_truncated: int
    num_ungraded: int  # samples with a replacement reward after a failed score
    num_own_rewards: int = 0  # samples whose generate function set their reward
    round_numbers: tuple[float, ...]  # numbers of turns, of the samples that report one
    rollout_time_s: float
    reward_time_s: float
    engine: EngineNumbers


def is_ungraded(sample: SampleSummary) -> bool:
    """Return whether a sample's score failed and it is trained anyway, as with `reward.on_failure = "zero"`."""
    return sample.reason is not None and sample.reward is not None and not is_left_out(sample)


def is_left_out(sample: SampleSummary) -> bool:
    """Return whether a sample of a completed group failed, such as an invalid sample of a dump."""
    return sample.status is SampleStatus.FAILED


def _round_numbers(samples: Iterable[SampleSummary]) -> Iterator[float]:
    """Yield the number of turns of each sample that has a valid one."""
    for sample in samples:
        number = sample.metadata.get("round_number")
        if isinstance(number, (int, float)):
            yield float(number)


class CompletedNumbers(msgspec.Struct):
    """Keeps the numbers of groups by their completion event, until the groups are trained or closed."""

    _completed: dict[int, GroupNumbers] = {}  # by log sequence

    def complete(self, event: GroupCompleted, seq: int) -> None:
        """Record a completed group."""
        samples = event.samples
        self._completed[seq] = GroupNumbers(
            rewards=tuple([sample.reward for sample in samples if sample.reward is not None]),
            response_lens=tuple([sample.response_len for sample in samples]),
            num_truncated=[sample.status for sample in samples].count(SampleStatus.TRUNCATED),
            num_ungraded=len([sample for sample in samples if sample.reason is not None and is_ungraded(sample)]),
            num_own_rewards=[sample.own_reward for sample in samples].count(True),
            round_numbers=tuple(_round_numbers([sample for sample in samples if sample.metadata])),
            rollout_time_s=event.rollout_time_s,
            reward_time_s=event.reward_time_s,
            engine=event.engine,
        )

    def take(self, seqs: Iterable[int]) -> tuple[GroupNumbers, ...]:
        """Remove and return the numbers of groups, by the sequences of their completion events."""
        taken = (self._completed.pop(seq, None) for seq in seqs)
        return tuple(numbers for numbers in taken if numbers is not None)


FIRST_SCORES: Final = 64  # graded samples


class EqualScores(msgspec.Struct):
    """Checks samples from the start of a run, until two scores differ or FIRST_SCORES are equal."""

    is_over: bool = False
    _num: int = 0
    _num_truncated: int = 0
    _score: float | None = None

    def take(self, samples: Sequence[SampleSummary]) -> bool:
        """Add samples; return whether the first FIRST_SCORES ones are complete and all equal. True at most once."""
        if self.is_over:
            return False
        for sample in samples:
            if self.is_over or sample.reward is None or is_ungraded(sample):
                continue
            self.is_over = self._score is not None and sample.reward != self._score
            self._score = sample.reward
            self._num += 1
            self._num_truncated += sample.status is SampleStatus.TRUNCATED
        if self.is_over or self._num < FIRST_SCORES:
            return False
        self.is_over = True
        return True

    @property
    def why(self) -> tuple[str, ...]:
        """The warning about equal scores, in lines."""
        return (f"all of the first {self._num} graded samples have the same score, {self._score or 0.0:g}",)

    @property
    def causes(self) -> tuple[str, ...]:
        """Likely causes, in lines, most likely first."""
        cut = f"{self._num_truncated} of {self._num} responses were cut: rollout.max_response_len is too small"
        return (
            "  likely causes, if the score should differ:",
            *([f"    {cut}, or the model never ends its turn"] if self._num_truncated else ()),
            "    the response has special tokens in it, such as an end of turn: rollout.skip_special_tokens = true",
            "    the label is another column than the grader compares with, or written in another form: data.label_key",
            "    the prompt lacks its chat template: data.apply_chat_template = true",
            "    the task is too hard for this model, or too easy",
        )
