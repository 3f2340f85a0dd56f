"""Requests scores for samples from reward workers, and matches the answers."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup, TaskStatus
from msgspec import UNSET

from actors.rollout.samples.failures import FailurePolicy
from actors.rollout.samples.sample import OpenSample, with_sum
from actors.rollout.samples.tasks import GroupTask
from messages import (
    ColumnPublished,
    Float32Array,
    Int32Array,
    SampleKey,
    SampleStatus,
    Score,
    ScoreItem,
    ScoreRequested,
    ScoreRequestsLost,
)
from messages.subjects import OWN_GRADERS, grader_token
from runtime.bus.bus import Bus
from runtime.bus.errors import AlreadyQueued, BusError, MessageTooLarge
from runtime.bus.scoring import ScoreInbox
from runtime.settings.tables.reward import RewardPer, SampleField
from runtime.settings.topology import TOKEN_REWARDS
from runtime.util.formatting import count_of
from runtime.util.rewards import reward_problem

log = structlog.get_logger()

PATIENCE_S = 600.0  # on top of the grading time: waiting in the queue of slow graders is not a failure
REPEAT_S = 5.0  # the bus refuses the repetition while the request is queued or a worker has it
WITHDRAW_S = 1.0  # for removing an unanswered request, also at the end of the actor
MAX_LOSSES = 3  # of one request; then the run's own actors grade it, or its samples fail
REPORTED_LOSSES = 5  # of one grader; reported at this number, and each time it has doubled


class NotGraded(ValueError):
    """The grader gave a text of a generate function no reward."""


class Scorer:
    """Requests scores, with one inbox for all answers.

    Answers are not persistent. If one is lost, e.g. by a crash of the bus server, its request is no longer queued and
    is published again. A worker may also acknowledge a request without an answer. Such losses are counted per grader.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        timeout_s: float,
        max_tries: int,
        graders: Collection[str] = (),
        external: Collection[str] = (),
        clients_of: Callable[[str], tuple[str, ...]] = lambda _: (),
        repeat_s: float = REPEAT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Start without requests.

        Args:
            bus: the bus.
            timeout_s: seconds for grading one sample.
            max_tries: maximum requests for the same samples.
            graders: names of the graders with a queue of their own.
            external: names of those among them that the run's own actors cannot run.
            clients_of: returns the names of the external clients that may grade for a grader.
            repeat_s: seconds after which an unanswered request is published again.
            patience_s: seconds to wait for an answer, in addition to the grading time.
        """
        self.bus = bus
        self._repeat_s = repeat_s
        self._wait_s = timeout_s * max_tries + patience_s
        self._max_tries = max_tries
        self._waiting: dict[str, _Answer] = {}
        self._graders, self._external = frozenset(graders), frozenset(external)
        self._clients_of = clients_of
        self._num_lost: Counter[str] = Counter()  # requests acknowledged without an answer, by grader
        self._inbox: ScoreInbox | None = None

    def waits_for(self) -> str:
        """Describe the missing answers for people; empty if there are none."""
        if not self._waiting:
            return ""
        graders = ", ".join(sorted({answer.grader for answer in self._waiting.values()}))
        return f"answers to {count_of(len(self._waiting), 'score request')} ({graders})"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Receive answers. Never returns."""
        async with self.bus.score_inbox(self._token_of) as self._inbox:
            task_status.started()
            async for given in self._inbox:
                answer = self._waiting.get(given.request_id)
                if answer is not None:  # otherwise the request was replaced, or the answer is a duplicate
                    answer.scores = given.scores
                    answer.arrived.set()

    async def score(self, task: GroupTask, items: Sequence[ScoreItem], *, per: RewardPer = "sample") -> Sequence[Score]:
        """Return the scores of the items in order; after the last try, errors in place of rewards."""
        rm_type = task.prompt.rm_type
        if rm_type is None:  # pure distillation
            return [Score(index=item.index, part=item.part, reward=0.0) for item in items]
        own, num_tries = rm_type not in self._graders, 0
        while num_tries < self._max_tries:
            answer = await self._ask(task, items, rm_type, own=own, per=per)
            if answer.scores is not None and _parts(answer.scores) == _parts(items):
                return answer.scores
            log.warning("scores_missing", group_id=task.group_id, attempt=task.attempt)
            num_tries += 1
            if answer.num_lost >= MAX_LOSSES:
                if own or rm_type in self._external:
                    return _failures(items, f"score request acknowledged without an answer, {MAX_LOSSES} times")
                own, num_tries = True, 0
        return _failures(items, "no answer from a reward worker")

    async def _ask(
        self, task: GroupTask, items: Sequence[ScoreItem], rm_type: str, *, own: bool, per: RewardPer
    ) -> "_Answer":
        assert self._inbox is not None, "run() has started"
        request_id = uuid.uuid4().hex
        token = OWN_GRADERS if own else grader_token(rm_type)
        answer = self._waiting[request_id] = _Answer(rm_type, token)
        request = ScoreRequested(
            request_id=request_id,
            reply_to=self._inbox.reply_to(token),
            own=own,
            group_id=task.group_id,
            attempt=task.attempt,
            rm_type=rm_type,
            group_rm=task.group_rm,
            prompt_keys=task.prompt.keys,
            timeout_s=self._wait_s,
            evaluation=task.round is None,
            per=UNSET if per == "sample" else per,
            items=tuple(items),
        )
        try:
            with anyio.move_on_after(self._wait_s):
                while not answer.arrived.is_set():
                    await self._put(request, answer)
                    if answer.num_lost >= MAX_LOSSES:
                        break
                    with anyio.move_on_after(self._repeat_s):
                        await answer.arrived.wait()
            return answer
        finally:
            del self._waiting[request_id]
            if answer.scores is None and answer.seq:  # 0: never stored by this call, so there is nothing to withdraw
                with anyio.move_on_after(WITHDRAW_S, shield=True):  # its caller may be cancelled
                    await self._withdraw(request, answer.seq)

    def _token_of(self, request_id: str) -> str | None:
        answer = self._waiting.get(request_id)
        return None if answer is None else answer.token

    async def _put(self, request: ScoreRequested, answer: "_Answer") -> None:
        """Publish a request, unless it is still queued. If it was published before, its answer is lost."""
        before, answer.put_at = answer.put_at, time.monotonic()
        try:
            seq = await self.bus.publish(request)
        except AlreadyQueued:
            log.debug("scores_awaited", request_id=request.request_id)
            return
        is_again, answer.seq = answer.seq > 0, seq
        if not is_again or answer.arrived.is_set():
            return
        if self.bus.away_s > 0 or self.bus.back_s < time.monotonic() - before:
            return  # the answer may have been lost with the connection
        answer.num_lost += 1
        await self._note_loss(request)

    async def _note_loss(self, request: ScoreRequested) -> None:
        """Count a loss, and report those of its grader: at REPORTED_LOSSES, and ever less often."""
        grader = request.rm_type
        self._num_lost[grader] += 1
        times, rest = divmod(self._num_lost[grader], REPORTED_LOSSES)
        log.warning("score_request_lost", grader=grader, request_id=request.request_id)
        if rest or times.bit_count() != 1:
            return
        event = ScoreRequestsLost(
            instance=self.bus.name,
            grader=grader,
            num_lost=self._num_lost[grader],
            credentials=() if request.own else await anyio.to_thread.run_sync(self._clients_of, grader),
        )
        try:
            await self.bus.publish(event)
        except BusError as error:
            log.warning("lost_score_requests_not_published", grader=grader, reason=str(error))

    async def _withdraw(self, request: ScoreRequested, seq: int) -> None:
        """Remove an unanswered request from the queue, so that no worker grades it for nothing."""
        try:
            await self.bus.withdraw(seq)
        except BusError as error:
            log.warning("score_request_not_withdrawn", request_id=request.request_id, reason=str(error))


