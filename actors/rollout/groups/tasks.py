"""What a task asks for, training and evaluation alike."""

from dataclasses import dataclass

from messages import EvalRequested, Prompt, RolloutRequested, SamplingParams


@dataclass(frozen=True)
class GroupTask:
    """What is to be done for one delivery of a task, training or evaluation alike."""

    source: tuple[object, ...]  # what its samples are of, in every attempt: seeds their sampling
    group_id: int
    attempt: int
    lease: str
    round: int | None  # None: an evaluation
    min_version: int
    prompt: Prompt
    sampling: SamplingParams
    store: bool  # whether the segments are published
    group_rm: bool  # one score request for the whole group, once all samples ended


def training_task(task: RolloutRequested, lease: str, *, group_rm: bool) -> GroupTask:
    """One delivery of a training task."""
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
    )


def eval_task(task: EvalRequested, lease: str) -> GroupTask:
    """One delivery of an evaluation's task."""
    return GroupTask(
        source=("eval", task.set, task.item),  # not the step: evaluations differ by their weights alone
        group_id=task.item,
        attempt=0,
        lease=lease,
        round=None,
        min_version=task.version,
        prompt=task.prompt,
        sampling=task.sampling,
        store=False,
        group_rm=False,  # evaluation is scored sample by sample
    )
