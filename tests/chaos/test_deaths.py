"""What happens when ... dies: each line of that table in docs/design.md, at several random moments of one run."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from messages import BatchTrained, GroupCompleted, GroupsIssued
from tests.chaos.audit import Log, audit, read_all
from tests.chaos.harness import BATCH_SIZE, EVENTS_PER_STEP, ROOT, Command, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(400)]

PROCESSES = {  # which one dies, by line of the table
    "reward worker": "reward",
    "filter": "filter",
    "rollout actor": "rollout",
    "engine": "engine.policy.0",
    "router": "router.policy",
    "buffer": "buffer",
    "trainer rank": "trainer",
    "nats-server": "nats-server",
}
STARTS = ("node agent", "everything")  # after these, the same command again
AFTER_STEPS = (2, 6, 10)  # the first kill comes before any checkpoint
NUM_STEPS = 13
SAVE_INTERVAL = 5


def test_each_line_of_the_table_is_tested() -> None:
    section = (ROOT / "docs" / "design.md").read_text().partition("\n## 8.")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| ([a-z][a-z -]*) \|", section, re.MULTILINE)
    assert sorted(lines) == sorted([*PROCESSES, *STARTS])


@pytest.mark.parametrize("line", PROCESSES)
async def test_a_process_is_killed_three_times(tmp_path: Path, line: str) -> None:
    run, name, moments = Run(tmp_path, num_steps=NUM_STEPS), PROCESSES[line], moments_of(line)
    async with run.started() as command:
        for steps in AFTER_STEPS:
            await command.log.until_trained(steps)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            command.log.kill(name)
            await command.log.until_restarted(name)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=[name] * len(AFTER_STEPS))
    async with run.reopened() as bus:
        check_extra_work(await read_all(bus, run), name)


@pytest.mark.parametrize("line", STARTS)
async def test_the_same_command_goes_on(tmp_path: Path, line: str) -> None:
    run, moments = Run(tmp_path, num_steps=NUM_STEPS), moments_of(line)
    for steps in AFTER_STEPS:
        async with run.started() as command:
            await command.log.until_trained(steps)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            family = await end_of(command, line)
            await run.gone(family)
    async with run.started() as command:
        assert await command.end() == 0
    await run.gone()
    await audit(run)
    async with run.reopened() as bus:
        check_extra_work(await read_all(bus, run), line)


async def end_of(command: Command, line: str) -> list[psutil.Process]:
    """Kill the agent, or it and all others; return who has to be gone."""
    if line == "everything":
        family = command.kill_everything()
    else:
        family = command.family()
        command.send(signal.SIGKILL)
    assert await command.end() == -signal.SIGKILL
    return family


def check_extra_work(log: Log, name: str) -> None:
    """Nothing is issued again; only what the dead one had in hand is generated again, or trained since a checkpoint."""
    trains, generates = name in ("trainer", *STARTS), name in ("rollout", *STARTS)
    issued = [group for _, event in log if isinstance(event, GroupsIssued) for group in event.groups]
    assert len(issued) == NUM_STEPS * BATCH_SIZE
    completed = [event for _, event in log if isinstance(event, GroupCompleted)]
    assert len(completed) - len(issued) <= (len(AFTER_STEPS) * BATCH_SIZE if generates or name == "nats-server" else 0)
    replayed = sum(event.replay for _, event in log if isinstance(event, BatchTrained))
    assert replayed <= (len(AFTER_STEPS) * SAVE_INTERVAL if trains else 0)
