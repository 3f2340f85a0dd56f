"""Processes one prompt group from its task to its end: generate, store, report, score."""

import time
from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from actors.rollout.groups.generating import Generation
from actors.rollout.groups.open_samples import OpenSample
from actors.rollout.groups.scoring import SampleScoring
from actors.rollout.groups.spilling import SegmentStore
from actors.rollout.groups.tasks import GroupTask
from actors.rollout.groups.tools import GroupDependencies
from actors.rollout.pools.columns import SampleColumns
from messages import EngineNumbers, SampleStatus


class GroupRun:
    """Generates and scores the samples of one group.

    Scores are requested as samples end, while others still generate.
    """

    def __init__(self, task: GroupTask, samples: Sequence[OpenSample], tools: GroupDependencies) -> None:
        self.samples = samples
        self.spilled_at = time.monotonic()  # or started
        self._task = task
        self._running = tools.generator.running
        self._scoring = SampleScoring(
            task, tools.scorer, failed_reward=tools.failed_reward, reward_keys=tools.reward_keys
        )
        self._columns = SampleColumns(task, tools.bus, tools.pools_of(task.prompt.data))
        self._store = SegmentStore(task, samples, tools.bus, self._scoring.start_ended)
        self._generation = Generation(task, tools, self._store, self._note_ended, self._note_answer)
        self._tasks: TaskGroup | None = None  # runs scoring, columns and spilling
        self._on_generated: Callable[[], None] | None = None
        self._halted = False
        self._until_halt = anyio.CancelScope()

    @property
    def generated_s(self) -> float:
        """Seconds from the start to the last token."""
        return self._generation.took_s

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

    async def run(self, on_generated: Callable[[], None]) -> None:
        """Process all samples to their end, or until the round is halted.

        Args:
            on_generated: called once no sample needs an engine any more, perhaps more than once; the last samples may
                not be stored yet.

        Raises:
            RequestRefused: an engine reports that a request is invalid.
            ValueError: an engine's answer is invalid.
        """
        self._on_generated = on_generated
        with self._running.on_halt(self._task.round, self._halt), self._until_halt:
            try:
                async with anyio.create_task_group() as self._tasks:
                    self._scoring.begin(self._tasks)
                    self._columns.begin(self._tasks)
                    await self._generate_and_score(on_generated)
            finally:
                self._tasks = None

    async def _generate_and_score(self, on_generated: Callable[[], None]) -> None:
        unfinished = self._generation.unfinished(self.samples)
        self._note_ended(self.samples)
        await self._generation.run(unfinished)
        on_generated()
        if self._halted:
            self._until_halt.cancel()
        elif self._task.group_rm and self.generated:
            self._scoring.start(self.samples)

    def _note_ended(self, samples: Sequence[OpenSample]) -> None:
        """Request scores and columns of samples that may have all their tokens."""
        self._scoring.start_ended(samples)
        self._columns.start(samples)

    def _note_answer(self) -> None:
        if self.generated and self._on_generated is not None:
            self._on_generated()

    def spill(self) -> None:
        """Start to store and report the current samples. No-op once the group has ended."""
        self.spilled_at = time.monotonic()
        if self._tasks is not None and self._task.store and not self._halted:
            self._tasks.start_soon(self._store.spill, self._generation.streams)

    def _halt(self) -> None:
        """Stop waiting for scores and columns. Generation then ends by itself and keeps its tokens."""
        self._halted = True
        self._scoring.halt()
        self._columns.halt()
        self._generation.halt()
        if self._generation.over:
            self._until_halt.cancel()
