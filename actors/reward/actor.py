"""The reward actor: pulls score requests, grades them in separate processes, replies with the scores."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from actors.reward.answers import StoredPrompts, answers_of, sample_of
from actors.reward.batches import Batches
from actors.reward.grades import Graded, GraderSpec, Hello
from actors.reward.gradings import CallLimits, RateLimit, graded_again, summed
from actors.reward.judging.keys import KeyProblem, remote_variables
from actors.reward.judging.requests import FAILED
from actors.reward.pool import GraderPool, PoolSettings, open_pool
from actors.reward.recipe import graders_of, retried_causes
from actors.reward.samples import GradedSample
from actors.reward.sandbox import CODE, call_s, sandbox_of
from messages import EngineRequestsFailed, UserFunctionRaised
from messages.calls import ScoresGiven
from messages.data import PromptStored
from messages.plain import clipped
from messages.subjects import OWN_GRADERS, grader_token
from messages.work import ScoreRequested
from runtime.bus.bus import Bus
from runtime.bus.consumer import Deliveries, Delivery
from runtime.bus.errors import MessageRefused, PayloadLost
from runtime.bus.scoring import ACK_WAIT_S
from runtime.functions.load import is_plugin
from runtime.process.actor import Actor, InputError
from runtime.process.first_calls import FirstCalls
from runtime.process.user_tracebacks import UserTracebacks
from runtime.settings.tables.reward import GraderLimits
from runtime.settings.topology import Topology, own_graders
from runtime.util.formatting import count_of, duration

if TYPE_CHECKING:
    from actors.reward.judging.judges import Judges

GIVE_BACK_TIMEOUT_S = 1.0

log = structlog.get_logger()


FIRST_GRADE_KEY: Final = "reward.graded"  # exists once any grade of this run succeeded


class FirstGrades:
    """Counts grader calls for training samples until the run's first successful grade."""

    def __init__(self, bus: Bus) -> None:
        self._calls = FirstCalls(bus, FIRST_GRADE_KEY, "calls of graders")

    async def begin(self) -> None:
        """Read whether an earlier process of this run had a successful grade."""
        await self._calls.begin()

    async def note(self, grader: str, grades: Sequence[Graded], *, group_id: int, one_call: bool) -> None:
        """Count the grades of one request.

        Args:
            grader: name of the grader.
            grades: one per sample.
            group_id: prompt group of the samples.
            one_call: whether all grades come from one call.

        Raises:
            InputError: the first calls of this run all failed; names the grader and its last error.
        """
        if self._calls.is_over or not grades:
            return
        failures = [graded.error for graded in grades if graded.error is not None]
        if len(failures) < len(grades):
            await self._calls.succeeded()
            return
        raised = [graded.error for graded in grades if graded.error is not None and not _is_slow(graded)][
            : 1 if one_call else None
        ]
        if not raised:
            return
        if why := await self._calls.failed(group_id, len(raised)):
            raise InputError(f"{why}; {grader}: {raised[-1]}. Fix the grader; the same command then resumes the run")


def _is_slow(graded: Graded) -> bool:
    """Whether the grader or judge was only too slow or busy, which may be due to load on its machine."""
    return graded.cause in ("timeout", "rate_limited") or (graded.error or "").startswith(f"{FAILED}: ")


