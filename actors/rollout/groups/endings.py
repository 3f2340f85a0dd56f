"""How a delivery of a task ends: the event that says what became of its prompt group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog

from messages import (
    EvalCompleted,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Prompt,
    RolloutRequested,
    SampleStatus,
    SampleSummary,
)
from messages.plain import clipped
from runtime.bus.bus import Bus
from runtime.bus.errors import MessageRefused

if TYPE_CHECKING:  # recorded samples need no engine, and nothing that speaks to one
    from actors.rollout.groups.run import GroupRun

log = structlog.get_logger()

MAX_REASON_CHARS = 2000  # what a user's function raised may say anything
Ending = GroupCompleted | GroupAborted | GroupFailed


@dataclass(frozen=True)
class Endings:
    """The ways in which one delivery may end."""

    task: RolloutRequested
    lease: str
    instance: str

    def of(self, run: "GroupRun") -> Ending:
        """Of a run that is over: everything is there, or a halt left some of it undone, or there is no reward."""
        samples = tuple(sample.summary() for sample in run.samples)
        if not run.complete:
            return self.aborted(samples)
        failed = [sample for sample in run.samples if sample.status is SampleStatus.FAILED]
        if failed:
            return self.failed(f"reward: {failed[0].reason or 'no reward'}")
        completed = self.completed(
            samples, self.task.prompt, rollout_time_s=run.generated_s, reward_time_s=run.scored_s
        )
        return msgspec.structs.replace(completed, engine=run.engine)

    def completed(
        self, samples: Sequence[SampleSummary], prompt: Prompt, *, rollout_time_s: float, reward_time_s: float = 0.0
    ) -> GroupCompleted:
        """All samples of the prompt are there, and scored."""
        return GroupCompleted(
            group_id=self.task.group_id,
            attempt=self.task.attempt,
            round=self.task.round,
            lease=self.lease,
            instance=self.instance,
            data=prompt.data,
            samples=tuple(samples),
            metadata={} if prompt.parts else prompt.metadata,
            prompt_parts=prompt.parts,
            rollout_time_s=rollout_time_s,
            reward_time_s=reward_time_s,
        )

    def aborted(self, samples: Sequence[SampleSummary]) -> GroupAborted:
        """Given back with what there is."""
        return GroupAborted(
            group_id=self.task.group_id,
            attempt=self.task.attempt,
            round=self.task.round,
            lease=self.lease,
            instance=self.instance,
            samples=tuple(samples),
        )

    def failed(self, reason: str) -> GroupFailed:
        """It would go wrong again."""
        return GroupFailed(
            group_id=self.task.group_id,
            attempt=self.task.attempt,
            round=self.task.round,
            lease=self.lease,
            instance=self.instance,
            reason=clipped(reason, MAX_REASON_CHARS),
        )

    async def publish(self, bus: Bus, ending: Ending) -> None:
        """Say it; of what no event can carry, that it failed."""
        try:
            await bus.publish(ending)
        except MessageRefused as error:  # what users' functions note, for one, has no bound
            await bus.publish(self.failed(str(error)))


async def publish_eval(bus: Bus, task: EvalRequested, samples: tuple[SampleSummary, ...]) -> None:
    """Say what became of an item of an evaluation, with as much of it as an event may hold."""
    event = EvalCompleted(
        step=task.step,
        set=task.set,
        item=task.item,
        version=task.version,
        instance=bus.name,
        samples=samples,
    )
    bare = tuple(msgspec.structs.replace(sample, score=None, metadata={}, reason=None) for sample in samples)
    for said in (samples, bare, ()):
        try:
            await bus.publish(msgspec.structs.replace(event, samples=said))
        except MessageRefused as error:
            log.warning("details_left_out", set=task.set, item=task.item, reason=str(error))
        else:
            return
