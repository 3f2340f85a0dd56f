"""A whole run with W&B and TensorBoard: trackers and trainer are killed and stopped, and the run is resumed."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.audit import audit
from tests.chaos.harness import Command, Run
from tests.support.trackers import logged_by_wandb, scalars, tracker_python

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(900)]

ON = ("observe.tensorboard.enabled=true", "observe.wandb.enabled=true", "observe.wandb.mode=offline")


def process_of(command: Command, tracker: str) -> psutil.Process:
    """The process of a tracker, which the log does not name."""
    found: list[psutil.Process] = []
    for process in command.family()[0].children():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            found += [process] if process.cmdline()[4:5] == [tracker] else []
    assert found, f"tracker {tracker} does not run"
    return found[0]


async def test_every_step_is_in_every_tracker_once(tmp_path: Path) -> None:
    """One tracker is killed, one is stopped for good; the trainer is killed; the run is stopped and resumed."""
    for name in ("tensorboard", "wandb"):
        tracker_python(name)
    run = Run(tmp_path, num_steps=10, eval_interval=3, overrides=ON)
    async with run.started() as command:
        await command.log.until_trained(2)
        os.killpg(process_of(command, "wandb").pid, signal.SIGKILL)
        process_of(command, "tensorboard").kill()
        await command.log.until_trained(4)
        command.log.kill("trainer")
        await command.log.until_trained(6)
        command.send(signal.SIGINT)
        assert await command.end() == 130
    async with run.started() as command:
        await command.log.until_trained(8)
        process_of(command, "tensorboard").suspend()
        await command.log.until_trained(10)
        process_of(command, "tensorboard").resume()
        assert await command.end() == 0
    await audit(run, killed=["trainer"])
    rows = run.rows()
    trained, evaluated = (
        [row["rollout/step"] for row in rows if row["step"]],
        [row["step"] for row in rows if "eval/step" in row],
    )
    assert trained == list(range(10))
    readers: tuple[Callable[[Path], dict[str, list[int]]], ...] = (scalars, logged_by_wandb)
    for read in readers:
        found = read(run.directory)
        assert found["rollout/raw_reward"] == trained
        assert found["train/loss"] == [2 * step for step in trained]  # two optimizer steps each
        (name,) = [name for name in found if name.startswith("eval/reverse") and name.count("-") == 3]
        assert sorted(found[name]) == evaluated


async def test_a_server_that_refuses_costs_its_tracker_alone(tmp_path: Path) -> None:
    tracker_python("wandb")
    refusing = ("observe.wandb.enabled=true", "observe.wandb.host=http://127.0.0.1:9", "observe.stop_timeout_s=1")
    key = tmp_path / "key"
    key.write_text("0" * 40)
    key.chmod(0o600)
    run = Run(tmp_path, num_steps=2, eval_interval=None, overrides=(*refusing, f"observe.wandb.key_file={key}"))
    async with run.started() as command:
        assert await command.end() == 0
    told = run.output.read_text()
    assert "run r finished" in told
    assert "tracker.wandb" in told
    assert "0" * 40 not in told
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
