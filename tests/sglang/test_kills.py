"""Processes of whole runs on SGLang's own server are killed or stopped: each run ends as an undisturbed one does.

That is: its books close, the trained set is that of the data's order, and no engine is left paused.
"""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import psutil
import pytest

from messages import ActorExited, WeightsAnnounced
from tests.chaos.audit import audit
from tests.chaos.harness import EVENTS_PER_STEP, SMALL, Command, Run, moments_of
from tests.chaos.test_kill import finish, url_of
from tests.fixtures.nats import eventually
from tests.sglang.recipe import RECIPE, overrides
from tests.support.tiny_engine import get

LIMIT_S: Final = 1500
RESTART_S: Final = 400.0  # of a server, beside other work
UPDATE_S: Final = 0.3  # an update takes about so long
DETOKENIZER_S: Final = 15.0  # until the engine ends; its requests would be overdue after 120
NUM_STEPS: Final = 10
EVERY: Final = 2  # steps between two kills

ENGINE: Final = "engine.policy.0"
SECOND: Final = "engine.policy.0.1"  # of an engine of two processes
VICTIMS: Final = {  # the process that the daemon started, and which child of it
    "front end": (ENGINE, None),
    "scheduler": (ENGINE, "scheduler"),
    "detokenizer": (ENGINE, "detokenizer"),
    "second process": (SECOND, None),
    "second scheduler": (SECOND, "scheduler"),
    "router": ("router.policy", None),
    "rollout": ("rollout", None),
}
ONE: Final = ("front end", "scheduler", "router", "rollout")
TWO_PROCESSES: Final = ("engines.policy.num_processes=2", 'engines.policy.env.SGLANG_CPU_OMP_THREADS_BIND="0|1"')
SOON: Final = (
    "engines.policy.unresponsive_after_s=20",
    "engines.policy.first_token_after_s=20",
    "engines.policy.next_token_after_s=20",
    "run.unresponsive_after_s=20",
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(LIMIT_S)]


def run_of(directory: Path, num_steps: int, *changes: str) -> Run:
    """The laptop recipe on SGLang, small."""
    own = (*overrides(), "engines.policy.router=sglang-router", *changes)
    return Run(directory, num_steps=num_steps, overrides=own, settings=SMALL, topology=RECIPE)


def pid_of(command: Command, victim: str) -> int:
    """The newest process of a role."""
    name, child = VICTIMS[victim]
    pid = command.log.pids[name]
    if child is None:
        return pid
    (found,) = [item for item in psutil.Process(pid).children(recursive=True) if child in item.cmdline()[0]]
    return found.pid


async def strike(command: Command, victims: Sequence[str], name: str, how: signal.Signals) -> None:
    """One after another, each at a random moment; a rollout actor while it gives its engine new weights."""
    moments = moments_of(name)
    for number, victim in enumerate(victims):
        await command.log.until_trained(1 + number * EVERY)
        await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
        if victim == "rollout":
            await command.log.until(lambda event: isinstance(event, WeightsAnnounced))
            await anyio.sleep(moments.uniform(0.0, UPDATE_S))
        psutil.Process(pid_of(command, victim)).send_signal(how)
        await command.log.until_restarted(VICTIMS[victim][0])


async def check_that_it_is_not_paused(command: Command, engine: str = ENGINE) -> None:
    """Ask an engine, between two updates, as everybody may."""
    url = url_of(command, engine)
    await eventually(lambda: get(f"{url}/ready")[0] == 200)


async def check_a_run(
    directory: Path,
    victims: Sequence[str],
    name: str,
    *changes: str,
    num_steps: int = NUM_STEPS,
    how: signal.Signals = signal.SIGKILL,
    others_die: bool = False,
) -> None:
    run = run_of(directory, num_steps, *changes)
    async with run.started() as command:
        command.log.event_s = command.end_s = RESTART_S
        await strike(command, victims, name, how)
        await command.log.until_trained(num_steps - 1)
        await check_that_it_is_not_paused(command)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    died = None if others_die else [VICTIMS[victim][0] for victim in victims]
    books = await audit(run, killed=died)
    assert books.issued == books.trained


@pytest.mark.nightly
async def test_a_scheduler_and_a_rollout_actor_in_its_update_are_killed(tmp_path: Path) -> None:
    await check_a_run(tmp_path, ("scheduler", "rollout"), "two kills", num_steps=6)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
async def test_front_end_scheduler_router_and_rollout_actor_are_killed(tmp_path: Path, seed: int) -> None:
    order = moments_of(f"order {seed}").sample(ONE, len(ONE))
    await check_a_run(tmp_path, order, f"four kills {seed}")


@pytest.mark.nightly
async def test_processes_of_an_engine_of_two_are_killed(tmp_path: Path) -> None:
    victims = ("second process", "scheduler", "front end", "second scheduler")
    # the engine's other process ends with each of them
    await check_a_run(tmp_path, victims, "two processes", *TWO_PROCESSES, others_die=True)


@pytest.mark.nightly
async def test_scheduler_front_end_router_and_rollout_actor_are_stopped(tmp_path: Path) -> None:
    """With SIGSTOP: the node daemon kills a process without a heartbeat, and an engine that generates no tokens."""
    victims = ("scheduler", "front end", "router", "rollout")
    await check_a_run(tmp_path, victims, "stopped", *SOON, how=signal.SIGSTOP)


@pytest.mark.nightly
async def test_a_detokenizer_is_killed(tmp_path: Path) -> None:
    """SGLang notices by itself and ends the engine, long before its requests are overdue."""
    run = run_of(tmp_path, 4)
    async with run.started() as command:
        command.log.event_s = command.end_s = RESTART_S
        await command.log.until_trained(1)
        psutil.Process(pid_of(command, "detokenizer")).kill()
        command.log.event_s = DETOKENIZER_S
        await command.log.until(lambda event: isinstance(event, ActorExited) and event.actor == ENGINE)
        command.log.event_s = RESTART_S
        await finish(run, command)
    books = await audit(run, killed=[ENGINE])
    assert books.issued == books.trained


@pytest.mark.nightly
async def test_a_queue_of_four_requests_costs_no_group(tmp_path: Path) -> None:
    """64 requests at a time, of which SGLang takes 4 and keeps 4: the others are refused with 503 and sent again."""
    few = ("engines.policy.sglang.max_running_requests=4", "engines.policy.sglang.max_queued_requests=4")
    run = run_of(tmp_path, 2, *few, "engines.policy.batch_requests=false")
    async with run.started() as command:
        command.log.event_s = command.end_s = RESTART_S
        await finish(run, command)
    books = await audit(run)
    assert books.issued == books.trained
    assert f"{ENGINE} (http://" in (told := run.output.read_text())
    assert "503" in told
    assert "queue is full" in told
