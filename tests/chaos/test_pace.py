"""The trainer of a chaos run waits for its test."""

from pathlib import Path

import anyio
import pytest

from actors.trainer.data.feed import Feed
from tests.chaos import pace
from tests.chaos.pace import Pace
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio


async def test_a_step_waits_until_the_test_has_read_of_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []

    async def batch(_: Feed, step: int) -> None:
        fed.append(step)

    monkeypatch.setattr(Feed, "batch", batch)
    monkeypatch.setenv(pace.VARIABLE, str(tmp_path / "pace"))
    pace.install()
    of_test, feed = Pace(tmp_path / "pace"), Feed.__new__(Feed)

    async def train() -> None:
        for step in range(5):
            await feed.batch(step)

    of_test.allow(0)
    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await eventually(lambda: fed == [0])
        of_test.allow(1)
        await eventually(lambda: fed == [0, 1])
        with of_test.held():
            of_test.allow(4)
            await anyio.sleep(5 * pace.LOOK_S)  # several looks
        assert fed == [0, 1]
        of_test.free()
    assert fed == [0, 1, 2, 3, 4]
