"""The rollout actor: pulls tasks, drives the engines, publishes samples and requests their scores."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import anyio
import structlog
from anyio.abc import TaskStatus

from actors.rollout.engines.discovery import attend_servers, kill_server
from actors.rollout.engines.external import Wanted
from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.memory.follower import PhaseFollower
from actors.rollout.engines.memory.notes import MemoryNotes
from actors.rollout.engines.memory.share import MemoryShare
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.target import TargetWeights
from actors.rollout.engines.weight_sync_calls import SESSION_CALLS, take_part
from actors.rollout.engines.weights.copies import FileSource, NodeCopies, PublishedFiles
from actors.rollout.engines.weights.files import FileChecks
from actors.rollout.engines.weights.pauses import Pauses
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.groups.endings import Ending, Endings, publish_eval
from actors.rollout.groups.inheritance import Inheritance
from actors.rollout.groups.open_samples import fresh_samples
from actors.rollout.groups.run import GroupRun
from actors.rollout.groups.scoring import Scorer
from actors.rollout.groups.slots import Release, Slots, released
from actors.rollout.groups.tasks import eval_task, training_task
from actors.rollout.groups.tools import Tools
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.sending import Generator
from actors.rollout.requests.watching import Patience, Watchdog
from actors.rollout.sessions.conversation import Conversation
from actors.rollout.sessions.functions import find_generate_function
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EnginesUnwilling, RequestRefused
from actors.rollout.sglang.served_model import ServedModel
from messages import (
    ActorExited,
    EngineRequestsFailed,
    EnginesAnswered,
    EngineStateChanged,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    KillAnswered,
    KillRequested,
    LocalCopyGiven,
    LocalCopyRequested,
    MembersGiven,
    PhaseChanged,
    PhaseReached,
    PhaseRequested,
    PromptStored,
    RolloutRequested,
    RoundHalted,
    ScoreRequested,
    ScoresGiven,
    SegmentsPublished,
    SegmentsSpilled,
    SpillsGiven,
    SpillsRequested,
    TrainerStarted,
    WeightsAnnounced,
    WeightsApplied,
    WeightsLost,
    WeightsRefused,
    WeightSyncGranted,
    WeightSyncRequested,
)
from runtime.bus.addresses import Address, engine_key
from runtime.bus.bus import Bus
from runtime.bus.consumer import Delivery
from runtime.bus.errors import MessageRefused, PayloadLost
from runtime.data.stored_prompts import with_prompt
from runtime.process.actor import Actor, InputError
from runtime.settings.placement import num_engines
from runtime.settings.topology import Topology, reads_copies
from runtime.util.errors import leaves
from runtime.util.formatting import count_of

log = structlog.get_logger()

ACK_WAIT_S = 5.0  # tasks of a crashed rollout actor are redelivered to another one after this time
# permanent errors of a task: every delivery would fail in the same way
POISON = (RequestRefused, MessageRefused, ValueError)
EVAL_MAX_TRIES = 5  # deliveries of an evaluation item that keeps ending aborted
GIVE_BACK_S = 2.0  # to give tasks back at shutdown
LOOKS_PER_SPILL = 4  # checks per `spill_every_s` for groups that are due to spill
EVAL_SLOTS_SHARE = 4  # evaluation may hold 1/4 of the slots while a round is running


class RolloutActor(Actor):
    """Generates and scores prompt groups on its engines.

    A crash loses only the tokens since the last spill: the tasks are redelivered after the ack wait, and continue from
    the spilled segments.
    """

    reads = (
        RolloutRequested,
        EvalRequested,
        RoundHalted,
        TrainerStarted,
        WeightsAnnounced,
        EvalIssued,
        EvalEnded,
        ScoresGiven,
        SegmentsPublished,
        SpillsGiven,
        PromptStored,
        KillAnswered,
        LocalCopyGiven,
        ActorExited,
        PhaseChanged,
        PhaseRequested,
        *SESSION_CALLS,
        WeightSyncGranted,
    )
    writes = (
        SegmentsPublished,
        SegmentsSpilled,
        SpillsRequested,
        ScoreRequested,
        GroupCompleted,
        GroupAborted,
        GroupFailed,
        EvalCompleted,
        WeightsApplied,
        WeightsLost,
        WeightsRefused,
        EngineStateChanged,
        EngineRequestsFailed,
        KillRequested,
        LocalCopyRequested,
        PhaseReached,
        WeightSyncRequested,
        MembersGiven,
        EnginesAnswered,
    )

    def __init__(self, topology: Topology, bus: Bus, *, pool: str = "policy") -> None:
        engines = topology.engines[pool]
        self._bus = bus
        self._pool = pool
        self._topology = topology
        self._slots = Slots(engines.concurrency * num_engines(engines))
        self._model = ServedModel.read(Path(topology.model.hf_checkpoint))
        custom = topology.rollout.custom_generate
        self._custom_generate = find_generate_function(custom, (Path.cwd(),)) if custom is not None else None
        self._inheritance = Inheritance(bus)
        self._num_groups = 0
        self._runs: set[GroupRun] = set()  # runs of training groups
        self._num_pulled = 0  # running tasks, training and evaluation
        # running attempts: (group, attempt) -> set when it has ended
        self._at_work: dict[tuple[int, int], anyio.Event] = {}
        self._target = TargetWeights()
        self._file_checks = FileChecks(engines.update_timeout_s)
        self._targets_set: dict[int, float] = {}  # version -> time at which it became the target, until it is verified
        self._conversations: set[Conversation] = set()
        self._waits: list[Callable[[], str]] = []

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        connector = aiohttp.TCPConnector(limit=0)  # the slots limit concurrency
        async with aiohttp.ClientSession(connector=connector) as session, anyio.create_task_group() as group:
            pool, rollout = self._topology.engines[self._pool], self._topology.rollout
            client = SglangClient(
                session,
                await engine_key(self._bus.kv),
                strangers=pool.urls,
                update_timeout_s=pool.update_timeout_s,
                generate_timeout_s=rollout.generate_timeout_s,
            )
            pauses = Pauses(self._bus.kv, self._pool, pool.urls)
            await pauses.inherit()
            updater = Updater(client, rollout.on_weight_update, pauses, timeout_s=pool.update_timeout_s)
            tracker, dtype = UpdateTracker(settle_timeout_s=pool.update_timeout_s), self._topology.model.dtype
            verifier = WeightVerifier(
                client,
                updater,
                tracker,
                verify=pool.verify,
                trainer_dtype=dtype,
                weight_format=pool.weight_format,
                start_weights=pool.start_weights,
            )
            fleet = Fleet(client, verifier, RateLimitedEvents(self._bus.name), update_groups=pool.update_groups)
            tools = self._tools(client, fleet)
            updater.interrupt_by(tools.generator.running.interrupt)
            fleet.give_up_by(partial(self._gives_up, fleet))
            if pool.update_groups == 1:  # with rolling updates the other engines keep serving
                updater.hold_by(fleet.held)
            follower = await self._follower(fleet, tools.generator.running)
            self._waits = [fleet.waits_for, tools.generator.running.waits_for, tools.scorer.waits_for]
            await group.start(tools.scorer.run)
            group.start_soon(self._watch_engines, fleet, client, follower)
            group.start_soon(self._watch_router, fleet)
            group.start_soon(take_part, self._bus, fleet, partial(self._gives_up, fleet))
            group.start_soon(tools.generator.running.run)
            group.start_soon(self._follow_log, fleet, tools.generator.running, follower)
            group.start_soon(self._follow_phases, follower)
            group.start_soon(self._report_versions, fleet)
            limits = Patience(first_s=pool.first_token_after_s, next_s=pool.next_token_after_s)
            group.start_soon(Watchdog(client, fleet, tools.generator.running, limits).run)
            group.start_soon(fleet.events.run, self._bus)
            group.start_soon(self._spill_long_runs)
            group.start_soon(self._pull_groups, tools)
            group.start_soon(self._pull_evals, tools)
            task_status.started()

    def stats(self) -> dict[str, float]:
        return {"groups": self._num_groups, "slots_taken": self._slots.taken, "slots": self._slots.total}

    def waits_for(self) -> str:
        waits = [words for waits_for in self._waits if (words := waits_for())]
        if outside := sum(not conversation.asking for conversation in self._conversations):
            waits.append(f"rollout.custom_generate, outside of generate in {count_of(outside, 'sample')}")
        if not self._num_pulled:
            waits.append("a task")
        return "; ".join(waits)

    def _tools(self, client: SglangClient, fleet: Fleet) -> Tools:
        reward = self._topology.reward
        scorer = Scorer(self._bus, timeout_s=reward.timeout_s, max_tries=reward.max_tries)
        return Tools(
            bus=self._bus,
            generator=Generator(client, fleet, self._model, give_up_after_s=self._topology.rollout.generate_timeout_s),
            scorer=scorer,
            seed=self._topology.run.seed,
            batch_requests=self._topology.engines[self._pool].batch_requests,
            custom_generate=self._custom_generate,
            model=self._model,
            failed_reward=0.0 if reward.on_failure == "zero" else None,
            conversations=self._conversations,
        )

    async def _follower(self, fleet: Fleet, running: RunningRequests) -> PhaseFollower | None:
        """Create the follower of the colocation phases; None without colocation."""
        pool = self._topology.engines[self._pool]
        if pool.colocate is None:
            return None
        await fleet.hold(True)
        return PhaseFollower(fleet, running, num_engines(pool))

    async def _follow_phases(self, follower: PhaseFollower | None) -> None:
        if follower is not None:
            async with self._bus.serve({PhaseRequested: follower.answer}):
                await follower.run()

    def _memory_share(self, client: SglangClient, name: str, address: Address) -> MemoryShare | None:
        pool = self._topology.engines[self._pool]
        if pool.colocate is None:
            return None
        shown = pool.kind == "tiny"  # SGLang frees no memory on a CPU
        notes = MemoryNotes(self._bus.kv, name, address.pid)
        return MemoryShare(client, name, address.url, pid=address.pid, is_shown=shown, notes=notes)

    def _files(self, agent: str = "") -> FileSource:
        """Choose where an engine reads weight files; `agent` is the address of its node daemon, if it has one."""
        pool = self._topology.engines[self._pool]
        are_checked = pool.verify != "never"
        if reads_copies(self._topology, pool) and agent:
            return NodeCopies(self._bus, agent, pool.update_timeout_s, are_checked=are_checked)
        return PublishedFiles(self._file_checks if are_checked else None)

    async def _watch_engines(self, fleet: Fleet, client: SglangClient, follower: PhaseFollower | None) -> None:
        if follower is not None:
            await follower.known.wait()
        async with anyio.create_task_group() as group:
            pool = self._topology.engines[self._pool]
            for index, url in enumerate(pool.urls):
                wanted = Wanted.by(self._topology, pool)
                group.start_soon(
                    partial(fleet.run_engine, f"external-{index}", url, ours=False, wanted=wanted, files=self._files())
                )

            async def attend(name: str, address: Address) -> None:
                kill = partial(kill_server, self._bus, name, address)
                await fleet.run_engine(
                    name,
                    address.url,
                    pid=address.pid,
                    kill=kill,
                    memory_share=self._memory_share(client, name, address),
                    files=self._files(address.agent),
                )

            await attend_servers(self._bus, "engine", self._pool, attend)

    async def _watch_router(self, fleet: Fleet) -> None:
        await attend_servers(self._bus, "router", self._pool, lambda _, address: fleet.run_router(address.url))

    async def _follow_log(self, fleet: Fleet, running: RunningRequests, follower: PhaseFollower | None) -> None:
        """Follow the log: pass halts, weights, exits and phases on, without waiting for their effects.

        At startup only the last target matters.
        """
        target = self._target
        types = (RoundHalted, TrainerStarted, WeightsAnnounced, EvalIssued, EvalEnded, ActorExited, PhaseChanged)
        async with self._bus.read(*types) as events:
            while True:
                received = await events.next()
                match received and received.message:
                    case RoundHalted(round=round):
                        running.halt(round)
                    case TrainerStarted() | WeightsAnnounced() | EvalIssued() | EvalEnded() as event:
                        target.fold(event)
                    case ActorExited() as event:
                        fleet.deaths.note_exit(event)
                    case PhaseChanged() as event if follower is not None and received is not None:
                        follower.fold(event, received.seq)
                    case _:  # undecodable, or the end of the log for now
                        pass
                if not events.pending:
                    await self._set_target(fleet)
                if follower is not None and not events.pending:
                    follower.follow()

    async def _set_target(self, fleet: Fleet) -> None:
        newest = self._target.newest
        if newest is not None and newest.version > fleet.target_version:
            self._targets_set[newest.version] = anyio.current_time()
            await fleet.set_target(newest)

    async def _gives_up(self, fleet: Fleet) -> bool:
        """Move running evaluations to newer weights if no engine holds their version; return whether that happened.

        Only called where weights are not in files. The trainer then has newer weights and can never send the old ones
        again.
        """
        old = fleet.target_version
        if not self._target.holds_back or fleet.is_held_by_any(old):
            return False
        self._target.give_up()
        await self._set_target(fleet)
        newer = fleet.target_version
        log.warning("weights_lost", weight_version=old, newer=newer)
        await self._bus.publish(WeightsLost(version=old, newer=newer, instance=self._bus.name))
        return True

    async def _report_versions(self, fleet: Fleet) -> None:
        """Publish an event each time the engines have verified a newer version."""
        version = 0
        while True:
            version = await fleet.next_version(version)
            since = self._targets_set[version]
            self._targets_set = {later: at for later, at in self._targets_set.items() if later > version}
            took_s = anyio.current_time() - since
            log.info("weights_applied", weight_version=version, engines=fleet.num_admitted(), took_s=took_s)
            await self._bus.publish(
                WeightsApplied(
                    version=version,
                    instance=self._bus.name,
                    num_engines=fleet.num_admitted(),
                    took_s=took_s,
                    engines=fleet.updates(version, since),
                )
            )

    async def _pull_groups(self, tools: Tools) -> None:
        size = self._topology.rollout.n_samples_per_prompt
        durable = f"rollout-{self._pool}"
        async with (
            self._bus.consume(
                RolloutRequested, durable=durable, ack_wait_s=ACK_WAIT_S, max_ack_pending=self._slots.total
            ) as deliveries,
            anyio.create_task_group() as group,
        ):
            while True:
                taken = await self._slots.take(size)
                deliveries.prefetch = self._slots.free // size  # groups that can start too are fetched together
                delivery = await anext(deliveries)
                group.start_soon(self._run_group, tools, delivery, taken)

    async def _pull_evals(self, tools: Tools) -> None:
        # without overlap nothing else runs meanwhile
        share = EVAL_SLOTS_SHARE if self._topology.rollout.eval_overlap else 1
        slots = Slots(max(1, self._slots.total // share))
        largest = max((item.n_samples_per_eval_prompt for item in self._topology.eval), default=1)
        durable = f"eval-{self._pool}"
        async with (
            self._bus.consume(
                EvalRequested, durable=durable, ack_wait_s=ACK_WAIT_S, max_ack_pending=self._slots.total
            ) as deliveries,
            anyio.create_task_group() as group,
        ):
            while True:
                taken = await slots.take(largest)
                delivery = await anext(deliveries)
                group.start_soon(self._run_eval, tools, delivery, slots, taken)

    async def _run_group(self, tools: Tools, delivery: Delivery[RolloutRequested], taken: int) -> None:
        task = delivery.message
        key = task.group_id, task.attempt
        endings = Endings(task, uuid.uuid4().hex, self._bus.name)
        with structlog.contextvars.bound_contextvars(group_id=task.group_id, attempt=task.attempt):
            async with self._pulled(delivery), released(self._slots, taken) as release:
                # this process was stalled for longer than the ack wait
                if (ended := self._at_work.get(key)) is not None:
                    log.warning("task_came_again", num_delivered=delivery.num_delivered)
                    release()
                    await ended.wait()
                else:
                    ended = self._at_work[key] = anyio.Event()
                    await endings.publish(self._bus, await self._ending(tools, delivery, endings, release))
                    del self._at_work[key]
                    ended.set()
                    self._num_groups += 1
                await delivery.ack()

    async def _ending(
        self, tools: Tools, delivery: Delivery[RolloutRequested], endings: Endings, release: Release
    ) -> Ending:
        carried = await self._inheritance.carried(delivery)
        if tools.generator.running.halted(delivery.message.round):
            return endings.aborted(carried)
        try:
            task = await with_prompt(self._bus, delivery.message)
        except PayloadLost as error:
            return endings.failed(f"prompt: {error}")
        endings = replace(endings, task=task)
        samples = await self._inheritance.samples(task, carried)
        run = GroupRun(training_task(task, endings.lease, group_rm=self._topology.reward.group_rm), samples, tools)
        reason = None
        self._runs.add(run)
        try:
            await run.run(release)
        except* EnginesUnwilling as errors:
            raise InputError(str(leaves(errors)[0])) from errors
        except* POISON as errors:
            # samples may fail with equal errors
            reason = "; ".join(dict.fromkeys(str(error) for error in leaves(errors)))
        finally:
            self._runs.discard(run)
        if reason is None:
            return endings.of(run)
        log.warning("group_failed", reason=reason)
        return endings.failed(reason)

    async def _spill_long_runs(self) -> None:
        """Make each long-running group spill its segments once per `spill_every_s`."""
        every_s = self._topology.rollout.spill_every_s
        while every_s:
            await anyio.sleep(every_s / LOOKS_PER_SPILL)
            due = time.monotonic() - every_s
            for run in self._runs:
                if run.spilled_at <= due:
                    run.spill()

    @asynccontextmanager
    async def _pulled(self, delivery: Delivery[RolloutRequested] | Delivery[EvalRequested]) -> AsyncGenerator[None]:
        """Extend a task's ack deadline during the block; on cancellation, e.g. at shutdown, give the task back."""
        self._num_pulled += 1
        try:
            async with delivery.heartbeat():
                yield
        except anyio.get_cancelled_exc_class():
            if not delivery.ended:
                with anyio.move_on_after(GIVE_BACK_S, shield=True):
                    await delivery.redeliver()
            raise
        finally:
            self._num_pulled -= 1

    async def _run_eval(self, tools: Tools, delivery: Delivery[EvalRequested], slots: Slots, taken: int) -> None:
        task = delivery.message
        async with self._pulled(delivery), released(slots, taken) as release:
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
            run = GroupRun(eval_task(task, uuid.uuid4().hex), samples, tools)
            try:
                await run.run(release)
            except* EnginesUnwilling as errors:
                raise InputError(str(leaves(errors)[0])) from errors
            except* POISON as errors:
                log.warning("eval_item_failed", set=task.set, item=task.item, reason=str(leaves(errors)[0]))
            else:
                if not run.complete and delivery.num_delivered < EVAL_MAX_TRIES:  # an external client aborted it
                    await delivery.redeliver()
                    return
            await publish_eval(self._bus, task, tuple(sample.summary() for sample in samples))
            await delivery.ack()
