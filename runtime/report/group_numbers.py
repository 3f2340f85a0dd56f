"""The samples of completed groups by field, their numbers for the metrics, and the check of the first scores. Pure."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from messages import EngineNumbers, GroupCompleted, SampleStatus, SampleSummary

TRUNCATED: Final = SampleStatus.TRUNCATED  # a name of this module is read ten times quicker than an enum's member
FAILED: Final = SampleStatus.FAILED


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None for no values."""
    if not values:
        return None
    try:
        return math.fsum(values) / len(values)
    except (ValueError, OverflowError):  # infinities of both signs, or an overflow
        return sum(values) / len(values)


class Samples(msgspec.Struct, frozen=True):
    """The samples of a completed group, and those of their fields that several parts of a fold read."""

    all: Sequence[SampleSummary]
    status: list[SampleStatus]
    response_len: list[int]  # tokens
    reward: list[float | None]
    reason: list[str | None]

    @classmethod
    def of(cls, samples: Sequence[SampleSummary]) -> "Samples":
        """Read the fields of samples."""
        return cls(
            samples,
            [sample.status for sample in samples],
            [sample.response_len for sample in samples],
            [sample.reward for sample in samples],
            [sample.reason for sample in samples],
        )

    @property
    def left_in(self) -> "Samples":
        """Those that did not fail."""
        return Samples.of([each for each in self.all if not is_left_out(each)]) if FAILED in self.status else self

    @property
    def graded(self) -> "Samples":
        """Those with a score, not with a reward in place of one."""
        if None not in self.reward and not self.has_reasons:
            return self
        return Samples.of([each for each in self.all if each.reward is not None and each.reason is None])

    @property
    def has_reasons(self) -> bool:
        """Whether a sample failed, or its score."""
        return self.reason.count(None) < len(self.reason)


def rollout_s(event: GroupCompleted) -> float:
    """Return the seconds of an attempt's rollout: from the slot of its last sample to the last token."""
    return max(0.0, event.rollout_time_s - event.last_sample.queue_time_s)


class GroupNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards, lengths and times of one completed group, for the metrics of its step."""

    rewards: tuple[float, ...]
    response_lens: tuple[int, ...]  # tokens
    num_truncated: int
    num_ungraded: int  # samples with a replacement reward after a failed score
    num_failed: int = 0  # samples that failed and do not train
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
    return sample.status is FAILED


class CompletedNumbers(msgspec.Struct):
    """Keeps the numbers of groups by their completion event, until the groups are trained or closed."""

    _completed: dict[int, GroupNumbers] = {}  # by log sequence

    def complete(self, event: GroupCompleted, samples: Samples, seq: int) -> None:
        """Record a completed group."""
        turns = [sample.metadata.get("round_number") for sample in samples.all if sample.metadata]
        self._completed[seq] = GroupNumbers(
            rewards=tuple([reward for reward in samples.reward if reward is not None]),
            response_lens=tuple(samples.response_len),
            num_truncated=samples.status.count(TRUNCATED),
            num_ungraded=sum(map(is_ungraded, samples.all)) if samples.has_reasons else 0,
            num_failed=samples.status.count(FAILED),
            num_own_rewards=[sample.own_reward for sample in samples.all].count(True),
            round_numbers=tuple([float(number) for number in turns if isinstance(number, int | float)]),
            rollout_time_s=rollout_s(event),
            reward_time_s=event.reward_time_s,
            engine=event.engine,
        )

    def take(self, seqs: Iterable[int]) -> tuple[GroupNumbers, ...]:
        """Remove and return the numbers of groups, by the sequences of their completion events."""
        taken = (self._completed.pop(seq, None) for seq in seqs)
        return tuple(numbers for numbers in taken if numbers is not None)


FIRST_SCORES: Final = 64  # graded samples
FIRST_STEPS: Final = 10  # of a model with random weights, which may well begin with equal scores


class EqualScores(msgspec.Struct):
    """Checks samples from the start of a run, until two scores differ or FIRST_SCORES are equal.

    A model with random weights has until its train step FIRST_STEPS to get another score.
    """

    is_random: bool = False  # the model begins with random weights
    is_over: bool = False
    _num: int = 0
    _num_truncated: int = 0
    _score: float | None = None

    def take(self, samples: Sequence[SampleSummary], num_steps: int = 0) -> bool:
        """Add samples; return whether the first FIRST_SCORES ones are complete and all equal. True at most once.

        Args:
            samples: of a completed prompt group.
            num_steps: train steps so far.
        """
        if self.is_over:
            return False
        for sample in samples:
            if self.is_over or sample.reward is None or is_ungraded(sample):
                continue
            self.is_over = self._score is not None and sample.reward != self._score
            self._score = sample.reward
            self._num += 1
            self._num_truncated += sample.status is TRUNCATED
        if self.is_over or self._num < FIRST_SCORES or (self.is_random and num_steps < FIRST_STEPS):
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
