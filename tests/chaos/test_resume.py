"""The whole run ends, in order or by kill -9, and the same command goes on with it."""

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from messages import BatchReady, RunFinished
from tests.chaos.audit import audit
from tests.chaos.harness import EVENTS_PER_STEP, Command, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]


async def wait_for_a_moment(command: Command, name: str, steps: int) -> None:
    """Wait for a number of train steps and a random number of events."""
    await command.log.until_trained(steps)
    await command.log.pass_over(moments_of(name).randrange(EVENTS_PER_STEP))


async def resume_and_finish(run: Run) -> None:
    async with run.started() as command:
        assert await command.end() == 0
    await run.gone()
    await audit(run)


async def test_ctrl_c_ends_everything_and_the_run_goes_on_later_and_elsewhere(tmp_path: Path) -> None:
    """It goes on in its directory, and then in a copy of it, with another setting."""
    here = Run(tmp_path / "here", num_steps=8)
    here.directory.parent.mkdir(parents=True)
    for steps in (0, 4):  # 0: while everything starts
        async with here.started() as command:
            if steps:
                await wait_for_a_moment(command, "ctrl-c", steps)
            family = command.family()
            command.send(signal.SIGINT)
            assert await command.end() == 128 + signal.SIGINT
            await here.gone(family)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    await resume_and_finish(Run(tmp_path / "there", num_steps=8, overrides=("reward.timeout_s=77",)))


async def test_the_agent_is_killed_when_the_run_has_just_finished(tmp_path: Path) -> None:
    run = Run(tmp_path, num_steps=5, eval_interval=None, overrides=("eval=[]",))
    last = run.num_steps - 1
    async with run.started() as command:
        await command.log.until_trained(last - 1)
        with command.log.held():  # so that the last step waits
            await command.log.until(lambda event: isinstance(event, BatchReady) and event.step == last)
            family = command.family()
            psutil.Process(command.log.pids["reward"]).suspend()  # all is graded; the daemon waits for its end
        await command.log.until(lambda event: isinstance(event, RunFinished))
        command.send(signal.SIGKILL)
        assert await command.end() == -signal.SIGKILL
        await run.gone(family)
    await resume_and_finish(run)
