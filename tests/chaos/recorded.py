"""A generated dump for the laptop recipe: random samples with rewards, for some train steps."""

from pathlib import Path

import numpy as np

from messages import (
    Float32Array,
    GroupCompleted,
    Int32Array,
    Outcome,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    UInt8Array,
    WeightSpan,
)
from runtime.data.dump_files import write_pair
from runtime.data.dumps import DumpedGroup, Fate, group_of

VOCABULARY = 16
PROMPT = 4  # tokens
VERSION = 1  # weight version of all samples: the weights before the first step


def write_dump(directory: Path, *, num_steps: int, num_groups: int, group_size: int) -> None:
    """Write the dump files of some train steps.

    Args:
        directory: Directory to create.
        num_steps: Number of train steps.
        num_groups: Groups per step.
        group_size: Samples per group.
    """
    directory.mkdir()
    generator = np.random.default_rng(1)
    for step in range(num_steps):
        first = step * num_groups
        groups = [_group(number, group_size, step, generator) for number in range(first, first + num_groups)]
        write_pair(directory, step, groups, (step + 1, step + 1))


def _group(group_id: int, size: int, step: int, generator: np.random.Generator) -> DumpedGroup:
    prompt = generator.integers(2, VOCABULARY, PROMPT)
    segments = [_segment(group_id, index, prompt, generator) for index in range(size)]
    samples = tuple(
        SampleSummary(
            index=index,
            status=SampleStatus.COMPLETED,
            segments=(SegmentRef(seq=1, position=index),),
            prompt_len=PROMPT,
            response_len=len(segment.response_ids),
            reward=float(generator.integers(0, 3)) / 2,
            first_version=VERSION,
            last_version=VERSION,
        )
        for index, segment in enumerate(segments)
    )
    completed = GroupCompleted(
        group_id=group_id, attempt=0, lease="l", round=step, instance="r", data="reverse-digits", samples=samples
    )
    payload = SegmentsPublished(group_id=group_id, attempt=0, lease="l", segments=tuple(segments), prompt="1 2")
    return group_of(completed, {1: payload}, Fate(verdict=Outcome.KEEP, step=step))


def _segment(group_id: int, index: int, prompt: np.ndarray, generator: np.random.Generator) -> Segment:
    length = int(generator.integers(1, 5))
    return Segment(
        sample=SampleKey(group_id=group_id, attempt=0, index=index),
        prompt_ids=Int32Array(prompt.astype(np.int32)),
        response_ids=Int32Array(generator.integers(2, VOCABULARY, length).astype(np.int32)),
        loss_mask=UInt8Array([1] * length),
        rollout_log_probs=Float32Array((-3 * generator.random(length)).astype(np.float32)),
        weight_spans=(WeightSpan(version=VERSION, start=0, end=length),),
        text="1",
    )
