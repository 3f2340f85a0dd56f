"""The samples of one group on their way: what earlier attempts left, what is still to be done. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from messages import Int32Array, SampleStatus, SampleSummary, Score, Segment, SegmentRef

FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
NUM_TURNS = "num_turns"  # in a sample's metadata: of the turns of a conversation, those that ended


@dataclass
class Turn:
    """A stretch of a sample that a model made in one go, over one segment or several."""

    num_tokens: int = 0
    text: str = ""


@dataclass
class OpenSample:
    """One sample of a group."""

    index: int
    prompt_len: int
    status: SampleStatus = SampleStatus.PENDING
    refs: list[SegmentRef] = field(default_factory=list[SegmentRef])
    prefix: list[int] = field(default_factory=list[int])  # response tokens so far, those put between turns among them
    pending: list[int] = field(default_factory=list[int])  # put behind the last turn, and read by no engine yet
    turns: list[Turn] = field(default_factory=list[Turn])
    turn_status: SampleStatus = SampleStatus.PENDING  # of the last request of a turn
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    text: str = ""
    reward: float | None = None
    details: dict[str, object] | None = None
    first_version: int | None = None
    last_version: int | None = None
    reason: str | None = None
    num_stored: int = 0  # of the tokens in prefix
    asked: bool = False  # for its score

    @property
    def finished(self) -> bool:
        """Needs no more tokens."""
        return self.status in FINISHED

    @property
    def unscored(self) -> bool:
        """Has its tokens and waits for its score."""
        return self.finished and self.reward is None

    @property
    def stored(self) -> bool:
        """Whether all its tokens are."""
        return self.num_stored == len(self.prefix)

    def continue_with(self, segment: Segment, status: SampleStatus) -> None:
        """Add what the engine returned; `stored_at` follows once that is stored."""
        self.status = status
        if not len(segment.response_ids):
            return
        if not self.turns or (len(segment.prompt_ids) and self.turns[-1].num_tokens):
            self.turns.append(Turn())
        if self.prefix:  # else it is the prompt
            self.prefix.extend(segment.prompt_ids.tolist())
        self.prefix.extend(segment.response_ids.tolist())
        self.pending = []
        self.text += segment.text
        self.turns[-1].num_tokens += len(segment.response_ids)
        self.turns[-1].text += segment.text
        self._count_versions(segment)

    @property
    def num_turns(self) -> int:
        """Turns of a conversation that ended."""
        return int(self.metadata.get(NUM_TURNS, 0))

    def end_turn(self) -> None:
        """Note that the newest turn of a conversation has all its tokens."""
        self.metadata = {**self.metadata, NUM_TURNS: len(self.turns)}

    def stored_at(self, ref: SegmentRef, segment: Segment) -> None:
        """Note where a segment was stored; one without tokens is of no use."""
        if len(segment.response_ids):
            self.num_stored += len(segment.response_ids) + (len(segment.prompt_ids) if self.refs else 0)
            self.refs.append(ref)

    def take_score(self, score: Score, *, failed_reward: float | None) -> None:
        """Note a grader's answer; without a reward the sample fails, or gets `failed_reward` when that is set."""
        self.details, self.reason, self.reward = score.details, score.error, score.reward
        if self.reward is not None and not math.isfinite(self.reward):
            self.reason, self.reward = f"the reward is {self.reward}", None
        if self.reward is None:
            self.reward = failed_reward
        if self.reward is None:
            self.status = SampleStatus.FAILED

    def summary(self) -> SampleSummary:
        """What events say of it."""
        return SampleSummary(
            index=self.index,
            status=SampleStatus.ABORTED if self.status is SampleStatus.PENDING else self.status,
            segments=tuple(self.refs),
            prompt_len=self.prompt_len,
            response_len=len(self.prefix),
            reward=self.reward,
            score=self.details,
            first_version=self.first_version,
            last_version=self.last_version,
            reason=self.reason,
            metadata=dict(self.metadata),
        )

    def _count_versions(self, segment: Segment) -> None:
        versions = [span.version for span in segment.weight_spans]
        if versions:
            self.first_version = min(versions if self.first_version is None else [self.first_version, *versions])
            self.last_version = max(versions if self.last_version is None else [self.last_version, *versions])


def fresh_samples(num_samples: int, prompt_ids: Int32Array) -> list[OpenSample]:
    """Samples of a group that is generated for the first time."""
    return [OpenSample(index=index, prompt_len=len(prompt_ids)) for index in range(num_samples)]


def inherit(sample: OpenSample, carried: SampleSummary, segments: Sequence[Segment], *, max_new_tokens: int) -> None:
    """Let a fresh sample take over what an earlier attempt left of it.

    Args:
        sample: fresh, of the same index.
        carried: the earlier attempt's summary.
        segments: those that it cites, in its order.
        max_new_tokens: of the whole response.
    """
    for ref, segment in zip(carried.segments, segments, strict=True):
        sample.continue_with(segment, SampleStatus.ABORTED)
        sample.stored_at(ref, segment)
    sample.status, sample.reward, sample.details = carried.status, carried.reward, carried.score
    sample.metadata = dict(carried.metadata)
    if carried.status is SampleStatus.FAILED:  # its tokens are good, its score was not: score it again
        truncated = tokens_left(sample, max_new_tokens) <= 0
        sample.status = SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED


def tokens_left(sample: OpenSample, max_new_tokens: int) -> int:
    """How many tokens the sample may still get; a sample with none left is truncated."""
    return max_new_tokens - len(sample.prefix)
