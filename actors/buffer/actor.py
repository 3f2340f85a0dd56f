"""The buffer actor: keeps the ledger, decides what happens next, puts the work."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import structlog
from anyio import to_thread
from anyio.abc import TaskStatus

from actors.buffer.deciding.decide import Schedule, decide
from actors.buffer.deciding.selecting import Selector
from actors.buffer.deciding.selection import Selection
from actors.buffer.deciding.tasks import eval_tasks, failed_ending, rollout_task, schedule_of, tasks_in_flight
from actors.buffer.ledger_log import LedgerLog
from actors.buffer.prompts.made import MadePrompts
from actors.buffer.prompts.source import PromptSet, load_prompts
from actors.buffer.prompts.storing import PromptsAtHand, PromptStore
from actors.buffer.storage.pressure import LOOK_AGAIN_S, Pressure
from actors.buffer.storage.recorder import Recorder
from actors.buffer.storage.trimming import Trimmer
from actors.buffer.waiting import Doing, prompts_of, words_of
from messages import (
    BatchReady,
    BufferStarted,
    CheckpointRequested,
    CheckpointSaved,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
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
    SnapshotTaken,
    SpillsGiven,
    SpillsRequested,
)
from messages.subjects import key_of
from runtime.bus.background import beside
from runtime.bus.bus import Bus
from runtime.bus.errors import AlreadyQueued, Fenced, MessageRefused, StreamFull
from runtime.bus.events import Events
from runtime.host.actor import Actor, InputError
from runtime.ledger.archive import first_archived
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState
from runtime.ledger.groups import spills_of
from runtime.ledger.state import Stage
from runtime.samples.data_files import DataError
from runtime.settings.sizes import stream_limits
from runtime.settings.topology import Topology

log = structlog.get_logger()

T = TypeVar("T")

PUTS_AT_ONCE = 64  # tasks that are being published at the same time
EVAL_TASKS_QUEUED = 512  # of one evaluation at a time
NO_ROOM_FOR_PROMPTS = (
    "the data stream is full of what is needed, and takes no more prompts: raise bus.data_bytes, "
    "or save more often (train.save_interval)"
)


class BufferActor(Actor):
    """Owns the ledger. A crash loses nothing: the log is folded again and every open task is put again.

    Of two buffers the older one stops as fenced: an append succeeds only on the ledger that its writer has folded.
    """

    reads = (*LEDGER_EVENTS, PhaseChanged, PromptsLoaded, SpillsRequested, SegmentsPublished, PromptStored)
    writes = (
        BufferStarted,
        GroupsIssued,
        RoundHalted,
        BatchReady,
        GroupsClosed,
        EvalIssued,
        EvalEnded,
        SnapshotTaken,
        RunFinished,
        RunFailed,
        PromptsLoaded,
        RolloutRequested,
        EvalRequested,
        SpillsGiven,
        CheckpointRequested,
        LogTrimmed,
        SelectionFailed,
        PromptStored,
        GroupFailed,
        EvalCompleted,
    )

    def __init__(self, topology: Topology, bus: Bus, run_dir: Path) -> None:
        self._topology = topology
        self._bus = bus
        self._run_dir = run_dir
        self._log = LedgerLog(bus, run_dir, stream_limits(topology).event_bytes)
        self._left_out_step = 0  # of the newest checkpoint whose snapshot is more than an event can hold
        self._selector = Selector(topology, bus.publish)
        self._trimmer = Trimmer(bus, run_dir, topology.buffer.trim_min_events)
        self._pressure = Pressure(bus, self._trimmer.is_busy)
        self._schedule: Schedule | None = None  # once the data are read
        self._doing = Doing()
        self._store = PromptStore(bus)
        self._made: dict[int, Prompt] = {}  # prompts of the groups that are being issued, by number
        self._recorder = Recorder(topology, bus)
        self._eval_tasks: Iterator[EvalRequested] = iter(())  # of the running evaluation, still to be put

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._doing(prompts_of(self._topology.data)):
            prompts = await _in_thread(lambda: load_prompts(self._topology))
        await self._refuse_other_data(prompts)
        await self._recorder.prepare()
        sizes = {name: len(items) for name, items in prompts.evals.items()}
        self._schedule = schedule = schedule_of(self._topology, sizes)
        await self._log.load()
        async with (
            beside(self._trimmer.run),
            beside(self._pressure.run),
            beside(self._recorder.run),
            self._bus.read(*LEDGER_EVENTS, from_seq=self._state.last_seq + 1) as events,
        ):
            await self._log.take_over(events, lambda: self._fold_next(events))  # a full log is trimmed meanwhile
            for loaded in prompts.loaded:
                await self._bus.publish(loaded)
            task_status.started()
            async with self._bus.serve({SpillsRequested: self._spills}):
                await self._put_everything_open(prompts)
                await self._keep_deciding(events, schedule, prompts)

    @property
    def _state(self) -> LedgerState:
        return self._log.state

    def stats(self) -> dict[str, float]:
        return {name: float(count) for name, count in msgspec.structs.asdict(self._state.books()).items()}

    def waits_for(self) -> str:
        if self._schedule is None or self._doing.words():
            return self._doing.words()
        room = f"room ({self._pressure.holding}); " if self._pressure.holding else ""
        return room + words_of(self._state, self._schedule)

    async def _spills(self, request: SpillsRequested) -> SpillsGiven:
        """What whoever works on an attempt after a crash may go on from."""
        samples = spills_of(self._state, request.group_id, request.attempt)
        return SpillsGiven(group_id=request.group_id, attempt=request.attempt, samples=samples)

    async def _refuse_other_data(self, prompts: PromptSet | MadePrompts) -> None:
        """The ledger counts prompts by number: on changed data, a resumed run would repeat some and skip others."""
        known: dict[str, list[str]] = {}  # a training source and an evaluation set may share a name
        announced = await _in_thread(lambda: _loaded_first(self._run_dir))
        async with self._bus.read(PromptsLoaded) as events:
            async for received in events.so_far():
                announced.append(received.message)
        for loaded in announced:
            if loaded.fingerprint:
                known.setdefault(loaded.data, []).append(loaded.fingerprint)
        for loaded in prompts.loaded:
            before = known.get(loaded.data, [loaded.fingerprint])
            if loaded.fingerprint not in before:
                raise InputError(
                    f"data {loaded.data} is not what this run began with: its fingerprint is {loaded.fingerprint}, "
                    f"it was {' or '.join(dict.fromkeys(before))}. Bring its file and tokenizer back as they were, "
                    f"choose another run.name, or start over with --fresh {self._topology.run.name}"
                )

    async def _fold_next(self, events: Events[Message]) -> Message | None:
        """Wait for an event and fold it; None when it could not be read and was the last one for now.

        While issuing waits for room nothing may happen, so this ends from time to time, with None too.
        """
        received = await events.next(LOOK_AGAIN_S if self._pressure.holding else None)
        if received is None:
            return None
        self._log.fold(received)
        self._pressure.folded(self._state)
        if isinstance(received.message, SnapshotTaken):
            keep_from = self._recorder.needed_seq()
            self._trimmer.snapshot_taken(self._state, received.message.covers, keep_from=keep_from)
        return received.message

    async def _keep_deciding(
        self, events: Events[Message], schedule: Schedule, prompts: PromptSet | MadePrompts
    ) -> None:
        """One decision at a time: append it, read it back, fold it, then let its effects happen."""
        state, incarnation, outstanding = self._state, self._state.incarnation, 0
        while True:
            if outstanding <= state.last_seq and not events.pending:
                self._store.settled()
                outstanding = await self._decide(schedule, prompts)
            event = await self._fold_next(events)
            if state.incarnation > incarnation:
                raise Fenced(f"buffer {state.incarnation} took over from buffer {incarnation}")
            if event is not None:
                await self._effects(event, prompts)

    async def _decide(self, schedule: Schedule, prompts: PromptSet | MadePrompts) -> int:
        """Append what is decided now; return its sequence, or 0 when there was nothing or somebody wrote first."""
        while (decision := await self._next_decision(schedule)) is not None:
            if isinstance(decision, GroupsIssued) and not await self._may_issue(decision, prompts):
                return 0
            if isinstance(decision, RunFinished | RunFailed):  # after it the processes are stopped
                await self._recorder.write_rest(self._state.last_seq)
            try:
                return await self._log.append(await self._citing(decision))
            except MessageRefused as error:
                if not isinstance(decision, SnapshotTaken):
                    raise
                log.warning("snapshot_left_out", reason=str(error))  # a start then folds more of the log
                self._left_out_step = self._state.checkpoint_step
        return 0

    async def _may_issue(self, decision: GroupsIssued, prompts: PromptSet | MadePrompts) -> bool:
        """Whether there is room for groups, and for what has to be stored of their prompts before."""
        numbers = [issued.prompt for issued in decision.groups]
        if any(number not in self._made for number in numbers):
            with self._doing(prompts_of(self._topology.data)):
                self._made = await _in_thread(lambda: {number: prompts.prompt(number) for number in numbers})
        adding = self._store.bytes_to_store(decision, self._state, self._made)
        return not await self._pressure.holds(self._state, adding=adding)

    async def _citing(self, decision: Message) -> Message:
        """A decision, once what it issues is stored as far as it is too large for tasks."""
        try:
            return await self._store.citing(decision, self._state, self._made)
        except StreamFull as error:
            raise InputError(NO_ROOM_FOR_PROMPTS) from error

    async def _next_decision(self, schedule: Schedule) -> Message | None:
        """What is decided now. Nothing is folded while a user's function is asked for its choice."""
        state, snapshots = self._state, self._state.checkpoint_step > self._left_out_step
        decision = decide(state, schedule, snapshots=snapshots)
        while isinstance(decision, Selection):
            if decision.kind == "buffer_filter" and await self._pressure.holds(state):
                return None  # what it chose could not be issued now
            decision = decide(state, schedule, await self._selector.choose(decision), snapshots=snapshots)
        return decision

    async def _effects(self, event: Message, prompts: PromptSet | MadePrompts) -> None:
        state = self._state
        match event:
            case GroupsIssued():
                groups = [state.groups[issued.group_id] for issued in event.groups if issued.group_id in state.groups]
                at_hand = PromptsAtHand(self._made, prompts)
                await self._put(rollout_task(self._topology, group, at_hand, state.version_steps) for group in groups)
                self._made = {}
            case EvalIssued():
                await self._begin_evaluation(prompts)
            case EvalCompleted():
                await self._put(islice(self._eval_tasks, 1))
            case MessageDeadLettered():
                await self._put(islice(self._eval_tasks, 1))  # it may be that of an item
                await self._put_again(event.subject, prompts)
            case CheckpointSaved():
                needed = min(state.low_water(), self._recorder.low_water(), self._store.needed_from)
                await self._bus.purge(Plane.DATA, below_seq=needed)
            case _:
                pass

    async def _put_again(self, subject: str, prompts: PromptSet | MadePrompts) -> None:
        """The task of which nobody can read how it ended."""
        keys = {key_of(subject, ending) for ending in (GroupCompleted, GroupAborted, GroupFailed)}
        groups = self._state.in_stage(Stage.IN_FLIGHT).values()
        lost = [group for group in groups if f"{group.group_id}.{group.attempt}" in keys]
        await self._put(rollout_task(self._topology, group, prompts, self._state.version_steps) for group in lost)
        if key_of(subject, EvalCompleted) is not None:
            await self._begin_evaluation(prompts)

    async def _put_everything_open(self, prompts: PromptSet | MadePrompts) -> None:
        """After a start: tasks that are still queued or being worked on refuse the second copy."""
        await self._put(tasks_in_flight(self._topology, self._state, prompts))
        await self._begin_evaluation(prompts)

    async def _begin_evaluation(self, prompts: PromptSet | MadePrompts) -> None:
        """Put the first tasks; each item that ends brings the next one, for the queue has room for some sets only."""
        evaluation = self._state.evaluation
        if evaluation is not None:
            self._eval_tasks = eval_tasks(self._topology, evaluation, prompts.evals)
            await self._put(islice(self._eval_tasks, EVAL_TASKS_QUEUED))

    async def _put(self, tasks: Iterable[RolloutRequested | EvalRequested]) -> None:
        """Make tasks, off the event loop, since their prompts may come from a user's function, and put them."""
        limiter = anyio.Semaphore(PUTS_AT_ONCE)

        async def put(task: RolloutRequested | EvalRequested) -> None:
            async with limiter:
                try:
                    await self._bus.publish(await self._store.task(task))
                except StreamFull as error:
                    raise InputError(NO_ROOM_FOR_PROMPTS) from error
                except AlreadyQueued:
                    log.debug("task_still_queued", task=task.key())
                except MessageRefused as error:  # it would be the next time too
                    log.warning("task_refused", task=task.key(), reason=str(error))
                    await self._bus.publish(failed_ending(task, str(error), self._bus.name))

        with self._doing(prompts_of(self._topology.data)):
            made = await _in_thread(lambda: list(tasks))
        async with anyio.create_task_group() as group:
            for task in made:
                group.start_soon(put, task)


def _loaded_first(run_dir: Path) -> list[PromptsLoaded]:
    """What the archive says of the data that the run began with."""
    return [received.message for received in first_archived(run_dir) if isinstance(received.message, PromptsLoaded)]


async def _in_thread(work: Callable[[], T]) -> T:
    """Do what reads data or calls a user's function; a restart would not mend what is wrong there."""
    try:
        return await to_thread.run_sync(work, abandon_on_cancel=True)
    except DataError as error:
        raise InputError(str(error)) from error