class RewardActor(Actor):
    """Answers score requests with rewards or errors. Stateless.

    A crash costs a redelivery after the ack wait: another actor, or the restarted one, grades the request again.
    Graders run in separate processes, so none can block this actor. The run ends if its first grader calls all fail.
    """

    reads = (ScoreRequested, PromptStored)
    writes = (ScoresGiven, EngineRequestsFailed, UserFunctionRaised)

    def __init__(self, topology: Topology, bus: Bus, *, ack_wait_s: float = ACK_WAIT_S) -> None:
        """Start without processes.

        Args:
            topology: the topology, with its recipe.
            bus: the bus.
            ack_wait_s: seconds after which the requests of a killed actor are redelivered.
        """
        config = topology.reward
        self._bus = bus
        self._topology = topology
        self._ack_wait_s = ack_wait_s
        self._settings = PoolSettings(
            hello=Hello(
                graders=graders_of(topology), reward_key=config.reward_key, cpu_s=config.cpu_s or 2 * config.timeout_s
            ),
            sandbox=sandbox_of(topology),
            num_processes=config.processes,
            at_once=config.concurrency,
            timeout_s=config.timeout_s,
            max_tries=config.max_tries,
        )
        self._names = own_graders(topology)
        self._sums = config.sums
        self._of_eval_alone = {item.rm_type for item in topology.eval} - {item.rm_type for item in topology.data}
        self._limits = {
            name: CallLimits(
                timeout_s=call_s(config, name),
                rate=None if own.requests_per_s is None else RateLimit(own.requests_per_s),
            )
            for name, own in ({CODE: GraderLimits()} | config.limits).items()
        }
        self._retried = retried_causes(config)
        self._batches: dict[str, Batches] = {}
        self._pool: GraderPool | None = None
        self._judges: Judges | None = None
        self._first = FirstGrades(bus)
        self._tracebacks = UserTracebacks(bus)
        self._counts: Counter[str] = Counter()
        self._prompts = StoredPrompts(bus)
        self._in_hand: dict[str, tuple[str, float]] = {}  # grader and start time, by request

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Answer requests until cancelled.

        Raises:
            GraderUnusableError: a grader that the recipe names cannot be used.
            GraderStartError: grader processes do not start.
            InputError: the first grades of the run all failed.
        """
        await self._first.begin()
        async with AsyncExitStack() as opened:
            self._name_remote()
            at_once = await self._open_judges(opened)
            self._pool = await opened.enter_async_context(open_pool(self._settings))
            self._batches = {
                name: Batches(
                    self._pool,
                    GraderSpec(name=self._names[name], group=True),
                    size=own.batch,
                    wait_s=own.wait_s,
                    limits=self._limits[name],
                )
                for name, own in self._topology.reward.limits.items()
                if own.batch is not None
            }
            queues = {
                token: await opened.enter_async_context(self._bus.consume_scoring(token, ack_wait_s=self._ack_wait_s))
                for token in (*map(grader_token, (*self._names, *self._sums)), *at_once, OWN_GRADERS)
            }
            tasks = await opened.enter_async_context(anyio.create_task_group())
            for batches in self._batches.values():
                tasks.start_soon(batches.run)
            for token, deliveries in queues.items():
                for _ in range(at_once.get(token) or self._requests_at_once(self._pool, token, at_once)):
                    tasks.start_soon(self._answer_all, self._pool, deliveries, token)
            task_status.started()

    def stats(self) -> dict[str, float]:
        """Count requests and scores since the start."""
        requests = {f"num_{name}": float(self._counts[name]) for name in ("requests", "late_requests")}
        return requests | (self._pool.stats() if self._pool else {}) | (self._judges.stats() if self._judges else {})

    def waits_for(self) -> str:
        if not self._in_hand:
            return "score requests"
        grader, began = min(self._in_hand.values(), key=lambda item: item[1])
        running = count_of(len(self._in_hand), "score request")
        oldest = f"{grader} has been grading the oldest for {duration(time.monotonic() - began)}"
        judges = self._judges.waits_for() if self._judges else ""
        return "; ".join(filter(None, [f"graders: {running}; {oldest}", judges]))

    async def _open_judges(self, opened: AsyncExitStack) -> dict[str, int]:
        """Open the judges; return the number of score requests at a time, by the token of each.

        The environment of grader processes then names the endpoint of the judges.
        """
        if not self._topology.reward.judges:
            return {}
        from actors.reward.judging.judges import open_judges, requests_at_once  # imports an HTTP client

        self._judges = await opened.enter_async_context(open_judges(self._topology, self._bus))
        sandbox = msgspec.structs.replace(
            self._settings.sandbox, also={**self._settings.sandbox.also, **self._judges.env}
        )
        self._settings = replace(self._settings, sandbox=sandbox)
        names = self._topology.reward.judges
        return {grader_token(name): requests_at_once(self._topology, name) for name in names}

    def _name_remote(self) -> None:
        """Name the server of `remote_rm` and its key in the environment of grader processes.

        Raises:
            InputError: the key cannot be read.
        """
        reward = self._topology.reward
        try:
            named = remote_variables(reward)
        except KeyProblem as error:
            raise InputError(f"reward.{error.setting} = {error.value!r}: {error}") from error
        sandbox = msgspec.structs.replace(self._settings.sandbox, also={**self._settings.sandbox.also, **named})
        self._settings = replace(self._settings, sandbox=sandbox)

    def _requests_at_once(self, pool: GraderPool, token: str, of_judges: Mapping[str, int]) -> int:
        """Number of score requests in hand that keep the processes of a grader, or of the parts of a sum, busy."""
        group = self._topology.reward.group_rm
        keys = [key for key in self._names if grader_token(key) == token]
        keys += [part for name, weights in self._sums.items() if grader_token(name) == token for part in weights]
        names = [self._names[key] for key in keys if key in self._names] or [""]
        calls = max(pool.calls_at_once(GraderSpec(name=name, group=of)) for name in names for of in {group, False})
        of_batches = (self._batches[key].requests_at_once for key in keys if key in self._batches)
        return max([calls, *of_batches, *(of_judges.get(grader_token(key), 0) for key in keys)])

    async def _answer_all(self, pool: GraderPool, deliveries: Deliveries[ScoreRequested], token: str) -> None:
        async for delivery in deliveries:
            request = delivery.message
            with structlog.contextvars.bound_contextvars(group_id=request.group_id, request_id=request.request_id):
                await self._answer(pool, delivery, token)

    async def _answer(self, pool: GraderPool, delivery: Delivery[ScoreRequested], token: str) -> None:
        request = delivery.message
        self._counts["requests"] += 1
        self._in_hand[request.request_id] = (request.rm_type, time.monotonic())
        try:
            if not self._bus.takes_scores(request.reply_to, token):
                place = clipped(request.reply_to, 80)
                await delivery.reject(f"reply_to {place!r} takes no answers of the grader {token}")
                return
            async with delivery.heartbeat():
                grades = await self._grade(pool, request)
                if grades is not None:
                    await self._send(request, grades)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(GIVE_BACK_TIMEOUT_S, shield=True):
                await delivery.redeliver()  # hands it to another actor at once instead of after the ack wait
            raise
        finally:
            self._in_hand.pop(request.request_id, None)
        await delivery.ack()

    async def _send(self, request: ScoreRequested, grades: Sequence[Graded]) -> None:
        """Send the scores. If they exceed the message size, send them without details, or else as failures."""
        for scores in answers_of(request, grades):
            try:
                await self._bus.notify(scores, to=request.reply_to)
            except MessageRefused as error:
                log.warning("answer_too_large", reason=str(error))
            else:
                return

    async def _grade(self, pool: GraderPool, request: ScoreRequested) -> list[Graded] | None:
        """Grade a request; return None if its caller no longer waits."""
        name, group = request.rm_type, request.group_rm
        if is_plugin(name) and name not in self._names:
            log.warning("grader_refused", grader=name)
            reason = f"{name!r} is neither a built-in grader nor named by the topology"
            return [Graded(error=reason, cause="refused") for _ in request.items]
        with anyio.move_on_after(request.timeout_s or math.inf):
            try:
                items = await self._prompts.items_of(request)
            except PayloadLost as error:
                return [Graded(error=f"prompt: {error}", cause="worker_lost") for _ in request.items]
            samples = [sample_of(item, request) for item in items]
            weights = self._sums.get(name)
            if weights is None:
                grades = await self._grade_by(name, pool, samples, group=group)
            else:
                grades = await summed(name, weights, lambda part: self._grade_by(part, pool, samples, group=group))
            if name not in self._of_eval_alone:
                one_call = group and not any(self._is_judge(part) for part in weights or (name,))
                shown = self._names.get(name, name)
                await self._first.note(shown, grades, group_id=request.group_id, one_call=one_call)
            return grades
        self._counts["late_requests"] += 1
        log.warning("score_request_late", num_samples=len(request.items))
        return None

    async def _grade_by(
        self, name: str, pool: GraderPool, samples: Sequence[GradedSample], *, group: bool
    ) -> list[Graded]:
        """Grade samples by one judge or one function; return one grade per sample, in order."""
        if self._judges is not None and name in self._judges:
            grades = await self._judges.grade(name, samples, pool)
            function = self._topology.reward.judges[name].parser
        else:
            grades, function = (
                await self._grade_by_function(name, pool, samples, group=group),
                self._names.get(name, name),
            )
        if is_plugin(function):
            for graded in grades:
                await self._tracebacks.publish(function, graded.trace)
        return grades

    async def _grade_by_function(
        self, name: str, pool: GraderPool, samples: Sequence[GradedSample], *, group: bool
    ) -> list[Graded]:
        spec, limits = GraderSpec(name=self._names.get(name, name), group=group), self._limits.get(name)
        batches = self._batches.get(name)
        timeout_s = self._settings.timeout_s if limits is None else limits.timeout_s
        grades = await graded_again(
            (lambda some: pool.grade(spec, some, limits)) if batches is None else batches.grade,
            samples,
            causes=self._retried,
            max_tries=self._settings.max_tries,
            max_wait_s=timeout_s,
            group=group,
        )
        return [self._explained(graded, timeout_s) for graded in grades] if is_plugin(spec.name) else grades

    def _explained(self, graded: Graded, timeout_s: float) -> Graded:
        """Add to a timeout that judges, for which the function may have waited, limited the rate."""
        limited = "" if self._judges is None or graded.cause != "timeout" else self._judges.rate_limited(timeout_s)
        return msgspec.structs.replace(graded, error=f"{graded.error}; meanwhile {limited}") if limited else graded

    def _is_judge(self, name: str) -> bool:
        return self._judges is not None and name in self._judges
