"""The samples of one group in progress: restored tokens and remaining work. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from actors.rollout.requests.request import GenerateRequest
from actors.rollout.samples.buffer import NOTHING, SampleBuffer
from actors.rollout.samples.failures import MAX_REASON_CHARS, Action, FailurePolicy
from messages import (
    Int32Array,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Score,
    Segment,
    SegmentRef,
    TurnSpan,
    WeightSpan,
)
from messages.plain import clipped
from runtime.settings.topology import TOKEN_REWARDS
from runtime.util.rewards import first_wrong, reward_problem

FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
NUM_TURNS = "num_turns"  # metadata key: number of finished turns of a conversation
FLOAT32_ERROR = 1e-6  # of a sum of rewards, relative to the sum of their absolute values


@dataclass
class Turn:
    """A model turn: tokens generated in one go, in one segment or several."""

    start: int = 0  # its first token in the response
    num_tokens: int = 0
    text: str = ""
    inputs: Int32Array = field(default_factory=Int32Array)  # input after the turn before
    temperature: float | None = None  # that a generate function chose; None: the recipe's
    weight_spans: list[WeightSpan] = field(default_factory=list[WeightSpan])  # versions of its tokens, by their place

    def append_spans(self, segment: Segment) -> None:
        """Append which versions sampled the tokens of one more segment, before they are counted."""
        for span in segment.weight_spans:
            start, end = self.num_tokens + span.start, self.num_tokens + span.end
            if self.weight_spans and self.weight_spans[-1].version == span.version:
                start = self.weight_spans.pop().start
            self.weight_spans.append(WeightSpan(version=span.version, start=start, end=end))


@dataclass(eq=False)
class OpenSample:
    """One sample of a group in progress: its tokens so far, and where they are stored."""

    index: int
    prompt_len: int
    part: int = 0  # above 0: a fan-out sibling, which a generate function opened
    own_prompt: Int32Array | None = None  # of a sibling, or set by a generate function; None: the task's
    siblings: dict[int, "OpenSample"] = field(default_factory=dict[int, "OpenSample"])  # by part
    num_restarts: int = 0  # times that it began again from its prompt
    is_baseline: bool = False  # sampled greedily, scored and not trained
    status: SampleStatus = SampleStatus.PENDING
    refs: list[SegmentRef] = field(default_factory=list[SegmentRef])
    buffer: SampleBuffer = field(default_factory=SampleBuffer)  # the response so far, input between turns included
    pending: Int32Array = field(default_factory=lambda: NOTHING)  # input after the last turn, not yet sent to an engine
    request: GenerateRequest | None = None  # the running one
    turns: list[Turn] = field(default_factory=list[Turn])
    turn_status: SampleStatus = SampleStatus.PENDING  # status of the last request of the current turn
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    columns: dict[str, int] = field(default_factory=dict[str, int])  # data messages of its columns, by name
    dialogue: str | None = None  # text of a conversation, with the input between its turns
    untrained: tuple[tuple[int, int], ...] = ()  # response tokens that a generate function excludes from the loss
    own_score: Score | None = None  # the reward that a generate function set
    reward: float | None = None
    details: dict[str, object] | None = None
    rewards: dict[str, float] = field(default_factory=dict[str, float])  # by name, if the recipe trains several
    first_version: int | None = None  # of the tokens that weights of the run sampled
    last_version: int | None = None
    reason: str | None = None
    num_stored: int = 0  # number of stored tokens of the response
    score_requested: bool = False  # its score was requested
    is_dropped_alone: bool = False  # it failed, and the other samples of its group train
    is_given_up: bool = False  # it failed before its score, in its generate function
    is_at_fault: bool = False  # its function raised or its score failed, unlike one that was left out on purpose

    @property
    def finished(self) -> bool:
        """Whether it needs no more tokens."""
        return self.status in FINISHED

    @property
    def unscored(self) -> bool:
        """Whether it has all its tokens but no reward."""
        return self.finished and self.reward is None

    @property
    def stored(self) -> bool:
        """Whether all segments are stored."""
        return self.num_stored == self.buffer.num_taken

    @property
    def text(self) -> str:
        """The response as text."""
        return self.buffer.text if self.dialogue is None else self.dialogue

    @property
    def parts(self) -> "list[OpenSample]":
        """The sample and its fan-out siblings, in order."""
        return [self, *(self.siblings[part] for part in sorted(self.siblings))]

    def prompt_of(self, of_task: Int32Array) -> Int32Array:
        """Return its prompt: its own, or the task's."""
        return of_task if self.own_prompt is None else self.own_prompt

    def open_sibling(self, part: int, prompt_ids: Int32Array) -> "OpenSample":
        """Add a fan-out sibling with a prompt of its own."""
        sibling = OpenSample(
            index=self.index, prompt_len=len(prompt_ids), part=part, own_prompt=prompt_ids, is_baseline=self.is_baseline
        )
        self.siblings[part] = sibling
        return sibling

    def start_again(self) -> None:
        """Forget all tokens, so that the sample begins again from its prompt. Nothing of it is being stored."""
        fresh = OpenSample(index=self.index, prompt_len=self.prompt_len, is_baseline=self.is_baseline)
        fresh.num_restarts = self.num_restarts + 1
        self.__dict__.update(fresh.__dict__)

    def give_up(self, reason: str) -> None:
        """Fail the sample and its siblings alone: the other samples of its group train."""
        for part in self.parts:
            part.status, part.reason = SampleStatus.FAILED, reason
            part.is_given_up, part.is_dropped_alone = True, not part.is_baseline

    def fail_function(self, reason: str, action: Action, reward_keys: Sequence[str] = ()) -> None:
        """Do what the policy says, because the generate function failed. A sample without tokens is dropped."""
        if isinstance(action, str) or not self.buffer.num_tokens:
            self.give_up(reason)
            for part in self.parts:
                part.is_at_fault = True
            return
        for part in self.parts:
            if part.buffer.num_tokens:
                part.status, part.reason, part.reward = SampleStatus.COMPLETED, reason, float(action)
                part.rewards = dict.fromkeys(reward_keys, float(action))
            else:
                part.give_up(reason)

    def take(self, key: SampleKey, prompt_ids: Int32Array) -> Segment | None:
        """Take the new tokens of the buffer as a segment; call `stored_at` once it is stored. None without tokens."""
        if self.buffer.num_tokens == self.buffer.num_taken:
            return None
        segment = self.buffer.take(key, prompt_ids, self.turns[-1].temperature if self.turns else None)
        self.pending = NOTHING
        self._note(segment)
        return segment

    def restore(self, ref: SegmentRef, segment: Segment) -> None:
        """Append a segment of an earlier attempt."""
        if len(segment.response_ids):
            self.buffer.append_taken(segment)
            self._note(segment)
            self.stored_at(ref, segment)

    def _note(self, segment: Segment) -> None:
        if not self.turns or (len(segment.prompt_ids) and self.turns[-1].num_tokens):
            inputs = segment.prompt_ids if self.turns else NOTHING
            self.turns.append(Turn(inputs=inputs, temperature=segment.temperature))
        if not self.turns[-1].num_tokens:
            self.turns[-1].start = self.buffer.num_taken - len(segment.response_ids)
        self.columns = {name: seq for name, seq in self.columns.items() if name == TOKEN_REWARDS}  # of fewer tokens
        self.turns[-1].append_spans(segment)
        self.turns[-1].num_tokens += len(segment.response_ids)
        self.turns[-1].text += segment.text
        for version in (span.version for span in segment.weight_spans if span.version):  # 0: of no weights of the run
            self.first_version = version if self.first_version is None else min(self.first_version, version)
            self.last_version = version if self.last_version is None else max(self.last_version, version)

    def turn_spans(self) -> tuple[TurnSpan, ...]:
        """Return the model's turns, with the tokens that are not taken yet."""
        spans = [
            TurnSpan(start=turn.start, end=turn.start + turn.num_tokens, text=turn.text)
            for turn in self.turns
            if turn.num_tokens
        ]
        buffer = self.buffer
        start = max(buffer.num_taken, buffer.input_end)
        if buffer.num_tokens > start:
            text = buffer.new_text
            if spans and spans[-1].end == start:
                before = spans.pop()
                start, text = before.start, before.text + text
            spans.append(TurnSpan(start=start, end=buffer.num_tokens, text=text))
        return tuple(spans)

    @property
    def num_turns(self) -> int:
        """Number of finished turns of a conversation."""
        return int(self.metadata.get(NUM_TURNS, 0))

    def end_turn(self) -> None:
        """Mark the newest turn of a conversation as finished."""
        self.metadata = {**self.metadata, NUM_TURNS: len(self.turns)}

    def stored_at(self, ref: SegmentRef, segment: Segment) -> None:
        """Record where a segment is stored."""
        self.num_stored += len(segment.response_ids) + (len(segment.prompt_ids) if self.refs else 0)
        self.refs.append(ref)

    def take_score(self, score: Score, *, policy: FailurePolicy, reward_keys: Sequence[str] = ()) -> None:
        """Apply a score; without a reward the sample does what the policy says. Siblings without a reward get its.

        Args:
            score: the grader's answer.
            policy: what a sample does whose score failed.
            reward_keys: names of the rewards that the answer must hold.
        """
        self.details, self.reason, self.reward = score.details, score.error, score.reward
        self.rewards = {}
        cause = score.cause
        if self.reward is not None and (problem := reward_problem(self.reward)) is not None:
            self.reason, self.reward, cause = f"the reward is {self.reward}, {problem}", None, "bad_answer"
        if self.reward is not None and reward_keys:
            try:
                self.rewards = named_rewards(score.details, reward_keys)
            except ValueError as error:
                self.reason, self.reward, cause = str(error), None, "bad_answer"
        if self.reward is None:
            self._fail(policy.of(cause), reward_keys)
        for sibling in self.siblings.values():
            shared = msgspec.structs.replace(score, part=sibling.part)
            sibling.own_score = sibling.own_score or (shared if self.own_score else None)
            sibling.take_score(sibling.own_score or shared, policy=policy, reward_keys=reward_keys)
            if self.status is SampleStatus.FAILED:
                sibling.status, sibling.is_dropped_alone = self.status, self.is_dropped_alone
                sibling.reason = sibling.reason or self.reason

    def _fail(self, action: Action, reward_keys: Sequence[str]) -> None:
        if isinstance(action, str):
            self.status, self.is_at_fault = SampleStatus.FAILED, True
            self.is_dropped_alone = action == "drop_sample" and not self.is_baseline
        else:
            self.reward, self.rewards = float(action), dict.fromkeys(reward_keys, float(action))

    def summary(self, *, from_segment: int = 0) -> SampleSummary:
        """Return the sample's summary, as events carry it; its segments from one on."""
        return SampleSummary(
            index=self.index,
            part=self.part,
            status=SampleStatus.ABORTED if self.status is SampleStatus.PENDING else self.status,
            segments=tuple(self.refs[from_segment:]),
            prompt_len=self.prompt_len,
            response_len=self.buffer.num_taken,
            reward=self.reward,
            score=self.details,
            rewards=dict(self.rewards),
            is_baseline=self.is_baseline,
            first_version=self.first_version,
            last_version=self.last_version,
            reason=self.reason and clipped(self.reason, MAX_REASON_CHARS),
            metadata=dict(self.metadata),
            columns=dict(self.columns),
            untrained=self.untrained,
            own_reward=self.own_score is not None and self.reward is not None,
        )


