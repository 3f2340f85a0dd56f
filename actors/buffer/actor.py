"""The buffer actor: keeps the ledger, decides what happens next, publishes tasks."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import structlog
from anyio import to_thread
from anyio.abc import TaskStatus

from actors.buffer.deciding.decide import Schedule, decide, events_of, halt_by_hand, snapshot_of
from actors.buffer.deciding.evaluation import changed_function
from actors.buffer.deciding.measuring import EvalMetrics
from actors.buffer.deciding.selecting import Selector
from actors.buffer.deciding.selection import Selection
from actors.buffer.deciding.tasks import (
    PrefixHolders,
    Task,
    eval_tasks,
    failed_endings,
    rollout_task,
    schedule_of,
    tasks_in_flight,
)
from actors.buffer.ledger_log import LedgerLog
from actors.buffer.prompts.drawn import DrawnPrompts
from actors.buffer.prompts.resuming import TrainingPrompts, refuse_other_data, resume_source
from actors.buffer.prompts.source import load_prompts
from actors.buffer.prompts.storing import AvailablePrompts, PromptStore
from actors.buffer.storage.pressure import RECHECK_S, Pressure
from actors.buffer.storage.recorder import Recorder
from actors.buffer.storage.snapshots import SnapshotStore
from actors.buffer.storage.trimming import Trimmer
from actors.buffer.waiting import LONG_S, Activity, describe_source, describe_wait
from messages import (
    BatchReady,
    BufferStarted,
    CheckpointRequested,
    CheckpointSaved,
    ColumnPublished,
    DrawsStored,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    EvalSetRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    HaltAnswered,
    HaltRequested,
    LogTrimmed,
    Message,
    MessageDeadLettered,
    PhaseChanged,
    Plane,
    Prompt,
    PromptsLoaded,
    PromptStored,
    RolloutRequested,
    RoundHalted,
    RunFailed,
    RunFinished,
    SegmentsPublished,
    SelectionFailed,
    SnapshotChunk,
    SnapshotTaken,
    SpillsGiven,
    SpillsRequested,
    UserFunctionRaised,
)
from messages.subjects import key_of
from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.errors import AlreadyQueued, Fenced, MessageRefused, StreamFull
from runtime.bus.events import Events
from runtime.data.data_files import DataError
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, in_flight
from runtime.ledger.groups import spills_of
from runtime.process.actor import Actor, InputError
from runtime.process.user_tracebacks import UserTracebacks
from runtime.settings.sizes import stream_limits
from runtime.settings.topology import Topology, has_filter

log = structlog.get_logger()

T = TypeVar("T")

MAX_CONCURRENT_PUBLISHES = 64  # tasks published concurrently
HALT_TIMEOUT_S = 5.0
EVAL_TASKS_QUEUED = 512  # tasks of one evaluation that are queued at a time
NO_ROOM_FOR_PROMPTS = (
    "the data stream is full, and the run still needs all of it, so no prompt can be issued: raise bus.data_bytes, "
    "or save more often (train.save_interval)"
)


class BufferActor(Actor):
    """Owns the ledger. A crash loses nothing: the restart folds the log again and republishes every open task.

    When two buffers run, the older one is fenced: an append succeeds only if its writer has folded the whole ledger.
    """

    reads = (
        *LEDGER_EVENTS,
        PhaseChanged,
        PromptsLoaded,
        SpillsRequested,
        HaltRequested,
        SegmentsPublished,
        ColumnPublished,
        PromptStored,
        DrawsStored,
        SnapshotChunk,
    )
    writes = (
        BufferStarted,
        GroupsIssued,
        RoundHalted,
        BatchReady,
        GroupsClosed,
        EvalIssued,
        EvalEnded,
        SnapshotTaken,
        SnapshotChunk,
        RunFinished,
        RunFailed,
        PromptsLoaded,
        RolloutRequested,
        EvalRequested,
        EvalSetRequested,
        SpillsGiven,
        HaltAnswered,
        CheckpointRequested,
        LogTrimmed,
        SelectionFailed,
        UserFunctionRaised,
        PromptStored,
        DrawsStored,
        GroupFailed,
        EvalCompleted,
    )

    def __init__(
        self,
        topology: Topology,
        bus: Bus,
        run_dir: Path,
        *,
        recheck_s: float = RECHECK_S,
        long_activity_s: float = LONG_S,
    ) -> None:
        """Start empty.

        Args:
            topology: the topology, with its recipe.
            bus: the bus.
            run_dir: run directory, for the archive of the log.
            recheck_s: minimum seconds between two measurements of the streams.
            long_activity_s: seconds below which `waits_for` does not report an activity.
        """
        self._topology = topology
        self._bus = bus
        self._tracebacks = UserTracebacks(bus)
        self._run_dir = run_dir
        self._log = LedgerLog(
            bus,
            run_dir,
            stream_limits(topology).event_bytes,
            verdicts=has_filter(topology),
            tells_source=any(item.source_class is not None for item in topology.data),
        )
        self._rest_of_batch: list[BatchReady] = []  # events of a batch that follow the one appended last
        self._left_out_step = 0  # newest checkpoint step whose snapshot fits neither into an event nor into chunks
        self._snapshot_lost = False  # the newest snapshot cannot be read: another one is due
        self._selector = Selector(topology, bus.publish, self._tracebacks.publish)
        self._eval_metrics = EvalMetrics(topology, self._tracebacks.publish)
        self._trimmer = Trimmer(bus, run_dir, topology.buffer.trim_min_events)
        self._pressure = Pressure(bus, self._trimmer.is_busy, recheck_s=recheck_s)
        self._schedule: Schedule | None = None  # set once the data is read
        self._activity = Activity(long_s=long_activity_s)
        self._store = PromptStore(bus)
        self._prefixes = PrefixHolders(topology)
        self._snapshots = SnapshotStore(bus)
        self._issue_prompts: dict[int, Prompt] = {}  # prompts of the groups being issued, by number
        self._recorder = Recorder(topology, bus, run_dir)
        self._eval_tasks: Iterator[Task] = iter(())  # of the running evaluation, not published yet
        self._folded = anyio.Event()  # set with the next folded event, and replaced

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        loaded: list[TrainingPrompts] = []  # closed also if this is cancelled while a thread loads them
        try:
            with self._activity(describe_source(self._topology.data)):
                await anyio.to_thread.run_sync(lambda: loaded.append(load_prompts(self._topology)))
            (prompts,) = loaded
            await self._selector.start()
            await self._eval_metrics.start()
            await self._run_on(prompts, task_status)
        finally:
            await self._selector.close()
            await self._eval_metrics.close()
            for prompts in loaded:
                prompts.close()

    async def _run_on(self, prompts: TrainingPrompts, task_status: TaskStatus[None]) -> None:
        await refuse_other_data(prompts, self._bus, self._run_dir, self._topology.run.name)
        await self._recorder.prepare()
        sizes = {name: len(items) for name, items in prompts.evals.items()}
        self._schedule = schedule = schedule_of(self._topology, sizes)
        await self._log.load()
        self._snapshot_lost = bool(self._log.unreadable)
        for earlier in self._log.earlier:
            self._snapshots.folded(earlier)
        async with (
            in_background(self._trimmer.run),
            in_background(self._pressure.run),
            in_background(self._recorder.run),
            self._bus.read(*LEDGER_EVENTS, from_seq=self._state.last_seq + 1) as events,
        ):
            await self._log.take_over(events, lambda: self._fold_next(events))  # the trimmer empties a full log
            await resume_source(prompts, self._bus, self._state, self._topology.run.name)
            if changed := changed_function(self._state, schedule.evals, self._topology.run.name):
                raise InputError(changed)
            for loaded in prompts.loaded:
                await self._bus.publish(loaded)
            await self._purge_payloads(prompts)  # the buffer before may have ended between a checkpoint and its purge
            task_status.started()
            async with self._bus.serve({SpillsRequested: self._spills, HaltRequested: self._halt}):
                await self._publish_open_tasks(prompts)
                await self._keep_deciding(events, schedule, prompts)

    @property
    def _state(self) -> LedgerState:
        return self._log.state

    def stats(self) -> dict[str, float]:
        return {name: float(count) for name, count in msgspec.structs.asdict(self._state.books()).items()}

    def waits_for(self) -> str:
        if self._schedule is None or self._activity.words():
            return self._activity.words()
        room = f"room ({self._pressure.holding}); " if self._pressure.holding else ""
        return room + describe_wait(self._state, self._schedule)

    async def _spills(self, request: SpillsRequested) -> SpillsGiven:
        """Answer with the spilled segments from which an attempt resumes after a crash."""
        samples = spills_of(self._state, request.group_id, request.attempt)
        return SpillsGiven(group_id=request.group_id, attempt=request.attempt, samples=samples)

    async def _halt(self, request: HaltRequested) -> HaltAnswered:
        """End the running round for a person. A call while its groups end halts nothing more."""
        ends = anyio.current_time() + HALT_TIMEOUT_S
        while (left_s := ends - anyio.current_time()) > 0:
            state, folded = self._state, self._folded
            halt = halt_by_hand(state)
            if halt is None:
                return HaltAnswered(reason=f"no group is being generated; the run waits for {self.waits_for()}")
            num_groups = sum(count for round, count in state.index.rounds.items() if round > state.halted_round)
            if await self._log.append(halt):  # never cancelled: it may be stored already
                log.info("round_halted_by_hand", round=halt.round, num_groups=num_groups)
                return HaltAnswered(round=halt.round, num_groups=num_groups)
            with anyio.move_on_after(left_s):
                await folded.wait()  # another decision came first
        return HaltAnswered(reason=f"other decisions kept the ledger busy for {HALT_TIMEOUT_S:g} s")

    async def _fold_next(self, events: Events[Message]) -> Message | None:
        """Wait for an event, fold it and return it.

        Returns:
            The event. None if the last pending event is unreadable, or after RECHECK_S while issuing waits for room:
            the caller then decides again.
        """
        received = await events.next(RECHECK_S if self._pressure.holding else None)
        if received is None:
            return None
        await self._log.fold(received)
        self._pressure.folded(received.message, self._state)
        self._folded.set()
        self._folded = anyio.Event()
        event = received.message
        if isinstance(event, SnapshotTaken) and event.covers not in self._log.unreadable:
            self._snapshots.folded(event)
            self._trimmer.snapshot_taken(self._state, event.covers, keep_from=self._recorder.needed_seq())
        return event

    async def _keep_deciding(self, events: Events[Message], schedule: Schedule, prompts: TrainingPrompts) -> None:
        """Decide in a loop, one decision at a time: append it, read it back, fold it, then carry out its effects."""
        state, incarnation, outstanding = self._state, self._state.incarnation, 0
        while True:
            if outstanding <= state.last_seq and not events.pending:
                self._store.settled()
                if isinstance(prompts, DrawnPrompts):
                    prompts.settled()
                self._snapshots.settled()
                outstanding = await self._decide(schedule, prompts)
                if not outstanding:
                    self._rest_of_batch = []  # an event came between them: the batch is decided anew
            event = await self._fold_next(events)
            if state.incarnation > incarnation:
                raise Fenced(f"buffer {state.incarnation} took over from buffer {incarnation}")
            if event is not None:
                await self._effects(event, prompts)

    async def _decide(self, schedule: Schedule, prompts: TrainingPrompts) -> int:
        """Append the next decision; return its sequence, or 0 without a decision or after another writer's append."""
        while (decision := await self._next_decision(schedule)) is not None:
            if isinstance(decision, GroupsIssued) and not await self._may_issue(decision, prompts):
                return 0
            if isinstance(decision, RunFinished | RunFailed):  # the node daemon stops all processes after it
                await self._recorder.write_rest(self._state.last_seq)
            if isinstance(decision, EvalEnded) and self._state.evaluation is not None:
                with self._activity("eval.custom_metrics"):
                    decision = await self._eval_metrics.added(decision, self._state.evaluation, prompts.evals)
            try:
                return await self._log.append(await self._citing(decision, prompts))
            except MessageRefused as error:
                if not isinstance(decision, SnapshotTaken):
                    raise
                log.warning("snapshot_left_out", reason=str(error))  # the next start folds more of the log
                self._left_out_step = self._state.checkpoint_step
        return 0

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run work in a thread that reads data or calls a user's function.

        Raises:
            InputError: the data or the function cannot be used; a restart would not help.
        """
        try:
            return await to_thread.run_sync(work, abandon_on_cancel=True)
        except DataError as error:
            await self._tracebacks.publish(describe_source(self._topology.data), error.trace)
            raise InputError(error.problem) from error

    async def _may_issue(self, decision: GroupsIssued, prompts: TrainingPrompts) -> bool:
        """Whether the streams have room for these groups and for prompts that must be stored first."""
        numbers = [issued.prompt for issued in decision.groups]
        if isinstance(prompts, DrawnPrompts) and not prompts.is_drawn(decision, self._state):
            with self._activity(describe_source(self._topology.data)):
                await self._in_thread(lambda: prompts.draw(decision, self._state))
            self._issue_prompts = {}
        if any(number not in self._issue_prompts for number in numbers):
            with self._activity(describe_source(self._topology.data)):
                self._issue_prompts = await self._in_thread(
                    lambda: {number: prompts.prompt(number) for number in numbers}
                )
        adding = await to_thread.run_sync(
            self._store.bytes_to_store, decision, self._state, self._issue_prompts, abandon_on_cancel=True
        )
        adding += prompts.pending_bytes if isinstance(prompts, DrawnPrompts) else 0
        return not await self._pressure.holds(self._state, adding=adding)

    async def _citing(self, decision: Message, prompts: TrainingPrompts) -> Message:
        """Store prompts that are too large for tasks, and states; return the decision, citing them."""
        if isinstance(decision, SnapshotTaken):
            return await self._snapshots.with_state(decision, self._state)
        try:
            if isinstance(decision, GroupsIssued) and isinstance(prompts, DrawnPrompts):
                decision = await prompts.citing(self._bus, decision, self._state)
            return await self._store.citing(decision, self._state, self._issue_prompts)
        except StreamFull as error:
            raise InputError(NO_ROOM_FOR_PROMPTS) from error

    async def _next_decision(self, schedule: Schedule) -> Message | None:
        """The next decision, if any. No event is folded while a user's selection function runs."""
        if self._rest_of_batch:
            return self._rest_of_batch.pop(0)
        state, snapshots = self._state, self._state.checkpoint_step > self._left_out_step
        if self._snapshot_lost:
            self._snapshot_lost = False
            return snapshot_of(state)
        decision = decide(state, schedule, snapshots=snapshots)
        while isinstance(decision, Selection):
            if decision.kind == "buffer_filter" and await self._pressure.holds(state):
                return None  # a choice could not be issued now
            decision = decide(state, schedule, await self._selector.choose(decision), snapshots=snapshots)
        if isinstance(decision, BatchReady):
            decision, *self._rest_of_batch = events_of(decision)
        return decision

    async def _effects(self, event: Message, prompts: TrainingPrompts) -> None:
        state = self._state
        self._prefixes.note(event)
        match event:
            case GroupsIssued():
                if isinstance(prompts, DrawnPrompts):
                    prompts.folded(event, state)
                groups = [state.groups[issued.group_id] for issued in event.groups if issued.group_id in state.groups]
                available = AvailablePrompts(self._issue_prompts, prompts)
                await self._publish_tasks(rollout_task(self._topology, group, available, state) for group in groups)
                self._issue_prompts = {}
            case EvalIssued():
                await self._begin_evaluation(prompts)
            case EvalCompleted():
                await self._publish_tasks(islice(self._eval_tasks, 1))
            case MessageDeadLettered():
                await self._publish_tasks(islice(self._eval_tasks, 1))  # it may be the end of an evaluation item
                await self._requeue(event.subject, prompts)
            case CheckpointSaved() | SnapshotTaken():
                await self._purge_payloads(prompts)
            case _:
                pass

    async def _purge_payloads(self, prompts: TrainingPrompts) -> None:
        """Purge the data messages that no group, batch, dump, prompt or protected snapshot needs."""
        of_snapshots = self._snapshots.needed_from(short=self._pressure.is_high(Plane.DATA))
        elsewhere = min(self._recorder.low_water(), self._store.needed_from, of_snapshots)
        if isinstance(prompts, DrawnPrompts):
            elsewhere = min(elsewhere, prompts.needed_from)
        needed = min(elsewhere, await to_thread.run_sync(self._state.low_water))
        await self._bus.purge(Plane.DATA, below_seq=needed)

    async def _requeue(self, subject: str, prompts: TrainingPrompts) -> None:
        """Republish the task whose final message was dead-lettered."""
        keys = [key_of(subject, ending) for ending in (GroupCompleted, GroupAborted, GroupFailed)]
        lost = [group for key in keys if key is not None and (group := in_flight(self._state, key)) is not None]
        await self._publish_tasks(rollout_task(self._topology, group, prompts, self._state) for group in lost)
        if key_of(subject, EvalCompleted) is not None:
            await self._begin_evaluation(prompts)

    async def _publish_open_tasks(self, prompts: TrainingPrompts) -> None:
        """Republish all open tasks after a start. The bus refuses duplicates of tasks that are queued or leased."""
        await self._publish_tasks(tasks_in_flight(self._topology, self._state, prompts))
        await self._begin_evaluation(prompts)

    async def _begin_evaluation(self, prompts: TrainingPrompts) -> None:
        """Publish the first tasks of the running evaluation. Each item that ends adds the next, to bound the queue."""
        evaluation = self._state.evaluation
        if evaluation is not None:
            self._eval_tasks = eval_tasks(self._topology, evaluation, prompts.evals)
            await self._publish_tasks(islice(self._eval_tasks, EVAL_TASKS_QUEUED))

    async def _publish_tasks(self, tasks: Iterable[Task]) -> None:
        """Build tasks in a thread, since a user's function may supply their prompts, and publish them."""
        with self._activity(describe_source(self._topology.data)):
            ready = iter(await self._in_thread(lambda: list(tasks)))

        async def put() -> None:
            for task in ready:
                await self._publish_task(task)

        async with anyio.create_task_group() as group:
            for _ in range(MAX_CONCURRENT_PUBLISHES):
                group.start_soon(put)

    async def _publish_task(self, task: Task) -> None:
        try:
            await self._bus.publish(await self._store.task(self._prefixes.hinted(task)))
        except StreamFull as error:
            raise InputError(NO_ROOM_FOR_PROMPTS) from error
        except AlreadyQueued:
            log.debug("task_still_queued", task=task.key())
        except MessageRefused as error:  # a retry would be refused too
            log.warning("task_refused", task=task.key(), reason=str(error))
            for ending in failed_endings(task, str(error), self._bus.name):
                await self._bus.publish(ending)
