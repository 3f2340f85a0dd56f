"""Answers tasks with the demonstrations or preference pairs in the prompts."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from actors.rollout.offline.actor import OfflineSample
from messages import (
    Demonstration,
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

REWARDS: Final = (1.0, 0.0)  # of a preference pair: chosen, rejected


class Demonstrations:
    """Answers with the prompt's demonstration, with zero reward and log-probs and no sampling weights.

    A preference pair is a sample with two parts: the chosen response with reward 1, the rejected one with reward 0.
    Weight spans name the task's minimum version.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        """Check tokens against a vocabulary size; None: any token id is valid."""
        self._vocab_size = vocab_size

    def answer(self, task: RolloutRequested) -> Sequence[OfflineSample]:
        """Return one identical sample per index."""
        samples = [sample for index in range(task.num_samples) for sample in _samples(task, index)]
        for sample in samples[:2]:
            if (problem := sample_problem(sample.segments, self._vocab_size)) is not None:
                raise ValueError(f"row {task.prompt.row} of {task.prompt.data}: {problem}")
        return samples

    def prompt(self, task: RolloutRequested) -> Prompt:
        """Return the task's prompt."""
        return task.prompt


def _samples(task: RolloutRequested, index: int) -> list[OfflineSample]:
    prompt = task.prompt
    if prompt.response_ids is None or prompt.loss_mask is None:
        raise ValueError(f"row {prompt.row} of {prompt.data} has no demonstration")
    first = Demonstration(response_ids=prompt.response_ids, loss_mask=prompt.loss_mask, text=prompt.response)
    if prompt.rejected is None:
        return [_sample(task, index, 0, first, 0.0)]
    pair = (first, prompt.rejected)
    return [_sample(task, index, part, response, REWARDS[part]) for part, response in enumerate(pair)]


def _sample(task: RolloutRequested, index: int, part: int, response: Demonstration, reward: float) -> OfflineSample:
    prompt, length = task.prompt, len(response.response_ids)
    segment = Segment(
        sample=SampleKey(group_id=task.group_id, attempt=task.attempt, index=index, part=part),
        prompt_ids=prompt.prompt_ids,
        response_ids=response.response_ids,
        loss_mask=response.loss_mask,
        rollout_log_probs=Float32Array(np.zeros(length, np.float32)),
        weight_spans=(WeightSpan(version=task.min_version, start=0, end=length),) if length else (),
        text=response.text,
    )
    summary = SampleSummary(
        index=index,
        part=part,
        status=SampleStatus.COMPLETED,
        prompt_len=len(prompt.prompt_ids),
        response_len=length,
        reward=reward,
        first_version=task.min_version,
        last_version=task.min_version,
    )
    return OfflineSample((segment,), summary)
