"""Processes one prompt group from its task to its end: generate, store, report, score."""

import time
from collections.abc import Sequence
from typing import Final

import anyio
from anyio.abc import TaskGroup

from actors.rollout.pools.columns import SampleColumns
from actors.rollout.samples.conversation import GenerateFunction
from actors.rollout.samples.generating import Generation
from actors.rollout.samples.held import HeldGroup
from actors.rollout.samples.partial import SegmentStore
from actors.rollout.samples.rollout_function import PromptGroup, RolloutFunction
from actors.rollout.samples.sample import OpenSample
from actors.rollout.samples.scoring import SampleScoring
from actors.rollout.samples.slots import GroupSlots
from actors.rollout.samples.tasks import GroupTask
from actors.rollout.samples.tools import GroupDependencies
from messages import EngineNumbers, LastSample, SampleStatus

AHEAD_S: Final = 10.0  # at most between a group's first request and the others; a long prompt on the CPU takes seconds


class GroupRun:
    """Generates and scores the samples of one group, each in a task of its own.

    A sample is scored as soon as it has its tokens, while they are stored and other samples generate.
    """

    def __init__(
        self,
        task: GroupTask,
        samples: Sequence[OpenSample],
        tools: GroupDependencies,
        held: HeldGroup | None = None,
    ) -> None:
        self._samples = samples
        self.spilled_at = time.monotonic()  # or started
        self.generated_s = 0.0  # seconds from the start to the last token
        self.last_sample = LastSample()
        self._task = task
        self._running = tools.generator.running
        self._scoring = SampleScoring(
            task,
            tools.scorer,
            policy=tools.policy,
            reward_keys=tools.reward_keys,
            fields=tools.sample_fields,
            per=tools.reward_per,
        )
        self._columns = SampleColumns(task, tools.bus, tools.pools_of(task.prompt.data))
        self._store = SegmentStore(task, samples, tools.bus)
        self._generation = Generation(task, tools, self._store, held)
        self._tasks: TaskGroup | None = None  # runs scoring, columns and spilling
        self._is_generated = False
        self._queued_s = 0.0
        self._halted = False
        self._until_halt = anyio.CancelScope()
        self._slots: GroupSlots | None = None
        self._rollout_function = tools.rollout_function(task.eval_set)
        self._rollout_calls = tools.rollout_calls
        self._prompt_group: PromptGroup | None = None  # of the running rollout function

    @property
    def samples(self) -> list[OpenSample]:
        """All samples, with their fan-out siblings, in order."""
        return [part for sample in self._samples for part in sample.parts]

    @property
    def scored_s(self) -> float:
        """Seconds from the last token to the last score."""
        return self._scoring.took_s

    @property
    def engine(self) -> EngineNumbers:
        """Statistics that engines reported for the requests of this group."""
        return self._generation.engine

    @property
    def generated(self) -> bool:
        """Whether every sample has all its tokens, or failed."""
        return all(sample.finished or sample.status is SampleStatus.FAILED for sample in self.samples)

    @property
    def complete(self) -> bool:
        """Whether every sample is finished and scored and has its columns, or failed."""
        return self.generated and not any(sample.unscored or self._columns.missing(sample) for sample in self.samples)

    @property
    def held(self) -> HeldGroup:
        """The samples, and the functions that wait for another delivery, after a halt."""
        return HeldGroup.of(self._task.attempt, self._samples, self._generation.episodes)

    async def run(self, slots: GroupSlots) -> None:
        """Process all samples to their end, or until the round is halted.

        Args:
            slots: of the group. Each sample has one while it generates.

        Raises:
            RequestRefused: an engine reports that a request is invalid.
            ValueError: an engine's answer is invalid.
        """
        self._slots = slots
        with self._running.on_halt(self._task.round, self._halt), self._until_halt:
            try:
                async with anyio.create_task_group() as self._tasks:
                    self._scoring.begin(self._tasks)
                    self._columns.begin(self._tasks)
                    await self._generate(slots)
                    if self._halted:
                        self._until_halt.cancel()
                    elif self._task.group_rm and self.generated:
                        self._scoring.start(self._samples)
            finally:
                self._tasks = None

    async def _generate(self, slots: GroupSlots) -> None:
        """Run all samples that need tokens; return once each has ended and is stored."""
        started, unfinished = time.monotonic(), self._generation.unfinished(self._samples)
        self._note_ended([sample for sample in self._samples if sample not in unfinished])
        slots.need(len(unfinished))
        if self._rollout_function is not None:
            await self._run_rollout_function(self._rollout_function, slots)
            unfinished = []
        batch = self._generation.batch(unfinished)
        async with anyio.create_task_group() as group:
            await self._start_samples([sample for sample in unfinished if sample not in batch], slots, group)
            if batch and await slots.take_batch(len(batch)):
                queued_s = time.monotonic() - started
                await self._generation.begin(batch)
                ended = [sample for sample in batch if sample.finished]
                for sample in batch:
                    if sample not in ended:
                        group.start_soon(self._finish_sample, sample, slots, queued_s)
                self._queued_s = queued_s
                await self._finish(ended, slots)
        self.generated_s = time.monotonic() - started
        self.last_sample = LastSample(
            queue_time_s=self._queued_s,
            engine=self._generation.last_engine,
            grader=self._task.prompt.rm_type or "",
            load=self._generation.last_load,
        )
        self._is_generated = True

    async def _start_samples(self, samples: list[OpenSample], slots: GroupSlots, group: TaskGroup) -> None:
        """Start samples, all at once or behind the first token of one of them."""
        if self._generation.goes_ahead(samples):
            first, samples = samples[0], samples[1:]
            begun = anyio.Event()
            self._generation.note_begun(first, begun.set)

            async def go_ahead() -> None:
                try:
                    await self._run_sample(first, slots)
                finally:
                    begun.set()

            group.start_soon(go_ahead)
            with anyio.move_on_after(AHEAD_S):
                await begun.wait()
        for sample in samples:
            group.start_soon(self._run_sample, sample, slots)

    async def _run_rollout_function(self, function: RolloutFunction, slots: GroupSlots) -> None:
        """Generate the samples in the order of a user's function."""

        async def run_sample(sample: OpenSample, generate: GenerateFunction | None) -> None:
            await self._run_sample(sample, slots, generate)

        self._prompt_group = PromptGroup(self._samples, run_sample, slots=slots, task=self._task)
        if self._halted:
            self._prompt_group.halt()
        of = self._task.round, self._task.eval_set, self._task.min_version if self._task.round is None else None
        await self._rollout_calls.run(function, self._prompt_group, of)

    async def _run_sample(
        self, sample: OpenSample, slots: GroupSlots, function: GenerateFunction | None = None
    ) -> None:
        """One sample from its slot to its score."""
        started = time.monotonic()
        if await slots.take():
            await self._finish_sample(sample, slots, time.monotonic() - started, function)

    async def _finish_sample(
        self, sample: OpenSample, slots: GroupSlots, queued_s: float, function: GenerateFunction | None = None
    ) -> None:
        """One sample from its first token to its score."""
        await self._generation.run(sample, function)
        self._queued_s = queued_s  # that of the last sample remains
        await self._finish([sample], slots)

    async def _finish(self, samples: Sequence[OpenSample], slots: GroupSlots) -> None:
        """Store and score samples after their last token."""
        for _ in samples:
            slots.give_back()
        self._scoring.start_ended(samples)  # while their tokens are stored
        await self._store.flush()
        self._columns.start([part for sample in samples for part in sample.parts])

    def _note_ended(self, samples: Sequence[OpenSample]) -> None:
        """Request scores and columns of samples that had all their tokens before."""
        self._scoring.start_ended(samples)
        self._columns.start([part for sample in samples for part in sample.parts])

    def spill(self) -> None:
        """Start to store and report the current samples. No-op once the group has ended."""
        self.spilled_at = time.monotonic()
        if self._tasks is not None and self._task.store and not self._halted:
            self._tasks.start_soon(self._store.spill)

    async def store(self) -> None:
        """Store and report the current samples, for another rollout actor."""
        if self._task.store and not self._halted:
            await self._store.spill()

    def _halt(self) -> None:
        """Stop waiting for scores and columns. Generation then ends by itself and keeps its tokens."""
        self._halted = True
        if self._slots is not None:
            self._slots.stop()
        self._scoring.halt()
        self._columns.halt()
        self._generation.halt()
        if self._prompt_group is not None:
            self._prompt_group.halt()
        if self._is_generated:
            self._until_halt.cancel()
