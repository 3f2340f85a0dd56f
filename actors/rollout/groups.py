"""One prompt group from its task to its end: generate, store, score."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from actors.rollout.answers import Answer, segment_of, status_of
from actors.rollout.generation import Generator, Request
from actors.rollout.members import Member, tokens_left
from actors.rollout.scoring import Scorer
from messages import (
    Int32Array,
    Prompt,
    SampleKey,
    SampleStatus,
    SamplingParams,
    ScoreItem,
    Segment,
    SegmentRef,
    SegmentsPublished,
)
from runtime.bus import Bus

CARRIED_ON = Int32Array()  # new input of a segment that continues the one before it


@dataclass(frozen=True)
class Job:
    """What is to be done for one delivery of a task, training or evaluation alike."""

    group_id: int
    attempt: int
    lease: str
    round: int | None  # None: an evaluation
    min_version: int
    prompt: Prompt
    sampling: SamplingParams
    store: bool  # whether the segments are published
    group_rm: bool  # one score request for the whole group, once all members ended


@dataclass
class Tools:
    """What every group run works with."""

    bus: Bus
    generator: Generator
    scorer: Scorer
    batch_requests: bool
    failed_reward: float | None  # reward of a sample whose scores all failed; None: the sample fails


class GroupRun:
    """Generates and scores the members of one group. Scores are asked for as members end, while others generate."""

    def __init__(self, job: Job, members: Sequence[Member], tools: Tools) -> None:
        self.job = job
        self.members = members
        self.generated_s = 0.0  # from the start to the last token
        self.scored_s = 0.0  # from the last token to the last score
        self._tools = tools
        self._outbox: list[tuple[Member, Answer]] = []
        self._flushing = False
        self._scoring: TaskGroup | None = None
        self._judging = anyio.CancelScope()
        self._generation_over = False
        self._halted = False

    async def run(self, on_generated: Callable[[], None]) -> None:
        """Bring every member to its end, or as far as it was when its round was halted.

        Args:
            on_generated: called once no member needs an engine any more.

        Raises:
            RequestRefused: an engine says that a request is wrong.
            ValueError: an engine's answer makes no sense.
        """
        with (
            self._tools.generator.on_halt(self.job.round, self._stop_waiting_for_judges),
            self._judging,
        ):
            async with anyio.create_task_group() as self._scoring:
                open_members = [member for member in self.members if self._open(member)]
                if not self.job.group_rm:
                    self._start_scoring(self.members)
                await self._generate_all(open_members)
                on_generated()
                if self._halted:
                    self._judging.cancel()
                elif self.job.group_rm and self.generated:
                    self._start_scoring(self.members)

    @property
    def generated(self) -> bool:
        """Whether every member has all its tokens, or failed."""
        return all(member.finished or member.status is SampleStatus.FAILED for member in self.members)

    @property
    def complete(self) -> bool:
        """Whether every member is finished and scored, or failed."""
        return self.generated and not any(member.unscored for member in self.members)

    def _stop_waiting_for_judges(self) -> None:
        """Called on a halt. Generation ends by itself then, and keeps its tokens."""
        self._halted = True
        if self._generation_over:
            self._judging.cancel()

    async def _generate_all(self, open_members: Sequence[Member]) -> None:
        started = time.monotonic()
        together = [member for member in open_members if self._tools.batch_requests and not member.prefix]
        alone = [member for member in open_members if member.prefix or not self._tools.batch_requests]
        async with anyio.create_task_group() as group:
            for member in alone:
                group.start_soon(self._generate, [member])
            if together:
                await self._generate(together)
        self.generated_s = time.monotonic() - started
        self._generation_over = True

    def _open(self, member: Member) -> bool:
        if not member.finished and tokens_left(member, self.job.sampling.max_new_tokens) <= 0:
            member.status = SampleStatus.TRUNCATED
        return not member.finished

    async def _generate(self, members: Sequence[Member]) -> None:
        job = self.job
        left = tokens_left(members[0], job.sampling.max_new_tokens)
        prompt = job.prompt.prompt_ids.tolist()
        request = Request(
            rid=f"{job.lease}-{members[0].index}",
            input_ids=[prompt + member.prefix for member in members],
            params=job.sampling,
            max_new_tokens=left,
            min_version=job.min_version,
            round=job.round,
        )
        answers = await self._tools.generator.generate(request)
        if answers is None:
            return
        if len(answers) != len(members):
            raise ValueError(f"the engine answered {len(answers)} of {len(members)} prompts")
        self._outbox += zip(members, answers, strict=True)
        await self._flush()

    async def _flush(self) -> None:
        """Store what has ended. Members that end while others are being stored go out together."""
        if self._flushing:
            return
        self._flushing = True
        try:
            while self._outbox:
                ended, self._outbox = self._outbox, []
                segments = [self._segment(member, answer) for member, answer in ended]
                for (member, answer), segment in zip(ended, segments, strict=True):
                    member.continue_with(segment, status_of(answer))
                if not self.job.group_rm:
                    self._start_scoring([member for member, _ in ended])  # while they are being stored
                await self._store([member for member, _ in ended], segments)
        finally:
            self._flushing = False

    def _start_scoring(self, members: Sequence[Member]) -> None:
        unscored = [member for member in members if member.unscored]
        if unscored and not self._halted:
            assert self._scoring is not None
            self._scoring.start_soon(self._score, unscored)

    async def _score(self, members: Sequence[Member]) -> None:
        started = time.monotonic()
        job, rm_type = self.job, self.job.prompt.rm_type
        assert rm_type is not None, "the recipe's rules ask for a reward"
        items = [self._score_item(member) for member in members]
        scores = await self._tools.scorer.score(job.group_id, job.attempt, rm_type, items, group_rm=job.group_rm)
        for member, score in zip(members, scores, strict=True):
            member.take_score(score, failed_reward=self._tools.failed_reward)
        self.scored_s = max(self.scored_s, time.monotonic() - started)

    async def _store(self, members: Sequence[Member], segments: Sequence[Segment]) -> None:
        """Publish the segments that ended together as one data message."""
        seq = 0
        if self.job.store:
            seq = await self._tools.bus.publish(
                SegmentsPublished(
                    group_id=self.job.group_id,
                    attempt=self.job.attempt,
                    lease=self.job.lease,
                    segments=tuple(segments),
                    prompt=self.job.prompt.text,
                    label=self.job.prompt.label,
                )
            )
        for position, (member, segment) in enumerate(zip(members, segments, strict=True)):
            member.stored_at(SegmentRef(seq=seq, position=position), segment)

    def _segment(self, member: Member, answer: Answer) -> Segment:
        key = SampleKey(group_id=self.job.group_id, attempt=self.job.attempt, index=member.index)
        return segment_of(answer, key, CARRIED_ON if member.prefix else self.job.prompt.prompt_ids)

    def _score_item(self, member: Member) -> ScoreItem:
        prompt = self.job.prompt
        return ScoreItem(
            index=member.index,
            prompt=prompt.text,
            response=member.text,
            status=member.status,
            response_len=len(member.prefix),
            label=prompt.label,
            metadata=prompt.metadata,
        )