class SampleScoring:
    """Scores of one group, requested once per sample as samples end, or for the whole group at once."""

    def __init__(
        self,
        task: GroupTask,
        scorer: Scorer,
        *,
        policy: FailurePolicy,
        reward_keys: Sequence[str] = (),
        fields: Collection[SampleField] = (),
        per: RewardPer = "sample",
    ) -> None:
        """Start without requests.

        Args:
            task: the task of the group.
            scorer: requests the scores.
            policy: what a sample does whose score failed.
            reward_keys: names of the rewards that a training sample's score must hold.
            fields: further fields of a sample that graders get.
            per: what a list of rewards of one sample is for.
        """
        self.took_s = 0.0  # duration of the longest request in seconds
        self._task = task
        self._scorer = scorer
        self._policy = policy
        self._fields = fields
        self._per: RewardPer = per
        self._reward_keys = () if task.round is None else reward_keys  # evaluations report a single reward
        self._tasks: TaskGroup | None = None
        self._unasked: list[OpenSample] = []  # samples that ended at the same time share a request
        self._halted = False

    def begin(self, tasks: TaskGroup) -> None:
        """Set the task group for the requests."""
        self._tasks = tasks

    def halt(self) -> None:
        """Stop requesting scores."""
        self._halted = True

    def start_ended(self, samples: Sequence[OpenSample]) -> None:
        """Request scores for samples with all their tokens, unless the group is scored as a whole."""
        if not self._task.group_rm:
            self.start(samples)

    def start(self, samples: Sequence[OpenSample]) -> None:
        """Request the missing scores that are not requested yet."""
        unscored = [sample for sample in samples if sample.unscored and not sample.score_requested]
        if not unscored or self._halted:
            return
        for sample in unscored:
            sample.score_requested = True
            if sample.own_score is None:
                continue
            if sample.own_score.token_rewards is UNSET:
                sample.take_score(sample.own_score, policy=self._policy, reward_keys=self._reward_keys)
            else:
                assert self._tasks is not None
                self._tasks.start_soon(self._take, sample, sample.own_score)
        unscored = [sample for sample in unscored if sample.own_score is None]
        if not unscored:
            return
        assert self._tasks is not None
        if not self._unasked:
            self._tasks.start_soon(self._score_unasked)
        self._unasked += unscored

    async def _score_unasked(self) -> None:
        samples, self._unasked = self._unasked, []
        await self._score(samples)

    async def _score(self, samples: Sequence[OpenSample]) -> None:
        started, task = time.monotonic(), self._task
        items = [_item(task, sample, self._fields) for sample in samples]
        try:
            scores = await self._scorer.score(task, items, per=self._per)
        except MessageTooLarge:
            if task.group_rm or len(samples) == 1:
                raise
            half = len(samples) // 2
            await self._score(samples[:half])
            await self._score(samples[half:])
            return
        for sample, score in zip(samples, scores, strict=True):
            await self._take(sample, score)
        self.took_s = max(self.took_s, time.monotonic() - started)

    async def _take(self, sample: OpenSample, score: Score) -> None:
        """Give a sample its score. Rewards per token are stored first, so that no scored sample lacks them."""
        column: dict[str, int] = {}
        if score.token_rewards is not UNSET:
            score = with_sum(score, sample.buffer.num_tokens, allowed=self._per != "sample")
        elif score.reward is not None and (problem := reward_problem(score.reward)) is not None:
            error = f"returned {score.reward}, {problem}"
            score = msgspec.structs.replace(score, reward=None, error=error, cause="bad_answer")
        if score.cause == "bad_answer":
            where = f"{self._task.prompt.rm_type or 'the grader'} on sample {sample.index}"
            score = msgspec.structs.replace(score, error=f"{where}: {score.error}")
        if score.token_rewards is not UNSET and self._task.store and not sample.is_baseline:
            key = SampleKey(
                group_id=self._task.group_id, attempt=self._task.attempt, index=sample.index, part=sample.part
            )
            message = ColumnPublished(sample=key, column=TOKEN_REWARDS, values=score.token_rewards)
            column[TOKEN_REWARDS] = await self._scorer.bus.publish(message)
        sample.take_score(score, policy=self._policy, reward_keys=self._reward_keys)
        if sample.finished:
            sample.columns = {**sample.columns, **column}


