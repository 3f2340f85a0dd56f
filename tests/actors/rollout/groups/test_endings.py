"""What users' functions say of a group is cut and cleaned, so that the event about it can be sent."""

import pytest

from actors.rollout.groups.endings import Ending, Endings
from messages import GroupFailed, RolloutRequested, SampleStatus, SampleSummary, decode, encode
from runtime.bus.bus import Bus
from tests.messages.mutations import example

LONG = "\ud800" + "x" * 10_000_000


def endings() -> Endings:
    return Endings(task=example(RolloutRequested), lease="l", instance="i")


def test_a_reason_of_any_length_and_no_text_can_be_sent() -> None:
    ending = endings().failed(LONG)
    assert decode(*encode(ending)) == ending
    assert len(ending.reason) < 3000


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
