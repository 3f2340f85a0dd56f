"""The trainer is killed as soon as something is seen of a step: its weights, its events, its checkpoint."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from messages import BatchReady, BatchTrained, CheckpointSaved, Message, WeightsAnnounced
from tests.chaos.audit import audit
from tests.chaos.harness import Command, Run

pytestmark = [pytest.mark.anyio]

EVERY_STEPS = 3
SAVE_INTERVAL = 3  # as often as it is killed: each time there may be a checkpoint that was told, or was not

Moment = Callable[[Run, Command, int], Awaitable[object]]


def seen(message_type: type[Message]) -> Moment:
    """The first event of a type once so many steps are done."""

    async def wait(run: Run, command: Command, steps: int) -> None:
        del run
        await command.log.until_trained(steps)
        if message_type is not BatchTrained:
            await command.log.until(lambda event: isinstance(event, message_type))

    return wait


def written(pattern: str) -> Moment:
    """Something new in the run directory, most likely before the log tells of it."""

    async def wait(run: Run, command: Command, steps: int) -> None:
        await command.log.until_trained(steps)
        before = set(run.directory.glob(pattern))
        await command.log.until_there(lambda: bool(set(run.directory.glob(pattern)) - before))

    return wait


MOMENTS: dict[str, Moment] = {
    "batch ready": seen(BatchReady),
    "weights written": written("weights/*"),
    "batch trained": seen(BatchTrained),
    "weights announced": seen(WeightsAnnounced),
    "checkpoint written": written("checkpoints/*/*"),
    "checkpoint saved": seen(CheckpointSaved),
}
ALL = tuple(MOMENTS)
FEW = ("weights written", "batch trained", "checkpoint written")  # a moment of each part


@pytest.mark.parametrize(
    ("max_staleness", "names"),
    [
        pytest.param(2, FEW, id="2, few", marks=pytest.mark.chaos),
        pytest.param(0, ALL, id="0", marks=pytest.mark.nightly),
        pytest.param(2, ALL, id="2", marks=pytest.mark.nightly),
    ],
)
async def test_the_trainer_is_killed_at_each_moment_of_a_step(
    tmp_path: Path, max_staleness: int, names: tuple[str, ...]
) -> None:
    settings = (f"rollout.max_staleness={max_staleness}", f"train.save_interval={SAVE_INTERVAL}")
    num_steps = EVERY_STEPS * (len(names) + 6)  # what is seen may be steps behind
    run = Run(tmp_path, num_steps=num_steps, overrides=settings)
    async with run.started() as command:
        for number, name in enumerate(names, start=1):
            await MOMENTS[name](run, command, max(EVERY_STEPS * number, command.log.trained + 1))
            command.log.kill("trainer")
            await command.log.until_restarted("trainer")
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=["trainer"] * len(names), ordered=max_staleness == 0)
