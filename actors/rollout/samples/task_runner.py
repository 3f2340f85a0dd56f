"""Runs the tasks of training groups and evaluations: from the delivery to the published ending."""

import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import anyio
import structlog

from actors.rollout.engines.target import TargetWeights
from actors.rollout.samples.conversation import FunctionFailed, GenerateFunction
from actors.rollout.samples.endings import Ending, Endings, publish_eval
from actors.rollout.samples.evaluation_function import SetEvaluation
from actors.rollout.samples.function_outcomes import FunctionOutcomes, traceback_of
from actors.rollout.samples.generate_function import KeyedFunction
from actors.rollout.samples.group import GroupRun
from actors.rollout.samples.must_end import GiveUp
from actors.rollout.samples.partial import Inheritance
from actors.rollout.samples.sample import OpenSample, fresh_samples
from actors.rollout.samples.slots import GroupSlots, Slots
from actors.rollout.samples.tasks import eval_task, training_task
from actors.rollout.samples.tools import GroupDependencies
from actors.rollout.sglang.errors import EnginesUnwilling, RequestRefused
from messages import EvalRequested, EvalSetRequested, Int32Array, Prompt, RolloutRequested, SampleSummary
from runtime.bus.bus import Bus
from runtime.bus.consumer import MAX_PREFETCH, Delivery
from runtime.bus.errors import MessageRefused, PayloadLost
from runtime.data.stored_prompts import prompts_of_set, with_prompt
from runtime.process.actor import InputError
from runtime.settings.derived import eval_request, needs_baseline
from runtime.settings.placement import num_engines
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from runtime.util.formatting import count_of

log = structlog.get_logger()

ACK_WAIT_S = 5.0  # tasks of a crashed rollout actor are redelivered to another one after this time
# permanent errors of a task: every delivery would fail in the same way
POISON = (RequestRefused, MessageRefused, ValueError)
EVAL_MAX_TRIES = 5  # deliveries of an evaluation item that keeps ending aborted
MAX_PASSES = 3  # deliveries of a resumed group to other actors than the one that has its prefix
MAX_HELD_PASSES = 40  # the same for one whose functions are held: another actor has to run them again
PASS_S = 0.25  # before such a group is delivered again
GIVE_BACK_S = 2.0  # to give tasks back at shutdown
STORE_S = 10.0  # to store samples before their tasks are handed over
HANDED_OVER_S = 1.0  # before a task that is handed over comes again: the buffer reads what was stored of it
LOOKS_PER_SPILL = 4  # checks per `spill_every_s` for groups that are due to spill
NO_PROMPT: Final = Prompt(data="", row=0, text="", prompt_ids=Int32Array())
EVAL_SLOTS_SHARE = 4  # evaluation may hold 1/4 of the slots while a round is running

Continued = Callable[[int, Sequence[SampleSummary]], Awaitable[tuple[SampleSummary, ...]]]
AnyDelivery = Delivery[RolloutRequested] | Delivery[EvalRequested] | Delivery[EvalSetRequested]


async def as_carried(_group_id: int, carried: Sequence[SampleSummary]) -> tuple[SampleSummary, ...]:
    """Go on from what a group carries."""
    return tuple(carried)


