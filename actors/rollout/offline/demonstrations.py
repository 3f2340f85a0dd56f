"""Answers tasks with the demonstrations in the prompts, for supervised fine-tuning."""

from collections.abc import Sequence

import numpy as np

from actors.rollout.offline.actor import OfflineSample
from messages import (
    Float32Array,
    Prompt,
    RolloutRequested,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    WeightSpan,
)
from runtime.data.tokens import sample_problem


class Demonstrations:
    """Answers with the prompt's demonstration, with zero reward and log-probs and no sampling weights.

    Its weight spans name the task's minimum version.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        """Check tokens against a vocabulary size; None: any token id is valid."""
        self._vocab_size = vocab_size

    def answer(self, task: RolloutRequested) -> Sequence[OfflineSample]:
        """Return one identical sample per index."""
        samples = [_demonstration(task, index) for index in range(task.num_samples)]
        for sample in samples[:1]:
            if (problem := sample_problem(sample.segments, self._vocab_size)) is not None:
                raise ValueError(f"row {task.prompt.row} of {task.prompt.data}: {problem}")
        return samples

    def prompt(self, task: RolloutRequested) -> Prompt:
        """Return the task's prompt."""
        return task.prompt


def _demonstration(task: RolloutRequested, index: int) -> OfflineSample:
    prompt = task.prompt
    if prompt.response_ids is None or prompt.loss_mask is None:
        raise ValueError(f"row {prompt.row} of {prompt.data} has no demonstration")
    length = len(prompt.response_ids)
    segment = Segment(
        sample=SampleKey(group_id=task.group_id, attempt=task.attempt, index=index),
        prompt_ids=prompt.prompt_ids,
        response_ids=prompt.response_ids,
        loss_mask=prompt.loss_mask,
        rollout_log_probs=Float32Array(np.zeros(length, np.float32)),
        weight_spans=(WeightSpan(version=task.min_version, start=0, end=length),) if length else (),
        text=prompt.response,
    )
    summary = SampleSummary(
        index=index,
        status=SampleStatus.COMPLETED,
        prompt_len=len(prompt.prompt_ids),
        response_len=length,
        reward=0.0,
        first_version=task.min_version,
        last_version=task.min_version,
    )
    return OfflineSample((segment,), summary)
