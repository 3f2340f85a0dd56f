"""What users' functions say of a group is cut and cleaned, so that the event about it can be sent."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace

from actors.rollout.samples.endings import Ending, Endings, publish_eval
from actors.rollout.samples.group import GroupRun
from actors.rollout.samples.sample import OpenSample
from messages import (
    EngineNumbers,
    EvalCompleted,
    EvalRequested,
    GroupCompleted,
    GroupFailed,
    LastSample,
    RolloutRequested,
    SampleStatus,
    SampleSummary,
    decode,
    encode,
)
from runtime.bus.bus import Bus
from tests.messages.mutations import example

LONG = "\ud800" + "x" * 10_000_000


def endings() -> Endings:
    return Endings(task=example(RolloutRequested), lease="l", instance="i")


def test_a_reason_of_any_length_and_no_text_can_be_sent() -> None:
    ending = endings().failed(LONG)
    assert decode(*encode(ending)) == ending
    assert len(ending.reason) < 3000


def test_a_completed_group_has_the_signs_of_garbled_output_of_its_samples() -> None:
    samples = [OpenSample(index=index, prompt_len=2, status=SampleStatus.COMPLETED, reward=1.0) for index in range(2)]
    for sample, text in zip(samples, ("the answer is 4", "4 " * 1000), strict=True):
        sample.buffer.append(np.array([1]), np.array([-1.0]), text, "v1")
    run = SimpleNamespace(samples=samples, complete=True, generated_s=1.0, scored_s=1.0)
    run.engine, run.last_sample = EngineNumbers(), LastSample()
    ending = endings().of(cast("GroupRun", run))
    assert isinstance(ending, GroupCompleted)
    assert [sample.signs for sample in ending.samples] == [(), ("repetition",)]
    (usual, garbled) = (encode(replace(ending, samples=(sample,)))[0] for sample in ending.samples)
    assert b"signs" not in usual  # a usual sample costs no byte
    assert b'"signs":["repetition"]' in garbled


@pytest.mark.anyio
@pytest.mark.parametrize(
    "noted",
    [{"x": "y" * 9_000_000}, {"x": "\ud800"}, {"x": 2**70}, {"x": object()}],
    ids=["long", "no text", "large", "object"],
)
async def test_a_group_with_notes_that_no_event_can_carry_fails(bus: Bus, noted: dict[str, object]) -> None:
    sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, metadata=noted)
    task = example(RolloutRequested)
    ending: Ending = endings().completed((sample,), task.prompt, rollout_time_s=1.0)
    await endings().publish(bus, ending)
    async with bus.read(GroupFailed) as events:
        assert len([received async for received in events.so_far()]) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(("notes", "num_samples", "kept"), [("x", 3, 3), ("y" * 9_000_000, 3, 3), ("x", 200_000, 0)])
async def test_an_evaluation_item_leaves_out_details_and_then_samples(
    bus: Bus, notes: str, num_samples: int, kept: int
) -> None:
    sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5, metadata={"noted": notes})
    await publish_eval(bus, replace(example(EvalRequested), set="held-out"), (sample,) * num_samples)
    async with bus.read(EvalCompleted) as events:
        (event,) = [received.message async for received in events.so_far()]
    assert [each.reward for each in event.samples] == [0.5] * kept
    assert all(each.metadata == ({"noted": "x"} if notes == "x" else {}) for each in event.samples)
