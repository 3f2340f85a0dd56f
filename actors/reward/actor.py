"""The reward actor: pulls score requests, grades them in processes, answers whoever asked."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskStatus

from actors.reward.frames import Graded, GraderSpec, Hello
from actors.reward.pool import GraderPool, PoolSettings, open_pool
from actors.reward.samples import GradedSample
from messages.calls import Score, ScoresGiven
from messages.work import ScoreItem, ScoreRequested
from runtime.actor import Actor
from runtime.bus import Bus, Deliveries, Delivery
from runtime.topology import RewardConfig

DURABLE = "reward"
ACK_WAIT_S = 10.0
REQUESTS_PER_PROCESS = 4  # in hand: enough to keep processes busy, few enough to leave work for other actors
MAX_ACK_PENDING = 4096  # over all reward actors
MEMORY_LIMIT_BYTES = 8 << 30  # of one grader process

log = structlog.get_logger()


class RewardActor(Actor):
    """Answers score requests with rewards or reasons. Keeps no state.

    A crash costs a redelivery after the ack wait: another actor, or this one again, grades the request anew. Graders
    run in processes of their own, so none can stop this actor.
    """

    reads = (ScoreRequested,)
    writes = (ScoresGiven,)

    def __init__(
        self, config: RewardConfig, bus: Bus, *, graders: Sequence[str] = (), base_dirs: Sequence[Path] = ()
    ) -> None:
        """Args: graders, the rm_types known at start, which must be usable; base_dirs, of relative plug-in files."""
        self._bus = bus
        self._num_tasks = config.processes * REQUESTS_PER_PROCESS
        self._settings = PoolSettings(
            hello=Hello(
                graders=tuple(GraderSpec(name=name, group=config.group_rm) for name in graders),
                base_dirs=tuple(str(base) for base in base_dirs),
                reward_key=config.reward_key,
                memory_limit_bytes=MEMORY_LIMIT_BYTES,
            ),
            num_processes=config.processes,
            timeout_s=config.timeout_s,
            max_tries=config.max_tries,
        )
        self._pool: GraderPool | None = None
        self._counts: Counter[str] = Counter()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Answer requests until cancelled.

        Raises:
            GraderStartError: a grader that was known at start cannot be used.
        """
        async with (
            open_pool(self._settings) as self._pool,
            self._bus.consume(
                ScoreRequested, durable=DURABLE, ack_wait_s=ACK_WAIT_S, max_ack_pending=MAX_ACK_PENDING
            ) as deliveries,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(self._num_tasks):
                tasks.start_soon(self._answer_all, self._pool, deliveries)
            task_status.started()

    def stats(self) -> dict[str, float]:
        """Numbers since the start."""
        requests = {f"num_{name}": float(self._counts[name]) for name in ("requests", "late_requests")}
        return requests | (self._pool.stats() if self._pool else {})

    async def _answer_all(self, pool: GraderPool, deliveries: Deliveries[ScoreRequested]) -> None:
        async for delivery in deliveries:
            request = delivery.message
            with structlog.contextvars.bound_contextvars(group_id=request.group_id, request_id=request.request_id):
                await self._answer(pool, delivery)

    async def _answer(self, pool: GraderPool, delivery: Delivery[ScoreRequested]) -> None:
        request = delivery.message
        self._counts["requests"] += 1
        grades: list[Graded] | None = None
        async with delivery.heartbeat():
            with anyio.move_on_after(request.deadline_s - time.time()):
                spec = GraderSpec(name=request.rm_type, group=request.group_rm)
                grades = await pool.grade(spec, [_sample_of(item) for item in request.items])
            if grades is None:
                self._counts["late_requests"] += 1
                log.warning("score_request_late", num_samples=len(request.items))
            else:
                await self._bus.notify(_answer_of(request, grades), to=request.reply_to)
        await delivery.ack()


def _sample_of(item: ScoreItem) -> GradedSample:
    return GradedSample(
        index=item.index,
        part=item.part,
        prompt=item.prompt,
        response=item.response,
        status=str(item.status),
        response_len=item.response_len,
        label=item.label,
        metadata=item.metadata,
    )


def _answer_of(request: ScoreRequested, grades: Sequence[Graded]) -> ScoresGiven:
    scores = tuple(
        Score(index=item.index, part=item.part, reward=graded.reward, details=graded.details, error=graded.error)
        for item, graded in zip(request.items, grades, strict=True)
    )
    failed = [score.error for score in scores if score.error is not None]
    if failed:
        log.warning("scores_failed", num_failed=len(failed), num_scores=len(scores), first=failed[0])
    return ScoresGiven(request_id=request.request_id, scores=scores)
