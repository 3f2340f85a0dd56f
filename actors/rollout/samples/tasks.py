"""The common form of training and evaluation tasks."""

from dataclasses import dataclass

from actors.rollout.samples.must_end import GiveUp, gives_up_nothing
from messages import EvalRequested, Prompt, RolloutRequested, SamplingParams


@dataclass(frozen=True)
class GroupTask:
    """One delivery of a training or evaluation task."""

    source: tuple[object, ...]  # identity of its prompt in every attempt: seeds the sampling
    group_id: int
    attempt: int
    lease: str
    round: int | None  # None: an evaluation
    min_version: int
    prompt: Prompt
    sampling: SamplingParams
    store: bool  # whether the segments are published
    group_rm: bool  # a single score request for the whole group, once all samples ended
    eval_set: str | None = None  # of an evaluation
    give_up: GiveUp = gives_up_nothing  # ends the delivery while a function of the user cannot be ended


def training_task(
    task: RolloutRequested, lease: str, *, group_rm: bool, give_up: GiveUp = gives_up_nothing
) -> GroupTask:
    """Convert one delivery of a training task."""
    return GroupTask(
        source=("group", task.group_id),
        group_id=task.group_id,
        attempt=task.attempt,
        lease=lease,
        round=task.round,
        min_version=task.min_version,
        prompt=task.prompt,
        sampling=task.sampling,
        store=True,
        group_rm=group_rm,
        give_up=give_up,
    )


def eval_task(task: EvalRequested, lease: str, give_up: GiveUp) -> GroupTask:
    """Convert one delivery of an evaluation task."""
    return GroupTask(
        eval_set=task.set,
        source=("eval", task.set, task.item),  # without the step: evaluations differ only by their weights
        group_id=task.item,
        attempt=0,
        lease=lease,
        round=None,
        min_version=task.version,
        prompt=task.prompt,
        sampling=task.sampling,
        store=False,
        group_rm=False,  # evaluation is scored sample by sample
        give_up=give_up,
    )
