"""One prompt group from its task to its end: generate, store, tell of what is stored, score."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import msgspec
from anyio.abc import TaskGroup

from actors.rollout.groups.members import FINISHED, Member, tokens_left
from actors.rollout.groups.scoring import Scorer
from actors.rollout.groups.storing import store
from actors.rollout.groups.tasks import Job
from actors.rollout.requests.sending import Generated, Generator, Request
from actors.rollout.sessions.conversation import Conversation, Encode, GenerateFunction
from actors.rollout.sglang.answers import Answer, segment_of, status_of
from actors.rollout.sglang.streams import Stream
from messages import (
    Int32Array,
    SampleKey,
    SampleStatus,
    SamplingParams,
    ScoreItem,
    Segment,
    SegmentRef,
    SegmentsPublished,
    SegmentsSpilled,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import MessageTooLarge

CARRIED_ON = Int32Array()  # new input of a segment that continues the one before it


@dataclass
class Tools:
    """What every group run works with."""

    bus: Bus
    generator: Generator
    scorer: Scorer
    batch_requests: bool
    converse: GenerateFunction | None  # a user's, in place of one request for each sample
    encode: Encode  # for what it puts between turns
    failed_reward: float | None  # reward of a sample whose scores all failed; None: the sample fails
    talks: set[Conversation]  # whose functions run now


class GroupRun:
    """Generates and scores the members of one group. Scores are asked for as members end, while others generate."""

    def __init__(self, job: Job, members: Sequence[Member], tools: Tools) -> None:
        self.job = job
        self.members = members
        self.generated_s = 0.0  # from the start to the last token
        self.scored_s = 0.0  # from the last token to the last score
        self.spilled_at = time.monotonic()  # or begun
        self._tools = tools
        self._outbox: list[tuple[Member, Segment]] = []
        self._storing = anyio.Lock()
        self._streams: dict[int, Stream] = {}  # newest one by index of the member
        self._talks: list[Conversation] = []
        self._num_requests = 0
        self._num_told = 0  # segments and rewards that an event told of
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
            try:
                async with anyio.create_task_group() as self._scoring:
                    await self._generate_and_score(on_generated)
            finally:
                self._scoring = None

    async def _generate_and_score(self, on_generated: Callable[[], None]) -> None:
        open_members = [member for member in self.members if self._reopened(member) or self._open(member)]
        self._score_ended(self.members)
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
        for talk in self._talks:
            talk.halt()
        if self._generation_over:
            self._judging.cancel()

    def spill(self) -> None:
        """Begin to store what the samples have so far, and to tell of it. Nothing once the group is over."""
        self.spilled_at = time.monotonic()
        if self._scoring is not None and self.job.store and not self._halted:
            self._scoring.start_soon(self._spill)

    async def _spill(self) -> None:
        for member in self.members:
            stream = self._streams.get(member.index)
            if stream is None or stream.ended or not stream.num_new or stream.oldest_version < self.job.min_version:
                continue
            self._receive(member, stream.take(), SampleStatus.ABORTED)
        await self._flush()
        await self._tell()

    async def _tell(self) -> None:
        """Tell of what is stored, if that is more than was told before."""
        job, stored = self.job, [member for member in self.members if member.refs and member.stored]
        num_facts = sum(len(member.refs) + (member.reward is not None) for member in stored)
        if num_facts <= self._num_told or job.round is None:
            return
        self._num_told = num_facts
        spilled = SegmentsSpilled(
            group_id=job.group_id,
            attempt=job.attempt,
            lease=job.lease,
            round=job.round,
            instance=self._tools.bus.name,
            samples=tuple(member.summary() for member in stored),
        )
        await self._tools.bus.publish(spilled)

    async def _generate_all(self, open_members: Sequence[Member]) -> None:
        started = time.monotonic()
        batched, one_by_one = self._tools.batch_requests, self._generate_alone
        if self._tools.converse is not None:
            batched, one_by_one = False, self._converse
        together = [member for member in open_members if batched and not member.prefix]
        alone = [member for member in open_members if member.prefix or not batched]
        async with anyio.create_task_group() as group:
            for member in alone:
                group.start_soon(one_by_one, member)
            if together and await self._generate(together):
                for member in together:
                    group.start_soon(self._generate_alone, member)
        self.generated_s = time.monotonic() - started
        self._generation_over = True

    def _open(self, member: Member) -> bool:
        if not member.finished and tokens_left(member, self.job.sampling.max_new_tokens) <= 0:
            member.status = SampleStatus.TRUNCATED
        return not member.finished

    def _reopened(self, member: Member) -> bool:
        """Have a user's function run again for a sample that has all its turns and no score.

        What it put between them as text is stored nowhere, and is scored, too.
        """
        if self._tools.converse is None or not member.unscored:
            return False
        member.status = SampleStatus.ABORTED
        return True

    async def _generate_alone(self, member: Member) -> None:
        """Generate a sample to its end, over as many requests as it takes."""
        while self._open(member) and await self._generate([member]):
            pass
        self._score_ended([member])  # unless that was done when its tokens came

    async def _converse(self, member: Member) -> None:
        """Have a user's function make a sample, turn by turn."""
        assert self._tools.converse is not None
        max_tokens = self.job.sampling.max_new_tokens
        talk = Conversation(
            self.job.prompt, member, max_tokens=max_tokens, ask=self._ask_for_turn, encode=self._tools.encode
        )
        if self._halted:
            return
        self._talks.append(talk)
        self._tools.talks.add(talk)
        try:
            member.status = await talk.run(self._tools.converse)
        finally:
            self._tools.talks.discard(talk)
        self._score_ended([member])

    async def _ask_for_turn(self, member: Member, stop: Sequence[str] | None, limit: int) -> bool:
        member.turn_status = SampleStatus.ABORTED
        params = self.job.sampling
        if stop is not None:
            params = msgspec.structs.replace(params, stop=tuple(stop))
        return await self._generate([member], params, limit)

    async def _generate(
        self, members: Sequence[Member], params: SamplingParams | None = None, limit: int | None = None
    ) -> bool:
        """Ask an engine once; whether the answer was cut short and may be continued."""
        request = self._request(members, params or self.job.sampling, limit)
        generated = await self._tools.generator.generate(request, self._show(members))
        if generated is None:
            return False
        if len(generated.answers) != len(members):
            raise ValueError(f"the engine answered {len(generated.answers)} of {len(members)} prompts")
        for member, answer in zip(members, generated.answers, strict=True):
            self._streams.pop(member.index, None)
            member.turn_status = status = _status(generated, answer)
            self._receive(member, answer, SampleStatus.ABORTED if self._tools.converse is not None else status)
            if self._tools.converse is not None and status in FINISHED:
                member.end_turn()  # before it is told of
        await self._flush()
        self._score_ended(members)  # also those that ended without tokens
        return generated.cut_short

    def _request(self, members: Sequence[Member], params: SamplingParams, limit: int | None) -> Request:
        job, prompt = self.job, self.job.prompt.prompt_ids.tolist()
        self._num_requests += 1
        return Request(
            rid=f"{job.lease}-{members[0].index}-{self._num_requests}",
            input_ids=[prompt + member.prefix + member.pending for member in members],
            params=params,
            max_new_tokens=limit or tokens_left(members[0], params.max_new_tokens),
            min_version=job.min_version,
            round=job.round,
        )

    def _show(self, members: Sequence[Member]) -> Callable[[Stream], None] | None:
        """Whom to show the stream of a request; none: it is not streamed, as a batch, or what nobody may resume."""
        if len(members) > 1 or not self.job.store:
            return None
        (member,) = members

        def show(stream: Stream) -> None:
            self._streams[member.index] = stream

        return show

    def _receive(self, member: Member, answer: Answer, status: SampleStatus) -> None:
        """Let a sample grow by what an engine sampled; `_flush` stores it."""
        segment = self._segment(member, answer)
        member.continue_with(segment, status)
        if len(segment.response_ids):
            self._outbox.append((member, segment))

    async def _flush(self) -> None:
        """Store what has come. What comes while other things are being stored goes out together, and is scored so."""
        async with self._storing:
            while self._outbox:
                ended, self._outbox = self._outbox, []
                self._score_ended([member for member, _ in ended])  # while they are being stored
                await self._store([member for member, _ in ended], [segment for _, segment in ended])

    def _score_ended(self, members: Sequence[Member]) -> None:
        if not self.job.group_rm:
            self._start_scoring(members)

    def _start_scoring(self, members: Sequence[Member]) -> None:
        unscored = [member for member in members if member.unscored and not member.asked]
        if unscored and not self._halted:
            for member in unscored:
                member.asked = True
            assert self._scoring is not None
            self._scoring.start_soon(self._score, unscored)

    async def _score(self, members: Sequence[Member]) -> None:
        started = time.monotonic()
        job, rm_type = self.job, self.job.prompt.rm_type
        assert rm_type is not None, "the recipe's rules ask for a reward"
        items = [self._score_item(member) for member in members]
        try:
            scores = await self._tools.scorer.score(job.group_id, job.attempt, rm_type, items, group_rm=job.group_rm)
        except MessageTooLarge:
            if job.group_rm or len(members) == 1:
                raise
            half = len(members) // 2
            await self._score(members[:half])
            await self._score(members[half:])
            return
        for member, score in zip(members, scores, strict=True):
            member.take_score(score, failed_reward=self._tools.failed_reward)
        self.scored_s = max(self.scored_s, time.monotonic() - started)

    async def _store(self, members: Sequence[Member], segments: Sequence[Segment]) -> None:
        """Publish the segments that ended together."""
        refs: Sequence[SegmentRef] = [SegmentRef(seq=0, position=position) for position in range(len(segments))]
        if self.job.store:
            message = SegmentsPublished(
                group_id=self.job.group_id,
                attempt=self.job.attempt,
                lease=self.job.lease,
                segments=tuple(segments),
                prompt=self.job.prompt.text,
                label=self.job.prompt.label,
            )
            refs = await store(self._tools.bus, message)
        for member, segment, ref in zip(members, segments, refs, strict=True):
            member.stored_at(ref, segment)

    def _segment(self, member: Member, answer: Answer) -> Segment:
        key = SampleKey(group_id=self.job.group_id, attempt=self.job.attempt, index=member.index)
        if not member.prefix:
            return segment_of(answer, key, self.job.prompt.prompt_ids)
        return segment_of(answer, key, Int32Array(member.pending) if member.pending else CARRIED_ON)

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


def _status(generated: Generated, answer: Answer) -> SampleStatus:
    if generated.cut_short and not (answer.meta_info.finish_reason or {}):
        return SampleStatus.ABORTED
    return status_of(answer)