def _item(task: GroupTask, sample: OpenSample, fields: Collection[SampleField]) -> ScoreItem:
    """Return a sample as a grader sees it; prompt fields are empty if the prompt is stored separately."""
    stored, prompt, buffer = bool(task.prompt.keys), task.prompt, sample.buffer
    return ScoreItem(
        index=sample.index,
        prompt="" if stored else prompt.text,
        response=sample.text,
        status=sample.status,
        response_len=buffer.num_tokens,
        label=None if stored else prompt.label,
        metadata={} if stored else prompt.metadata,
        sample_metadata=dict(sample.metadata) or UNSET,
        prompt_ids=sample.prompt_of(prompt.prompt_ids) if "prompt_ids" in fields else UNSET,
        tokens=Int32Array(buffer.ids) if "tokens" in fields else UNSET,
        log_probs=Float32Array(buffer.log_probs) if "log_probs" in fields else UNSET,
        turns=sample.turn_spans() if "turns" in fields else UNSET,
    )


async def grade_text(scorer: Scorer, task: GroupTask, index: int, text: str, prompt: str | None) -> float:
    """Return the reward that the grader of the row gives a text.

    Args:
        scorer: requests the score.
        task: of the row.
        index: of the sample whose function asks.
        text: the response.
        prompt: as the grader sees it; None: the row's.

    Raises:
        NotGraded: the grader gave no reward.
        ValueError: it grades whole groups.
    """
    if task.group_rm:
        raise ValueError("reward.group_rm: the grader grades whole groups")
    sample = OpenSample(index=index, prompt_len=0, status=SampleStatus.COMPLETED, dialogue=text)
    item = _item(task, sample, ())
    (score,) = await scorer.score(task, [item if prompt is None else msgspec.structs.replace(item, prompt=prompt)])
    if score.reward is None:
        raise NotGraded(f"the grader gave no reward: {score.error}")
    return score.reward


def _parts(scored: Sequence[Score | ScoreItem]) -> list[tuple[int, int]]:
    return [(one.index, one.part) for one in scored]


def _failures(items: Sequence[ScoreItem], error: str) -> list[Score]:
    return [Score(index=item.index, part=item.part, error=error, cause="worker_lost") for item in items]


class _Answer:
    def __init__(self, grader: str, token: str) -> None:
        self.grader = grader
        self.token = token  # of the workers that may answer
        self.arrived = anyio.Event()
        self.scores: Sequence[Score] | None = None
        self.seq = 0  # of the newest copy of the request in the work stream
        self.put_at = 0.0  # monotonic time of the newest attempt to publish it
        self.num_lost = 0  # times that it was acknowledged without an answer
