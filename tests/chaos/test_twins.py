"""Two of what must exist once: a buffer, a node daemon; and a rollout actor that sleeps while another has its tasks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from messages import ActorExited, BufferStarted, GroupCompleted, WeightsRefused
from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.util.exit_codes import EXIT_FENCED
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import BATCH_SIZE, EVENT_S, EVENTS_PER_STEP, ROOT, Command, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

GRADERS = Path(__file__).with_name("graders.py")
EXIT_WRONG_INPUT = 2


@contextmanager
def by_hand(run: Run, role: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of an actor that no node daemon knows of."""
    url = (run.directory / "bus.url").read_text().strip()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", BUS_URL_VARIABLE: url, **environment}
    command = [sys.executable, "-m", "actors.host", str(run.directory), role]
    with run.output.open("ab") as output, subprocess.Popen(command, env=env, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


async def end_in_order(run: Run, command: Command) -> None:
    family = command.family()
    assert await command.end() == 0
    await run.gone(family)


async def test_a_second_agent_is_refused_and_of_two_buffers_one_remains(tmp_path: Path) -> None:
    run, moments = Run(tmp_path, num_steps=8), moments_of("two buffers")
    async with run.started() as command:
        await command.log.until(lambda _: "buffer" in command.log.pids)  # the last one to be started
        before = sorted(command.living())
        with anyio.fail_after(EVENT_S):
            refused = await anyio.run_process(run.command, cwd=tmp_path, check=False)
        assert refused.returncode == EXIT_WRONG_INPUT
        assert b"is in use" in refused.stderr
        assert sorted(command.living()) == before
        await command.log.until_trained(3)
        await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
        first = psutil.Process(command.log.pids["buffer"])
        trainer = psutil.Process(command.log.pids["trainer"])
        trainer.suspend()  # or the run may end before the second one is up
        with by_hand(run, "buffer") as second:
            started = await command.log.until(lambda event: isinstance(event, BufferStarted))
            assert isinstance(started, BufferStarted)
            assert started.incarnation == 2
            trainer.resume()
            ended = await command.log.until(lambda event: isinstance(event, ActorExited))
            assert isinstance(ended, ActorExited)
            assert (ended.actor, ended.exit_code, ended.restart_in_s) == ("buffer", EXIT_FENCED, None)
            assert "fenced" in ended.reason
            assert not first.is_running()
            assert second.poll() is None
            await end_in_order(run, command)
    await audit(run, killed=None)


TWO_ROLLOUTS = ("engines.policy.num_engines=2", "rollout.nodes=['local','local']")


async def test_a_rollout_actor_that_wakes_after_its_ack_wait_changes_nothing(tmp_path: Path) -> None:
    """The other one has generated its groups again by then: what it had finished comes too late, and is not counted."""
    run = Run(tmp_path, num_steps=10, overrides=(f"data.0.rm_type={GRADERS}:slowly", *TWO_ROLLOUTS))
    async with run.started() as command:
        await command.log.until_trained(2)
        await command.log.pass_over(moments_of("frozen a").randrange(EVENTS_PER_STEP))
        frozen = psutil.Process(command.log.pids["rollout.0"])
        frozen.suspend()
        await command.log.until_trained(command.log.trained + 2)  # the groups it holds are generated again
        frozen.resume()
        await end_in_order(run, command)
    await audit(run)
    async with run.reopened() as bus:
        completed = [event for _, event in await read_all(bus, run) if isinstance(event, GroupCompleted)]
    assert {event.instance for event in completed} == {"rollout.0", "rollout.1"}
    late = len(completed) - len({event.group_id for event in completed})
    assert late <= 2 * BATCH_SIZE


async def test_two_rollout_actors_are_killed_in_turn(tmp_path: Path) -> None:
    """The other one goes on; each drives its own engine before and after, and none undoes what the other verified."""
    run, moments = Run(tmp_path, num_steps=10, overrides=TWO_ROLLOUTS), moments_of("two rollout actors")
    names = ("rollout.0", "rollout.1")
    async with run.started() as command:
        for number, name in enumerate(names, start=1):
            await command.log.until_trained(3 * number)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            command.log.kill(name)
        await end_in_order(run, command)
    await audit(run, killed=names)
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    completed = [event for event in log if isinstance(event, GroupCompleted)]
    assert {event.instance for event in completed} == set(names)
    refused = [event for event in log if isinstance(event, WeightsRefused)]
    assert len(refused) <= len(names)  # by a call that a killed one had on its way; two that fight refuse without end
