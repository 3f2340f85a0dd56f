"""The rollout actor: connects the engines, their weights and the tasks. samples/task_runner.py runs the tasks."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import structlog
from anyio.abc import TaskStatus

from actors.rollout.engines.checks import ServerRequirements
from actors.rollout.engines.dispatch import Direct
from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.memory import MemoryNotes, MemoryShare
from actors.rollout.engines.others import OtherActors
from actors.rollout.engines.ownership import Ownership
from actors.rollout.engines.phases import PhaseFollower
from actors.rollout.engines.pressure import Bounds, EngineLimits
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.router import ThroughRouter
from actors.rollout.engines.target import TargetWeights
from actors.rollout.engines.weights.adapters import AdapterUpdates
from actors.rollout.engines.weights.files import FileSource, NodeCopies, PublishedFiles
from actors.rollout.engines.weights.sync import SYNC_CALLS, take_part
from actors.rollout.engines.weights.updater import Pauses, Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.pools.answering import AnsweringPool
from actors.rollout.pools.columns import ColumnSource
from actors.rollout.pools.frozen import FrozenPool, PoolSettings
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.sending import Generator
from actors.rollout.requests.watching import TokenTimeouts, Watchdog
from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.failures import action_of, policy_of
from actors.rollout.samples.generate_function import KEY as GENERATE_KEY
from actors.rollout.samples.generate_function import KeyedFunction
from actors.rollout.samples.held import FOLLOWED, OF_OTHERS, Episodes
from actors.rollout.samples.rollout_function import RolloutCalls, rollout_function_of
from actors.rollout.samples.sampling_function import SamplingFunction
from actors.rollout.samples.scoring import Scorer
from actors.rollout.samples.task_runner import ACK_WAIT_S, TaskRunner, as_carried
from actors.rollout.samples.tools import GroupDependencies
from actors.rollout.sessions.command import AgentPrograms
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.weight_reports import WeightReports
from messages import (
    ActorExited,
    ColumnPublished,
    EngineRequestsFailed,
    EngineStateChanged,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    EvalSetRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    KillAnswered,
    KillRequested,
    LocalCopyGiven,
    LocalCopyRequested,
    PhaseChanged,
    PhaseReached,
    PhaseRequested,
    PromptStored,
    RolloutRequested,
    RoundHalted,
    RunFailed,
    RunFinished,
    ScoreRequested,
    ScoreRequestsLost,
    ScoresGiven,
    SegmentsPublished,
    SegmentsSpilled,
    SpillsGiven,
    SpillsRequested,
    TrainerStarted,
    UserFunctionRaised,
    WeightsAnnounced,
    WeightsApplied,
    WeightsLost,
    WeightsProgressed,
    WeightsRefused,
    WeightSyncAnswered,
    WeightSyncRequested,
)
from runtime.bus.addresses import Address, engine_key
from runtime.bus.bus import Bus
from runtime.bus.servers import attend_servers, kill_server
from runtime.functions.load import load
from runtime.functions.table import EVALUATION
from runtime.node.external_clients import clients_of_grader
from runtime.process.actor import Actor
from runtime.settings.derived import reward_keys
from runtime.settings.owners import ActorShare
from runtime.settings.placement import UpdateLimits, num_engines
from runtime.settings.topology import (
    POLICY,
    Topology,
    caches_prompts,
    frozen_pools,
    grader_names,
    keeps_prefixes,
    max_adapters,
    min_concurrency,
    model_of,
    pools_of_columns,
    reads_copies,
    sample_fields,
    scoring_time_s,
    serves_adapters,
    topk_of_column,
)
from runtime.util.formatting import count_of

log = structlog.get_logger()

HANDOVER_S: Final = 10.0  # without an engine that accepts requests, before another rollout actor gets the tasks


class RolloutActor(Actor):
    """Generates and scores prompt groups on its engines.

    A crash loses only the tokens since the last spill: the tasks are redelivered after the ack wait, and continue from
    the spilled segments. Generate functions that were held over a halt run again. Programs of agents live on.
    """

    reads = (
        RolloutRequested,
        EvalRequested,
        EvalSetRequested,
        RoundHalted,
        GroupsClosed,
        GroupCompleted,
        GroupAborted,
        GroupFailed,
        SegmentsSpilled,
        RunFinished,
        RunFailed,
        TrainerStarted,
        WeightsAnnounced,
        EvalIssued,
        EvalEnded,
        WeightsApplied,
        WeightsLost,
        ScoresGiven,
        SegmentsPublished,
        SpillsGiven,
        PromptStored,
        KillAnswered,
        LocalCopyGiven,
        ActorExited,
        PhaseChanged,
        PhaseRequested,
        *SYNC_CALLS,
        WeightSyncAnswered,
    )
    writes = (
        UserFunctionRaised,
        SegmentsPublished,
        SegmentsSpilled,
        ColumnPublished,
        SpillsRequested,
        ScoreRequested,
        GroupCompleted,
        GroupAborted,
        GroupFailed,
        EvalCompleted,
        WeightsApplied,
        WeightsLost,
        WeightsProgressed,
        WeightsRefused,
        EngineStateChanged,
        EngineRequestsFailed,
        ScoreRequestsLost,
        KillRequested,
        LocalCopyRequested,
        PhaseReached,
        WeightSyncRequested,
        WeightSyncAnswered,
    )

    def __init__(self, topology: Topology, bus: Bus, *, ack_wait_s: float = ACK_WAIT_S) -> None:
        self._bus = bus
        self._pool = topology.engines[POLICY]
        self._topology = topology
        self._model = ServedModel.read(Path(topology.model.hf_checkpoint))
        custom = topology.rollout.custom_generate
        self._custom_generate = None if custom is None else KeyedFunction.of(GENERATE_KEY, custom)
        self._agents = AgentPrograms.of(topology, bus.name, self._model)
        if self._agents is not None:
            self._custom_generate = self._agents.function
        self._sampling = SamplingFunction(topology)
        rollout = topology.rollout.custom_rollout
        self._custom_rollout = None
        if rollout is not None:
            self._custom_rollout = rollout_function_of(topology, self._model)
        self._eval_generate = {
            item.name: KeyedFunction.of(f"eval.{index}.custom_generate", item.custom_generate)
            for index, item in enumerate(topology.eval)
            if item.custom_generate is not None
        }
        self._eval_functions = {
            item.name: load(EVALUATION, f"eval.{index}.custom_evaluation", item.custom_evaluation).function
            for index, item in enumerate(topology.eval)
            if item.custom_evaluation is not None
        }
        self._target = TargetWeights()
        self._share = share = ActorShare.of(topology, bus.name)
        self._ownership = Ownership(bus.kv, POLICY, bus.name)
        self._others = OtherActors(bus.kv, POLICY, bus.name, is_alone=share.is_alone)
        self._tasks = TaskRunner(
            topology,
            bus,
            POLICY,
            self._target,
            is_alone=share.is_alone,
            ack_wait_s=ack_wait_s,
            continued=as_carried if self._agents is None else self._agents.left.continued,
        )
        self._published = PublishedFiles(UpdateLimits.of(self._pool) if self._pool.verify != "never" else None)
        self._bus_dir = Path(topology.run.dir) / topology.run.name / "bus"
        self._conversations: set[Conversation] = set()
        slots = self._pool.concurrency * num_engines(self._pool)
        self._episodes = Episodes(most=slots, limit_s=topology.rollout.generate_timeout_s)
        self._waits: list[Callable[[], str]] = []
        self._pools: dict[str, FrozenPool] = {}

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        connector = aiohttp.TCPConnector(limit=0)  # the slots limit concurrency
        async with aiohttp.ClientSession(connector=connector) as session, anyio.create_task_group() as group:
            pool, rollout = self._pool, self._topology.rollout
            client = SglangClient(
                session,
                await engine_key(self._bus.kv),
                strangers=tuple(url for engine in self._topology.engines.values() for url in engine.urls),
                run=self._topology.run.name,
                stall_s=pool.update_stall_s,
                generate_timeout_s=rollout.generate_timeout_s,
            )
            updater = self._updater(client, await self._begin_ownership(client))
            fleet = self._fleet(client, updater)
            self._pools = {
                name: FrozenPool(PoolSettings.of(self._topology, name), client, fleet.events)
                for name in dict.fromkeys((*frozen_pools(self._topology), *rollout.pools))
            }
            tools = self._tools(client, fleet)
            await self._tasks.outcomes.begin()
            updater.interrupt_by(tools.generator.running.interrupt)
            fleet.ask_others_by(self._others.hold, self._others.answer)
            reports = WeightReports(self._bus, fleet, self._target, self._others, is_alone=self._share.is_alone)
            fleet.give_up_by(reports.gives_up)
            if pool.update_groups == 1:  # with rolling updates the other engines keep serving
                updater.hold_by(fleet.serving.held)
            follower = await self._follower(fleet, tools.generator.running)
            self._waits = [fleet.waits_for, tools.generator.running.waits_for, tools.scorer.waits_for]
            self._waits += [tools.rollout_calls.waits_for, self._episodes.waits_for]
            for frozen in self._pools.values():
                self._waits.append(frozen.waits_for)
                group.start_soon(frozen.run, self._bus, self._topology)
            for begin in (self._sampling.run, tools.scorer.run, self._episodes.run):
                await group.start(begin)
            always = [self._ownership.run, tools.generator.running.run, reports.run, self._tasks.spill_long_runs]
            for run in always if self._agents is None else [*always, self._agents.run]:
                group.start_soon(run)
            group.start_soon(self._watch_engines, fleet, client, follower)
            group.start_soon(self._watch_router, fleet)
            group.start_soon(take_part, self._bus, fleet.syncs, lambda: fleet.weights, reports.gives_up)
            group.start_soon(self._follow_log, fleet, tools.generator.running, follower, reports)
            group.start_soon(self._follow_phases, follower)
            if not self._share.is_alone:
                group.start_soon(self._others.tell, fleet)
                group.start_soon(self._hand_over, fleet)
            limits = TokenTimeouts(first_s=pool.first_token_after_s, next_s=pool.next_token_after_s)
            group.start_soon(Watchdog(client, fleet.serving, tools.generator.running, limits).run)
            group.start_soon(fleet.events.run, self._bus)
            bounds = Bounds(min_concurrency(pool), pool.concurrency)
            engine_limits = EngineLimits(client, fleet, self._tasks.resize, bounds, is_alone=self._share.is_alone)
            group.start_soon(engine_limits.run)
            for pull in (self._tasks.pull_groups, self._tasks.pull_evals, self._tasks.pull_eval_sets):
                group.start_soon(pull, tools, engine_limits.need)
            task_status.started()

    def stats(self) -> dict[str, float]:
        return self._tasks.stats()

    def waits_for(self) -> str:
        waits = [words for waits_for in (*self._waits, self._tasks.waits_for) if (words := waits_for())]
        outside = Counter(conversation.key for conversation in self._conversations if not conversation.is_waiting)
        for key, number in outside.items():
            waits.append(f"{key}, outside of generate and grade in {count_of(number, 'sample')}")
        if not self._tasks.num_pulled:
            waits.append("a task")
        return "; ".join(waits)

    async def _begin_ownership(self, client: SglangClient) -> Pauses:
        """Take over from an earlier process of this actor; return the pauses that it left at external engines."""
        await self._ownership.begin()
        client.guard_by(self._ownership.check)
        pauses = Pauses(self._bus.kv, POLICY, self._own_urls().values())
        await pauses.inherit()
        return pauses

    def _updater(self, client: SglangClient, pauses: Pauses) -> Updater:
        rollout, limits = self._topology.rollout, UpdateLimits.of(self._pool)
        return Updater(client, rollout.on_weight_update, pauses, limits=limits, requests_s=rollout.generate_timeout_s)

    def _fleet(self, client: SglangClient, updater: Updater) -> Fleet:
        verifier = WeightVerifier(
            client,
            updater,
            UpdateTracker(settle_timeout_s=self._pool.update_stall_s),
            verify=self._pool.verify,
            trainer_dtype=self._topology.model.dtype,
            weight_format=self._pool.weight_format,
            start_weights=self._pool.start_weights,
            adapters=AdapterUpdates(
                client,
                self._topology.run.name,
                moves_on=self._topology.rollout.on_weight_update == "abort",
                limits=UpdateLimits.of(self._pool),
                interrupt=updater.interrupt,
            ),
        )
        return Fleet(
            client,
            verifier,
            RateLimitedEvents(self._bus.name),
            update_groups=self._pool.update_groups,
            max_adapters=max_adapters(self._topology) if serves_adapters(self._topology) else 0,
            dispatch=Direct(self._pool.concurrency)
            if self._pool.router == "direct"
            else self._through_router(client, verifier),
        )

    def _through_router(self, client: SglangClient, verifier: WeightVerifier) -> ThroughRouter:
        run = None if self._pool.router_url is None else self._topology.run.name
        return ThroughRouter(client, verifier.updates.engine_of, run=run, engines=self._pool.urls)

    def _tools(self, client: SglangClient, fleet: Fleet) -> GroupDependencies:
        reward = self._topology.reward
        scorer = Scorer(
            self._bus,
            timeout_s=scoring_time_s(self._topology),
            max_tries=reward.max_tries,
            graders=grader_names(self._topology),
            external=reward.external,
            clients_of=partial(clients_of_grader, self._bus_dir),
        )
        return GroupDependencies(
            bus=self._bus,
            generator=Generator(
                client,
                fleet.serving,
                self._model,
                give_up_after_s=self._topology.rollout.generate_timeout_s,
                keeps_prefixes=keeps_prefixes(self._topology, self._pool),
            ),
            scorer=scorer,
            seed=self._topology.run.seed,
            batch_requests=self._pool.batch_requests,
            prompt_first=caches_prompts(self._pool),
            custom_generate=self._sampling.keyed or self._custom_generate,
            function_limit_s=self._topology.rollout.custom_generate_timeout_s,
            eval_generate=self._eval_generate,
            eval_functions=self._eval_functions,
            custom_rollout=self._custom_rollout,
            rollout_calls=RolloutCalls(
                self._topology.rollout.custom_rollout_prompts,
                limit_s=self._topology.rollout.custom_generate_timeout_s,
            ),
            model=self._model,
            policy=policy_of(reward),
            outcomes=self._tasks.outcomes,
            on_exception=action_of(self._topology.rollout.on_exception),
            reward_keys=reward_keys(self._topology.algorithm),
            conversations=self._conversations,
            episodes=self._episodes if self._topology.rollout.on_halt == "resume" else None,
            reward_per=reward.per,
            sample_fields=sample_fields(reward),
            function_pools={name: self._answering_pool(name) for name in self._topology.rollout.pools},
            pools_of=self._pools_of,
        )

    def _answering_pool(self, name: str) -> AnsweringPool:
        served = ServedModel.read(Path(model_of(self._topology, self._topology.engines[name])))
        return AnsweringPool(self._pools[name], served, self._model)

    def _pools_of(self, data: str) -> dict[str, ColumnSource]:
        """Return the pools that compute columns of the samples of a data source, by column."""
        return {
            column: ColumnSource(self._pools[pool], topk_of_column(self._topology, column))
            for column, pool in pools_of_columns(self._topology, data).items()
        }

    async def _follower(self, fleet: Fleet, running: RunningRequests) -> PhaseFollower | None:
        """Create the follower of the colocation phases; None without colocation."""
        if self._pool.colocate is None:
            return None
        await fleet.serving.hold(True)
        return PhaseFollower(fleet, running, len(self._share.engines))

    async def _follow_phases(self, follower: PhaseFollower | None) -> None:
        if follower is not None:
            async with self._bus.serve({PhaseRequested: follower.answer}):
                await follower.run()

    def _memory_share(self, client: SglangClient, name: str, address: Address) -> MemoryShare | None:
        if self._pool.colocate is None:
            return None
        shown = self._pool.kind == "tiny"  # SGLang frees no memory on a CPU
        notes = MemoryNotes(self._bus.kv, name, address.pid)
        return MemoryShare(client, name, address.url, pid=address.pid, is_shown=shown, notes=notes)

    def _files(self, agent: str = "") -> FileSource:
        """Choose where an engine reads weight files; `agent` is the address of its node daemon, if it has one."""
        if reads_copies(self._topology, self._pool) and agent:
            return NodeCopies(self._bus, agent, UpdateLimits.of(self._pool), are_checked=self._pool.verify != "never")
        return self._published

    async def _watch_engines(self, fleet: Fleet, client: SglangClient, follower: PhaseFollower | None) -> None:
        if follower is not None:
            await follower.known.wait()
        async with anyio.create_task_group() as group:
            for index, url in self._own_urls().items():
                group.start_soon(self._attend_external, fleet, f"external-{index}", url)

            async def attend(name: str, address: Address) -> None:
                await self._ownership.claim(name, address.url)

                async def kill(reason: str, *, gives_up: bool = False) -> None:
                    await self._ownership.check(address.url)
                    await kill_server(self._bus, name, address, reason, gives_up=gives_up)

                await fleet.run_engine(
                    name,
                    address.url,
                    pid=address.pid,
                    kill=kill,
                    memory_share=self._memory_share(client, name, address),
                    files=self._files(address.agent),
                )

            await attend_servers(self._bus, "engine", POLICY, attend, of_index=self._share.drives)

    async def _attend_external(self, fleet: Fleet, name: str, url: str) -> None:
        await self._ownership.claim(name, url)
        wanted = ServerRequirements.by(self._topology, self._pool)
        await fleet.run_engine(name, url, ours=False, wanted=wanted, files=self._files())

    def _own_urls(self) -> dict[int, str]:
        """Return the external engines that this actor drives, by their indices."""
        return {index: url for index, url in enumerate(self._pool.urls) if self._share.drives(index)}

    async def _watch_router(self, fleet: Fleet) -> None:
        """Use this actor's router, if the pool has routers. Never returns then."""
        own, url = self._share.actor, self._pool.router_url
        if url is not None:
            await fleet.run_router(url.rstrip("/"))
        elif self._pool.router == "direct":
            return
        await attend_servers(
            self._bus, "router", POLICY, lambda _, address: fleet.run_router(address.url), of_index=own.__eq__
        )

    async def _hand_over(self, fleet: Fleet) -> None:
        """Give the tasks to another rollout actor whenever no engine of this one serves for long. Never returns."""
        serving = fleet.serving
        while True:
            await fleet.until(lambda: not serving.num_admitted() and not serving.is_held)
            with anyio.move_on_after(HANDOVER_S) as waiting:
                await fleet.until(lambda: bool(serving.num_admitted()) or serving.is_held)
            if waiting.cancelled_caught:
                await self._tasks.hand_over()

    async def _follow_log(
        self, fleet: Fleet, running: RunningRequests, follower: PhaseFollower | None, reports: WeightReports
    ) -> None:
        """Follow the log: pass halts, weights, exits and phases on, without waiting for their effects.

        At startup only the last target matters.
        """
        target = self._target
        types = (RoundHalted, TrainerStarted, WeightsAnnounced, EvalIssued, EvalEnded, ActorExited, PhaseChanged)
        types += FOLLOWED
        of_others = () if self._share.is_alone else (WeightsApplied, WeightsLost, *OF_OTHERS)
        async with self._bus.read(*types, *of_others) as events:
            while True:
                received = await events.next()
                self._episodes.note(received and received.message, self._bus.name)
                if self._agents is not None:
                    self._agents.left.note(received and received.message)
                match received and received.message:
                    case RoundHalted(round=round):
                        running.halt(round)
                    case TrainerStarted() | WeightsAnnounced() | EvalIssued() | EvalEnded() | WeightsLost() as event:
                        target.fold(event)
                    case WeightsApplied() as event if event.instance != self._bus.name:
                        fleet.learn(event.checksums or ())
                    case ActorExited() as event:
                        fleet.crashes.note_exit(event)
                    case PhaseChanged() as event if follower is not None and received is not None:
                        if not target.is_replaced(event):
                            follower.fold(event, received.seq)
                    case _:  # undecodable, or the end of the log for now
                        pass
                if not events.pending:
                    await reports.set_target()
                if follower is not None and not events.pending:
                    follower.follow()