class TaskRunner:
    """Pulls tasks as slots become free, and publishes how each ended.

    Args:
        topology: settings of the run.
        bus: source of the tasks.
        pool: name of the engine pool.
        target: the target weights; tells which evaluations have ended.
        is_alone: the run has no other rollout actor: tasks that wait here would wait anywhere.
        ack_wait_s: time after which the tasks of a crashed rollout actor are redelivered to another one.
        continued: returns what a group's samples go on from, by what the group carries.
    """

    def __init__(
        self,
        topology: Topology,
        bus: Bus,
        pool: str,
        target: TargetWeights,
        *,
        is_alone: bool = True,
        ack_wait_s: float = ACK_WAIT_S,
        continued: Continued = as_carried,
    ) -> None:
        engines = topology.engines[pool]
        self._topology = topology
        self._bus = bus
        self.outcomes = FunctionOutcomes(bus)
        self._pool = pool
        self._target = target
        self._ack_wait_s, self._continued = ack_wait_s, continued
        self._num_slots = engines.concurrency * num_engines(engines)  # the most; engines under pressure get fewer
        self._is_alone = is_alone
        at_first = engines.concurrency if is_alone else 0
        self.slots = Slots(at_first)
        # without overlap nothing else runs during an evaluation
        self._eval_share = EVAL_SLOTS_SHARE if topology.rollout.eval_overlap else 1
        # evaluation functions have slots of their own: they ask for the next sample only when they have seen others
        self._eval_slots, self._set_slots = map(Slots, self._slots_of_evals(at_first))
        self._evaluations: dict[tuple[int, str], SetEvaluation] = {}  # by step and set: with a running function
        self._sets_at_work: dict[tuple[int, str], anyio.Event] = {}  # running tasks of sets -> set when it has ended
        self._inheritance = Inheritance(bus)
        self._num_groups = 0
        self._runs: dict[GroupRun, None] = {}  # runs of training groups, in their order
        self.num_pulled = 0  # running tasks, training and evaluation
        # running attempts: (group, attempt) -> set when it has ended
        self._at_work: dict[tuple[int, int], anyio.Event] = {}
        self._scopes: dict[anyio.CancelScope, None] = {}  # of running tasks, in their order
        self._given_up: set[AnyDelivery] = set()  # tasks that were ended though a function of the user goes on
        # ended attempts whose tasks may come again: those with a lost acknowledgement, and those fetched ahead
        self._ended = deque[tuple[int, int]](maxlen=self._num_slots + MAX_PREFETCH)

    def stats(self) -> dict[str, float]:
        """Return the number of completed groups, and the slots."""
        return {"groups": self._num_groups, "slots_taken": self.slots.taken, "slots": self.slots.total}

    def resize(self, total: int) -> None:
        """Set the number of samples in flight, those of evaluations apart."""
        self.slots.resize(total)
        for slots, number in zip((self._eval_slots, self._set_slots), self._slots_of_evals(total), strict=True):
            slots.resize(number)

    async def pull_groups(self, tools: GroupDependencies, need: Callable[[int], None]) -> None:
        """Run the tasks of training groups. Never returns.

        Args:
            tools: what groups use.
            need: called with the weight version of each task, before another task starts.
        """
        size = self._topology.rollout.n_samples_per_prompt + needs_baseline(self._topology.algorithm)
        durable = f"rollout-{self._pool}"
        async with (
            self._bus.consume(
                RolloutRequested,
                durable=durable,
                ack_wait_s=self._ack_wait_s,
                max_ack_pending=self._num_slots,
                # alone: engines may wait for weights, and a redelivery looks like one after a crash
                prefetch_by_rate=self._is_alone,
                keeps_prefetched=self._is_alone,
            ) as deliveries,
            anyio.create_task_group() as group,
        ):
            while True:
                slots = self.slots.reserve(size)
                await slots.granted(size if tools.batch_requests else 1)
                deliveries.prefetch = self.slots.free // size  # groups that can start too are fetched together
                delivery = await anext(deliveries)
                while self._prefers_another(delivery):
                    await delivery.redeliver(PASS_S if delivery.message.held else 0.0)
                    delivery = await anext(deliveries)
                need(delivery.message.min_version)
                group.start_soon(self._run_group, tools, delivery, slots)

    def _prefers_another(self, delivery: Delivery[RolloutRequested]) -> bool:
        """Whether to let another rollout actor have a group, which holds its functions or has its tokens in its caches.

        That one may have no slot now, or be gone: after some passes any takes it.
        """
        prefers = delivery.message.prefers or self._bus.name
        passes = MAX_HELD_PASSES if delivery.message.held else MAX_PASSES
        return prefers != self._bus.name and delivery.num_delivered <= passes

    async def pull_evals(self, tools: GroupDependencies, need: Callable[[int], None]) -> None:
        """Run the items of evaluations. Never returns. Arguments as of `pull_groups`."""
        largest = max((item.n_samples_per_eval_prompt for item in self._topology.eval), default=1)
        durable = f"eval-{self._pool}"
        async with (
            self._bus.consume(
                EvalRequested, durable=durable, ack_wait_s=self._ack_wait_s, max_ack_pending=self._num_slots
            ) as deliveries,
            anyio.create_task_group() as group,
        ):
            while True:
                taken = self._eval_slots.reserve(largest)
                await taken.granted(largest if tools.batch_requests else 1)
                delivery = await anext(deliveries)
                need(delivery.message.version)
                group.start_soon(self._run_eval, tools, delivery, taken)

    async def pull_eval_sets(self, tools: GroupDependencies, need: Callable[[int], None]) -> None:
        """Run evaluation functions, each for a whole set. Does not return unless there are none.

        Arguments as of `pull_groups`.
        """
        if not tools.eval_functions:
            return
        async with (
            self._bus.consume(
                EvalSetRequested,
                durable=f"eval-set-{self._pool}",
                ack_wait_s=self._ack_wait_s,
                max_ack_pending=len(self._topology.eval),
            ) as deliveries,
            anyio.create_task_group() as group,
        ):
            async for delivery in deliveries:
                need(delivery.message.version)
                group.start_soon(self._run_eval_set, tools, delivery)

    def _slots_of_evals(self, total: int) -> tuple[int, int]:
        """Return the slots of sets without and with an evaluation function: half each if there are both."""
        if not total:
            return 0, 0
        number = max(1, total // self._eval_share)
        if len({item.custom_evaluation is None for item in self._topology.eval}) < 2:
            return number, number
        return max(1, number - number // 2), max(1, number // 2)

    def waits_for(self) -> str:
        """Describe evaluation functions that generate nothing; empty if there are none."""
        idle = [name for (_, name), evaluation in self._evaluations.items() if not evaluation.is_waiting]
        return f"the evaluation function of {', '.join(sorted(idle))}, outside of sample" if idle else ""

    async def _run_group(
        self, tools: GroupDependencies, delivery: Delivery[RolloutRequested], slots: GroupSlots
    ) -> None:
        task = delivery.message
        key = task.group_id, task.attempt
        endings = Endings(task, uuid.uuid4().hex, self._bus.name)
        with structlog.contextvars.bound_contextvars(group_id=task.group_id, attempt=task.attempt):
            async with self._pulled(delivery), slots:
                # this process was stalled or without the bus for longer than the ack wait
                if delivery.num_delivered > 1 and key in self._ended:
                    log.warning("task_came_again", num_delivered=delivery.num_delivered)
                elif (ended := self._at_work.get(key)) is not None:
                    log.warning("task_came_again", num_delivered=delivery.num_delivered)
                    slots.stop()
                    await ended.wait()
                else:
                    ended = self._at_work[key] = anyio.Event()
                    try:
                        await endings.publish(self._bus, await self._ending(tools, delivery, endings, slots))
                    finally:
                        del self._at_work[key]
                        ended.set()
                    self._ended.append(key)
                    self._num_groups += 1
                await delivery.ack()

    async def _ending(
        self, tools: GroupDependencies, delivery: Delivery[RolloutRequested], endings: Endings, slots: GroupSlots
    ) -> Ending:
        carried = await self._continued(delivery.message.group_id, await self._inheritance.carried(delivery))
        if tools.generator.running.halted(delivery.message.round):
            return endings.aborted(carried)
        try:
            task = await with_prompt(self._bus, delivery.message)
        except PayloadLost as error:
            if tools.episodes is not None:
                tools.episodes.let_go([delivery.message.group_id], "its prompt is lost")
            return endings.failed(f"prompt: {error}")
        endings = replace(endings, task=task)
        held = None if tools.episodes is None else tools.episodes.take(task.group_id, carried)
        samples = await self._inheritance.samples(task, carried, held)

        async def give_up(reason: str) -> None:
            await self._give_up(delivery, partial(endings.publish, self._bus, endings.failed(reason)))

        group_rm = self._topology.reward.group_rm
        run = GroupRun(training_task(task, endings.lease, group_rm=group_rm, give_up=give_up), samples, tools, held)
        reason, goes_on = None, False
        self._runs[run] = None
        try:
            await run.run(slots)
            goes_on = True
        except* EnginesUnwilling as errors:
            raise InputError(str(flatten(errors)[0])) from errors
        except* POISON as errors:
            reason = _reason_of(errors)
            await self._show(errors)
        finally:
            self._runs.pop(run, None)
            if not goes_on:
                run.held.end()
        await self._stay_given_up(delivery)
        if reason is None:
            if tools.episodes is None or run.complete:
                return endings.of(run)
            tools.episodes.hold(task.group_id, held := run.held)
            return replace(endings, num_held=len(held.episodes)).of(run)
        log.warning("group_failed", reason=reason)
        return endings.failed(reason)

    async def _show(self, errors: BaseException) -> None:
        """Publish the tracebacks of users' functions."""
        for error in flatten(errors):
            if isinstance(error, FunctionFailed):
                await self.outcomes.tracebacks.publish(str(error).partition(":")[0], traceback_of(error))

    async def spill_long_runs(self) -> None:
        """Make each long-running group spill its segments once per `spill_every_s`."""
        every_s = self._topology.rollout.spill_every_s
        while every_s:
            await anyio.sleep(every_s / LOOKS_PER_SPILL)
            due = time.monotonic() - every_s
            for run in self._runs:
                if run.spilled_at <= due:
                    run.spill()

    @asynccontextmanager
    async def _pulled(self, delivery: AnyDelivery) -> AsyncGenerator[None]:
        """Extend a task's ack deadline during the block; on cancellation, e.g. at shutdown, give the task back."""
        self.num_pulled += 1
        scope = anyio.CancelScope()
        self._scopes[scope] = None
        try:
            with scope:
                try:
                    async with delivery.heartbeat():
                        yield
                except anyio.get_cancelled_exc_class():
                    if not delivery.ended:
                        with anyio.move_on_after(GIVE_BACK_S, shield=True):
                            await delivery.redeliver(HANDED_OVER_S if scope.cancel_called else 0.0)
                    raise
        finally:
            self._scopes.pop(scope, None)
            self.num_pulled -= 1

    async def hand_over(self) -> None:
        """Give all tasks back, with what their samples have so far: another rollout actor continues them."""
        if not self._scopes:
            return
        log.warning("tasks_handed_over", number=len(self._scopes), reason="no engine of this actor accepts requests")
        with anyio.move_on_after(STORE_S):
            async with anyio.create_task_group() as group:
                for run in self._runs:
                    group.start_soon(run.store)
        for scope in list(self._scopes):
            scope.cancel()

    async def _give_up(self, delivery: AnyDelivery, publish: Callable[[], Awaitable[None]]) -> None:
        """End a task whose run cannot be ended, with what `publish` says of it. This process ends afterwards."""
        if delivery in self._given_up:  # by another one of its samples
            return
        self._given_up.add(delivery)
        await publish()
        if not delivery.ended:
            await delivery.ack()
        await self._bus.flush()

    async def _stay_given_up(self, delivery: AnyDelivery) -> None:
        """Let nothing follow the end of a task that was given up, should its function end before this process does."""
        if delivery in self._given_up:
            await anyio.sleep_forever()

    async def _run_eval(self, tools: GroupDependencies, delivery: Delivery[EvalRequested], slots: GroupSlots) -> None:
        task = delivery.message
        async with self._pulled(delivery), slots:
            # requested again by a buffer that had not read the evaluation's end
            if task.step <= self._target.evaluated_step:
                log.info("eval_item_left_out", set=task.set, item=task.item, step=task.step)
                await delivery.ack()
                return
            try:
                task = await with_prompt(self._bus, task)
            except PayloadLost as error:
                log.warning("eval_item_failed", set=task.set, item=task.item, reason=str(error))
                await publish_eval(self._bus, task, ())
                await delivery.ack()
                return
            samples = fresh_samples(task.num_samples, task.prompt.prompt_ids)
            requested = task

            async def give_up(reason: str) -> None:
                for sample in samples:
                    if not sample.finished:
                        sample.give_up(reason)
                found = tuple(sample.summary() for sample in samples)
                await self._give_up(delivery, partial(publish_eval, self._bus, requested, found))

            run = GroupRun(eval_task(task, uuid.uuid4().hex, give_up), samples, tools)
            try:
                await run.run(slots)
                await self._stay_given_up(delivery)
            except* EnginesUnwilling as errors:
                raise InputError(str(flatten(errors)[0])) from errors
            except* POISON as errors:
                await self._stay_given_up(delivery)
                reason = _reason_of(errors)
                log.warning("eval_item_failed", set=task.set, item=task.item, reason=reason)
                await self._show(errors)
                for sample in samples:
                    if sample.reward is None:
                        sample.give_up(sample.reason or reason)
            else:
                if not run.complete and delivery.num_delivered < EVAL_MAX_TRIES:  # an external client aborted it
                    await delivery.redeliver()
                    return
            await publish_eval(self._bus, task, tuple(sample.summary() for sample in samples))
            await delivery.ack()

    async def _run_eval_set(self, tools: GroupDependencies, delivery: Delivery[EvalSetRequested]) -> None:
        task = delivery.message
        key = task.step, task.set
        async with self._pulled(delivery):
            if (ended := self._sets_at_work.get(key)) is not None:  # stalled for longer than the ack wait
                log.warning("task_came_again", num_delivered=delivery.num_delivered)
                await ended.wait()
            elif task.step <= self._target.evaluated_step or task.set not in tools.eval_functions:
                log.info("eval_set_left_out", set=task.set, step=task.step)
            else:
                ended = self._sets_at_work[key] = anyio.Event()
                try:
                    await self._evaluate_set(tools, delivery)
                finally:
                    del self._sets_at_work[key]
                    ended.set()
            await delivery.ack()

    async def _evaluate_set(self, tools: GroupDependencies, delivery: Delivery[EvalSetRequested]) -> None:
        """Run the evaluation function of a set, and publish the outcome of each of its prompts."""
        task, num_delivered = delivery.message, delivery.num_delivered
        index, config = next((i, each) for i, each in enumerate(self._topology.eval) if each.name == task.set)
        key, evaluation, prompts, failed = f"eval.{index}.custom_evaluation", None, (), ""
        if num_delivered > EVAL_MAX_TRIES:
            begun = f"begun {count_of(num_delivered - 1, 'time')} without an end"
            failed = f"{key}: {begun}: its rollout actor ended, or was without the bus"
        try:
            prompts = () if failed else await prompts_of_set(self._bus, task)
        except PayloadLost as error:
            failed = f"{key}: its prompts cannot be read: {error}"
        items = [self._item_of(task, number, prompt) for number, prompt in enumerate(prompts)]

        async def run_sample(item: int, sample: OpenSample, function: GenerateFunction | None) -> None:
            own = tools
            if function is not None:
                chosen = {task.set: KeyedFunction(key, function)}
                own = replace(tools, eval_generate={**tools.eval_generate, **chosen})
            await self._run_eval_sample(own, items[item], sample, give_up)

        async def give_up(reason: str) -> None:
            await self._give_up(delivery, partial(self._publish_set, task, evaluation, reason))

        if not failed:
            evaluation = self._evaluations[task.step, task.set] = SetEvaluation(
                task.set,
                prompts,
                run_sample,
                step=task.step,
                num_samples=config.n_samples_per_eval_prompt,
                key=key,
                limit_s=tools.function_limit_s,
                give_up=give_up,
            )
            try:
                failed = await evaluation.run(tools.eval_functions[task.set])
            finally:
                del self._evaluations[task.step, task.set]
        await self._stay_given_up(delivery)
        if evaluation is not None:
            await self.outcomes.tracebacks.publish(key, evaluation.traceback)
        await self._publish_set(task, evaluation, failed)

    async def _publish_set(self, task: EvalSetRequested, evaluation: SetEvaluation | None, failed: str) -> None:
        """Publish the outcome of each prompt of a set, and why its function failed."""
        if failed:
            log.warning("evaluation_function_failed", set=task.set, step=task.step, reason=failed)
        for number in range(task.num_items):
            samples = () if evaluation is None else evaluation.samples(number)
            item = self._item_of(task, number)
            await publish_eval(self._bus, item, samples, not_asked=not samples, failed="" if number else failed)

    async def _run_eval_sample(
        self, tools: GroupDependencies, task: EvalRequested, sample: OpenSample, give_up: GiveUp
    ) -> None:
        """Generate and grade one sample of an evaluation function. What it does wrong costs this sample alone."""
        for num_tries in range(1, EVAL_MAX_TRIES + 1):
            run, is_poison = GroupRun(eval_task(task, uuid.uuid4().hex, give_up), [sample], tools), False
            async with self._set_slots.reserve(1) as slots:
                try:
                    await run.run(slots)
                except* EnginesUnwilling as errors:
                    raise InputError(str(flatten(errors)[0])) from errors
                except* POISON as errors:
                    reason, is_poison = _reason_of(errors), True
                    log.warning("eval_sample_failed", set=task.set, item=task.item, index=sample.index, reason=reason)
                    await self._show(errors)
                    sample.give_up(reason)
            if is_poison or run.complete or num_tries == EVAL_MAX_TRIES:
                return
            sample.start_again()  # an external client aborted it

    def _item_of(self, task: EvalSetRequested, number: int, prompt: Prompt = NO_PROMPT) -> EvalRequested:
        """Return the task of one prompt of a set."""
        config = next(each for each in self._topology.eval if each.name == task.set)
        return eval_request(self._topology, config, number, prompt, step=task.step, version=task.version, num_samples=1)


def _reason_of(errors: BaseException) -> str:
    """Return why samples failed. Several may fail with equal errors."""
    return "; ".join(dict.fromkeys(str(error) for error in flatten(errors)))