def with_sum(score: Score, num_tokens: int, *, allowed: bool) -> Score:
    """Check the rewards per token of a score. Return it with their sum as the reward, or with the error.

    A reward that agrees with the sum stays: a grader sums its numbers before they are rounded to float32.

    Args:
        score: a grader's answer that has rewards per token.
        num_tokens: of the response.
        allowed: whether the recipe takes rewards per token.
    """
    rewards, problem = np.asarray(score.token_rewards), ""
    if not allowed:
        problem = 'rewards per token, and reward.per is "sample"'
    elif len(rewards) != num_tokens:
        problem = f"{len(rewards)} rewards for {num_tokens} tokens"
    elif (place := first_wrong(rewards)) is not None:
        problem = f"the reward of token {place} is {rewards[place]}, {reward_problem(float(rewards[place]))}"
    if problem:
        return Score(index=score.index, part=score.part, details=score.details, error=problem, cause="bad_answer")
    total, size = float(rewards.sum(dtype=np.float64)), float(np.abs(rewards).sum(dtype=np.float64))
    if score.reward is not None and abs(score.reward - total) <= FLOAT32_ERROR * size:
        return score
    return msgspec.structs.replace(score, reward=total)


def named_rewards(details: Mapping[str, object] | None, keys: Sequence[str]) -> dict[str, float]:
    """Return the rewards that a grader's answer holds under these names.

    Raises:
        ValueError: the answer is not a dict, lacks a name, or has no finite number there.
    """
    if details is None:
        raise ValueError(f"the grader returned no dict with the rewards {', '.join(keys)}, or one too large to send")
    found: dict[str, float] = {}
    for key in keys:
        value: Any = details.get(key)
        problem = reward_problem(value) if isinstance(value, int | float) else "not a finite number"
        if problem is not None:
            raise ValueError(f"the reward {key!r} is {value!r:.100}, {problem}")
        found[key] = float(value)
    return found


