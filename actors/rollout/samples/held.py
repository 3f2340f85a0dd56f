"""Generate functions that live over halts: a group that comes again to its rollout actor goes on, without a replay.

At a halt a group is given back with its tokens, and its functions stay as they are: each waits in `generate`, or does
work of its own, until the group's next delivery. Another rollout actor that gets the group runs them again.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from actors.rollout.samples.conversation import Conversation, GenerateFunction
from actors.rollout.samples.function_run import Ask, Keep
from actors.rollout.samples.must_end import GiveUp
from actors.rollout.samples.sample import OpenSample
from messages import (
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    RunFailed,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SamplingParams,
    SegmentsSpilled,
)
from runtime.ledger.groups import closed_by
from runtime.util.formatting import count_of

log = structlog.get_logger()

FOLLOWED: Final = (GroupsClosed, RunFinished, RunFailed)  # events after which functions are not held
OF_OTHERS: Final = (GroupCompleted, GroupAborted, GroupFailed, SegmentsSpilled)  # the same, of other rollout actors
NAMED: Final = 5  # groups that a wait names


class Delivery(NamedTuple):
    """What a function uses of the delivery that its sample belongs to."""

    ask: Ask
    keep: Keep
    give_up: GiveUp


class Episode:
    """A function that generates a sample, from its start to its end, over any number of deliveries."""

    def __init__(self) -> None:
        self.conversation: Conversation | None = None  # once it was started
        self.has_ended = False
        self._status = SampleStatus.PENDING
        self._error: Exception | None = None
        self._delivery: Delivery | None = None
        self._bound = anyio.Event()  # replaced at a halt
        self._over = anyio.Event()  # the function has ended, or uses its delivery no more
        self._ended = anyio.Event()
        self._num_halts = 0
        self._num_inside = 0  # calls that use the delivery
        self._scope = anyio.CancelScope()

    async def run(self, conversation: Conversation, function: GenerateFunction) -> None:
        """Run the function. What it raises is raised where its end is waited for."""
        try:
            with self._scope:
                self._status = await conversation.run(function)
        except Exception as error:  # noqa: BLE001 - `status` raises it
            self._error = error
        finally:
            self.has_ended = True
            self._over.set()
            self._ended.set()

    async def carried_by(self, delivery: Delivery) -> bool:
        """Let the function use a delivery until it has ended or `halt` is called. Return whether it has ended.

        Calls that have begun before a halt end first and keep their tokens. A cancellation ends the function.
        """
        self._over = anyio.Event()
        if not self.has_ended:
            self._delivery = delivery
            self._bound.set()
            try:
                await self._over.wait()
            except anyio.get_cancelled_exc_class():
                self.cancel()
                with anyio.CancelScope(shield=True):  # must_end.py bounds it
                    await self._ended.wait()
                raise
        self._unbind()
        return self.has_ended

    def halt(self) -> None:
        """Let the function use its delivery no longer; its next turn waits for another one."""
        self._num_halts += 1
        self._unbind()
        self._look()

    def cancel(self) -> None:
        """End the function; nothing of it is used any more."""
        self._scope.cancel()

    def status(self) -> SampleStatus:
        """Return the final status of the sample, whose function has ended. Raises what `Conversation.run` raised."""
        if self._error is not None:
            raise self._error
        return self._status

    async def ask(self, sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        """Send one request; return whether the turn needs another one, as after a halt."""
        async with self._used() as delivery:
            num_halts = self._num_halts
            goes_on = await delivery.ask(sample, params, limit)
            is_halted = self._num_halts != num_halts
        return goes_on or (is_halted and sample.turn_status is SampleStatus.ABORTED)

    async def keep(self, sample: OpenSample) -> None:
        """Store the tokens of a service."""
        async with self._used() as delivery:
            await delivery.keep(sample)

    async def give_up(self, reason: str) -> None:
        """End the delivery, if there is one, though the function goes on."""
        if self._delivery is not None:
            await self._delivery.give_up(reason)

    @asynccontextmanager
    async def _used(self) -> AsyncGenerator[Delivery]:
        """Wait for a delivery, and use it in the block."""
        while (delivery := self._delivery) is None:
            await self._bound.wait()
        self._num_inside += 1
        try:
            yield delivery
        finally:
            self._num_inside -= 1
            self._look()

    def _look(self) -> None:
        if self._delivery is None and not self._num_inside:
            self._over.set()

    def _unbind(self) -> None:
        if self._delivery is not None:
            self._delivery, self._bound = None, anyio.Event()


@dataclass
class HeldGroup:
    """The samples of a group between two deliveries, and the functions that generate them."""

    attempt: int  # that ended
    samples: dict[int, OpenSample]  # by index
    episodes: dict[int, Episode] = field(default_factory=dict[int, Episode])  # by index of the sample
    held_at: float = field(default_factory=anyio.current_time)

    @classmethod
    def of(cls, attempt: int, samples: Iterable[OpenSample], episodes: dict[int, Episode]) -> "HeldGroup":
        """Return what stays of a run that has ended. A sample whose function failed is generated again."""
        kept = [sample for sample in samples if sample.status is not SampleStatus.FAILED]
        for part in (part for sample in kept for part in sample.parts):
            part.request = None
            part.score_requested = part.score_requested and not part.unscored
        return cls(attempt, {sample.index: sample for sample in kept}, episodes)

    def matching(self, carried: Sequence[SampleSummary]) -> "HeldGroup":
        """Return the samples that have the same stored tokens as a task, and end the functions of the others."""
        stored = {(one.index, one.part): one.segments for one in carried if one.segments}
        samples = {
            index: sample
            for index, sample in self.samples.items()
            if {(index, part.part): tuple(part.refs) for part in sample.parts if part.refs}
            == {key: segments for key, segments in stored.items() if key[0] == index}
        }
        self.end(index for index in self.episodes if index not in samples)
        episodes = {index: episode for index, episode in self.episodes.items() if index in samples}
        return HeldGroup(self.attempt, samples, episodes, self.held_at)

    def end(self, indices: Iterable[int] | None = None) -> None:
        """End the functions of some samples; None: all."""
        for index in list(self.episodes) if indices is None else list(indices):
            self.episodes.pop(index).cancel()


class Episodes:
    """The functions of a rollout actor that live over halts, and the groups whose functions wait for a delivery.

    Args:
        most: functions that wait at a time. With more those of the groups that wait longest are ended.
        limit_s: seconds that a group's functions wait. They are ended then; the group runs them again.
    """

    def __init__(self, *, most: int, limit_s: float) -> None:
        self._most, self._limit_s = most, limit_s
        self._groups: dict[int, HeldGroup] = {}  # by id, those that wait longest first
        self._tasks: TaskGroup | None = None
        self._changed = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the functions. Never returns."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            while True:
                self._changed = anyio.Event()
                oldest_id, oldest = next(iter(self._groups.items()), (-1, None))
                left_s = float("inf") if oldest is None else oldest.held_at + self._limit_s - anyio.current_time()
                with anyio.move_on_after(left_s) as waiting:
                    await self._changed.wait()
                if waiting.cancelled_caught:
                    self.let_go([oldest_id], f"held for {self._limit_s:g} s (rollout.generate_timeout_s)")

    def start(self, episode: Episode, conversation: Conversation, function: GenerateFunction) -> None:
        """Start the function of an episode."""
        assert self._tasks is not None
        episode.conversation = conversation
        self._tasks.start_soon(episode.run, conversation, function)

    def hold(self, group_id: int, group: HeldGroup) -> None:
        """Keep a group that is given back, until it comes again."""
        self.let_go([group_id], "held anew")
        self._groups[group_id] = group
        while self.num_held > self._most and len(self._groups) > 1:
            self.let_go([next(iter(self._groups))], f"more than {self._most} functions are held")
        self._changed.set()

    def take(self, group_id: int, carried: Sequence[SampleSummary]) -> HeldGroup | None:
        """Return what is held of a group that comes again, as far as it has the tokens of its task."""
        group = self._groups.pop(group_id, None)
        self._changed.set()
        return None if group is None else group.matching(carried)

    def let_go(self, group_ids: Iterable[int], reason: str) -> None:
        """End the functions that are held for groups."""
        for group_id in group_ids:
            group = self._groups.pop(group_id, None)
            if group is not None:
                if group.episodes:
                    log.info("functions_let_go", group_id=group_id, number=len(group.episodes), reason=reason)
                group.end()
                self._changed.set()

    def note(self, event: object, instance: str) -> None:
        """Note an event of the log: groups that ended elsewhere or nowhere need no functions.

        Args:
            event: read from the log; others than those of FOLLOWED and OF_OTHERS change nothing.
            instance: this process.
        """
        closed, reason = closed_by(event)
        self.let_go(closed, f"the group was closed: {reason}")
        match event:
            case RunFinished() | RunFailed():
                self.let_go(list(self._groups), "the run has ended")
            case GroupCompleted() | GroupAborted() | GroupFailed() | SegmentsSpilled() if event.instance != instance:
                group = self._groups.get(event.group_id)
                if group is not None and event.attempt > group.attempt:
                    self.let_go([event.group_id], f"{event.instance} has the group")
            case _:
                pass

    @property
    def num_held(self) -> int:
        """Number of functions that are held."""
        return sum(len(group.episodes) for group in self._groups.values())

    def waits_for(self) -> str:
        """Describe the groups whose functions are held; empty if there are none."""
        waiting = {group_id: group for group_id, group in self._groups.items() if group.episodes}
        if not waiting:
            return ""
        for_s = anyio.current_time() - next(iter(waiting.values())).held_at
        ids = ", ".join(map(str, list(waiting)[:NAMED])) + (", ..." if len(waiting) > NAMED else "")
        what = f"the next issue of {count_of(len(waiting), 'prompt group')} ({ids})"
        return f"{what} with {count_of(self.num_held, 'function')} held, the first for {for_s:.0f} s"
