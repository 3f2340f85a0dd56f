"""kill -9 of the buffer, which writes the dumps: none is missing at the end, and none is wrong."""

from pathlib import Path

import pytest

from messages import BatchReady
from runtime.data.dump_files import read_pair, steps_in
from tests.chaos.audit import killed_in_turn
from tests.chaos.harness import BATCH_SIZE, NUM_SAMPLES, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(400)]


async def test_the_dump_is_whole_when_the_buffer_was_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, num_steps=10, overrides=("run.dump_details=dump",))
    await killed_in_turn(run, ["buffer"] * 3, moments_of("dumps"))
    dump = tmp_path / "dump"
    assert steps_in(dump) == list(range(run.num_steps))
    async with run.reopened() as bus, bus.read(BatchReady) as batches:
        async for received in batches.so_far():
            batch = received.message
            groups = {group.group_id: group for group in read_pair(dump, batch.step)}
            assert list(groups) == [ref.group_id for ref in batch.groups]
            assert len(groups) == BATCH_SIZE
            for group in groups.values():
                assert {sample.step for sample in group.samples} == {batch.step}
                assert len(group.samples) == NUM_SAMPLES
                lengths = [sum(len(segment.response_ids) for segment in own) for own in group.segments]
                assert lengths == [sample.response_len for sample in group.samples]
