"""What happens when ... dies: each row of the table in docs/understand/failure-model.md, at random moments."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from messages import BatchTrained, GroupCompleted, GroupsIssued
from runtime.node.supervisor.template import PROGRAM
from tests.chaos.audit import Log, audit, read_all
from tests.chaos.harness import BATCH_SIZE, EVENTS_PER_STEP, ROOT, Command, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

PROCESSES = {  # which one dies, by line of the table
    "reward actor": "reward",
    "filter": "filter",
    "rollout actor": "rollout",
    "engine": "engine.policy.0",
    "router": "router.policy",
    "buffer": "buffer",
    "trainer rank": "trainer",
    "nats-server": "nats-server",
}
TOGETHER = (  # with each of them, who suffers most from it
    ("reward actor", "filter", "buffer", "router"),
    ("rollout actor", "engine"),
    ("trainer rank", "nats-server"),
)
STARTS = {"node daemon": 2, "everything": 6}  # after these, the same command again; killed after so many steps
FILTERED = (f"rollout.dynamic_filter={Path(__file__).with_name('graders.py')}:every",)  # keeps all, and has a process
ROUTED = ("engines.policy.router=sglang-router",)  # has a process
AFTER_STEPS = (2, 6)  # the first kill comes before any checkpoint
NUM_STEPS = 9
SAVE_INTERVAL = 5


def test_each_line_of_the_table_is_tested() -> None:
    section = (
        (ROOT / "docs" / "understand" / "failure-model.md")
        .read_text()
        .partition("\n## What happens")[2]
        .partition("\n## ")[0]
    )
    lines = re.findall(r"^\| ([a-z][a-z -]*) \|", section, re.MULTILINE)
    assert sorted(lines) == sorted([*PROCESSES, *STARTS, "template"])
    assert sorted(line for lines in TOGETHER for line in lines) == sorted(PROCESSES)


@pytest.mark.parametrize("lines", TOGETHER)
async def test_processes_are_killed_in_turn_again_and_again(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """The processes of one run, each at a random moment after each of two steps; none of them idles in between."""
    moments, names = moments_of(" ".join(lines)), [PROCESSES[x] for x in lines]
    # a kill is up to two steps later than the one before, and its process is to come back before the run ends
    num_steps = AFTER_STEPS[-1] + 2 * len(names) + 2
    overrides = (*(FILTERED if "filter" in names else ()), *(ROUTED if "router.policy" in names else ()))
    run = Run(tmp_path, num_steps=num_steps, overrides=overrides)
    async with run.started() as command:
        for steps in AFTER_STEPS:
            await command.log.until_trained(steps)
            for name in moments.sample(names, len(names)):
                await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
                command.log.kill(name)
                await command.log.until_restarted(name)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=names * len(AFTER_STEPS))
    async with run.reopened() as bus:
        check_extra_work(await read_all(bus, run), run.num_steps, *names)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_template_fails_when_it_is_to_fork_a_killed_trainer(tmp_path: Path, number: signal.Signals) -> None:
    """In a run without a pace, which is set in each interpreter: such processes are not forked."""
    run = Run(tmp_path, num_steps=40, paced=False)
    async with run.started() as command:
        template = template_of(command)
        await command.log.until_trained(1)
        command.log.kill("trainer")
        template.send_signal(number)
        await command.log.until_restarted("trainer")
        await command.log.until_there(lambda: not template.is_running())
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=["trainer"])


def template_of(command: Command) -> psutil.Process:
    """The process that the node daemon forks its actors from."""
    return next(each for each in command.family() if any(word.startswith(PROGRAM[:-3]) for word in each.cmdline()))


@pytest.mark.parametrize("line", STARTS)
async def test_the_same_command_goes_on(tmp_path: Path, line: str) -> None:
    run = Run(tmp_path, num_steps=NUM_STEPS)
    async with run.started() as command:
        await command.log.until_trained(STARTS[line])
        await command.log.pass_over(moments_of(line).randrange(EVENTS_PER_STEP))
        family = await end_of(command, line)
        await run.gone(family)
    async with run.started() as command:
        assert await command.end() == 0
    await run.gone()
    await audit(run)
    async with run.reopened() as bus:
        check_extra_work(await read_all(bus, run), run.num_steps, line)


async def end_of(command: Command, line: str) -> list[psutil.Process]:
    """Kill the node daemon, or all processes; return the processes that must be gone."""
    if line == "everything":
        family = command.kill_everything()
    else:
        family = command.family()
        command.send(signal.SIGKILL)
    assert await command.end() == -signal.SIGKILL
    return family


def check_extra_work(log: Log, num_steps: int, *names: str) -> None:
    """Nothing is issued again; only what a dead one had in hand is generated again, or trained since a checkpoint."""
    trains = any(name in ("trainer", *STARTS) for name in names)
    generates = any(name in ("rollout", "nats-server", *STARTS) for name in names)
    issued = [group for _, event in log if isinstance(event, GroupsIssued) for group in event.groups]
    assert len(issued) == num_steps * BATCH_SIZE
    completed = [event for _, event in log if isinstance(event, GroupCompleted)]
    assert len(completed) - len(issued) <= (len(AFTER_STEPS) * BATCH_SIZE if generates else 0)
    replayed = sum(event.replay for _, event in log if isinstance(event, BatchTrained))
    assert replayed <= (len(AFTER_STEPS) * SAVE_INTERVAL if trains else 0)
