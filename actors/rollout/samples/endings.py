"""The event that ends a delivery of a task and reports the outcome of its prompt group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from msgspec import UNSET

from actors.rollout.samples.failures import MAX_REASON_CHARS
from actors.rollout.samples.garbled import signs_of
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

if TYPE_CHECKING:  # the offline actor must not import the engine client
    from actors.rollout.samples.group import GroupRun

log = structlog.get_logger()

MIN_LEFT: Final = 2  # samples of a group that lost others to failures; one alone has nothing to be compared with

Ending = GroupCompleted | GroupAborted | GroupFailed


@dataclass(frozen=True)
class Endings:
    """The possible endings of one delivery."""

    task: RolloutRequested
    lease: str
    instance: str
    num_held: int = 0  # functions of an aborted group that wait here for its next delivery

    def of(self, run: "GroupRun") -> Ending:
        """Return the ending of a finished run: completed, aborted by a halt, or failed for lack of a reward."""
        samples = tuple(sample.summary() for sample in run.samples)
        if not run.complete:
            return self.aborted(samples)
        prompt = self.task.prompt
        signs = (signs_of(sample.text, prompt.text) for sample in run.samples)
        samples = tuple(
            msgspec.structs.replace(sample, signs=found) if found else sample
            for sample, found in zip(samples, signs, strict=True)
        )
        failed = [sample for sample in run.samples if sample.status is SampleStatus.FAILED]
        trained = [
            sample for sample in run.samples if sample.status is not SampleStatus.FAILED and not sample.is_baseline
        ]
        first = next((sample for sample in failed if sample.is_at_fault), failed[0] if failed else None)
        enough = trained and (first is None or not first.is_at_fault or len({s.index for s in trained}) >= MIN_LEFT)
        if first is not None and not (enough and all(sample.is_dropped_alone for sample in failed)):
            reason = first.reason or "no reward"
            return self.failed(reason if first.is_given_up else f"reward: {reason}")
        completed = self.completed(samples, prompt, rollout_time_s=run.generated_s, reward_time_s=run.scored_s)
        return msgspec.structs.replace(completed, engine=run.engine, last_sample=run.last_sample)

    def completed(
        self, samples: Sequence[SampleSummary], prompt: Prompt, *, rollout_time_s: float, reward_time_s: float = 0.0
    ) -> GroupCompleted:
        """All samples of the prompt are generated and scored. The greedy one among them is kept apart."""
        return GroupCompleted(
            group_id=self.task.group_id,
            attempt=self.task.attempt,
            round=self.task.round,
            lease=self.lease,
            instance=self.instance,
            data=prompt.data,
            samples=tuple(sample for sample in samples if not sample.is_baseline),
            baseline=next((sample for sample in samples if sample.is_baseline), None),
            metadata={} if prompt.parts else prompt.metadata,
            prompt_parts=prompt.parts,
            rollout_time_s=rollout_time_s,
            reward_time_s=reward_time_s,
        )

    def aborted(self, samples: Sequence[SampleSummary]) -> GroupAborted:
        """The group is given back with its samples so far."""
        return GroupAborted(
            group_id=self.task.group_id,
            attempt=self.task.attempt,
            round=self.task.round,
            lease=self.lease,
            instance=self.instance,
            samples=tuple(samples),
            held=self.num_held or UNSET,
        )

    def failed(self, reason: str) -> GroupFailed:
        """The group failed permanently."""
        return GroupFailed(
            group_id=self.task.group_id,
            attempt=self.task.attempt,
            round=self.task.round,
            lease=self.lease,
            instance=self.instance,
            reason=clipped(reason, MAX_REASON_CHARS),
        )

    async def publish(self, bus: Bus, ending: Ending) -> None:
        """Publish an ending; if no event can carry it, publish a failure instead."""
        try:
            await bus.publish(ending)
        except MessageRefused as error:  # e.g. metadata of user functions has no size limit
            await bus.publish(self.failed(str(error)))


async def publish_eval(
    bus: Bus, task: EvalRequested, samples: tuple[SampleSummary, ...], *, not_asked: bool = False, failed: str = ""
) -> None:
    """Publish the outcome of an evaluation item, without details if they exceed the event size.

    Args:
        bus: the bus.
        task: of the item.
        samples: of the item.
        not_asked: whether the evaluation function of its set asked for no sample of it.
        failed: why that function failed; empty: it did not, or another item says it.
    """
    event = EvalCompleted(
        step=task.step,
        set=task.set,
        item=task.item,
        version=task.version,
        instance=bus.name,
        samples=samples,
        not_asked=not_asked,
        failed=clipped(failed, MAX_REASON_CHARS),
    )
    bare = tuple(msgspec.structs.replace(sample, score=None, metadata={}, reason=None) for sample in samples)
    for summaries in (samples, bare, ()):
        try:
            await bus.publish(msgspec.structs.replace(event, samples=summaries))
        except MessageRefused as error:
            log.warning("details_left_out", set=task.set, item=task.item, reason=str(error))
        else:
            return