def fresh_samples(num_samples: int, prompt_ids: Int32Array, *, baseline: bool = False) -> list[OpenSample]:
    """Create the samples of a group that has no earlier tokens, and after them the greedy one if it has one."""
    samples = [OpenSample(index=index, prompt_len=len(prompt_ids)) for index in range(num_samples)]
    if baseline:
        samples.append(OpenSample(index=num_samples, prompt_len=len(prompt_ids), is_baseline=True))
    return samples


def inherit(sample: OpenSample, carried: SampleSummary, segments: Sequence[Segment], *, max_new_tokens: int) -> None:
    """Restore a fresh sample from an earlier attempt.

    Args:
        sample: fresh, with the same index and part.
        carried: the earlier attempt's summary.
        segments: the segments of that summary, in its order.
        max_new_tokens: of the whole response.
    """
    for ref, segment in zip(carried.segments, segments, strict=True):
        sample.restore(ref, segment)
    sample.status, sample.reward, sample.details = carried.status, carried.reward, carried.score
    sample.rewards = dict(carried.rewards)
    sample.metadata, sample.columns = dict(carried.metadata), dict(carried.columns)
    if sample.num_turns > len(sample.turns):  # a turn without its tokens is generated
        sample.metadata[NUM_TURNS] = len(sample.turns)
    sample.untrained = carried.untrained
    if carried.own_reward:
        details = carried.score
        sample.own_score = Score(index=carried.index, part=carried.part, reward=carried.reward, details=details)
    if carried.status is SampleStatus.FAILED:  # its tokens are valid, only its score failed: score it again
        truncated = tokens_left(sample, max_new_tokens) <= 0
        sample.status = SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED


def tokens_left(sample: OpenSample, max_new_tokens: int) -> int:
    """Return how many more tokens the sample may get; a sample with none left is truncated."""
    return max_new_tokens - sample.buffer.num_tokens
