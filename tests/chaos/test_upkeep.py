"""A run whose log is trimmed and one whose servers hang go on."""

import signal
from pathlib import Path

import psutil
import pytest

from messages import ActorExited, EngineState, EngineStateChanged, LogTrimmed
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import EVENTS_PER_STEP, Command, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

TRIMMED = ("train.save_interval=2", "buffer.trim_min_events=1")


async def finish(run: Run, command: Command) -> None:
    family = command.family()
    assert await command.end() == 0
    await run.gone(family)


async def test_processes_are_killed_while_the_log_is_trimmed_at_every_checkpoint(tmp_path: Path) -> None:
    """At the end all of them at once: the run goes on later on a trimmed log."""
    run, names = Run(tmp_path, num_steps=16, overrides=TRIMMED), ["buffer", "trainer", "rollout", "nats-server"]
    moments = moments_of("trimmed")
    async with run.started() as command:
        for steps, name in enumerate(names, start=1):
            await command.log.until_trained(3 * steps)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            command.log.kill(name)
        await command.log.until_back()
        await command.log.until(lambda event: isinstance(event, LogTrimmed) and event.below_seq > 100)
        family = command.kill_everything()
        assert await command.end() == -signal.SIGKILL
        await run.gone(family)
    async with run.started() as command:
        await finish(run, command)
    await audit(run, killed=names)


async def test_servers_and_an_actor_that_hang_are_started_again(tmp_path: Path) -> None:
    names = ["engine.policy.0", "router.policy", "nats-server", "rollout"]
    limits = ("engines.policy.unresponsive_after_s=5", "bus.unresponsive_after_s=5", "run.unresponsive_after_s=8")
    overrides = (*limits, "engines.policy.router=sglang-router")
    run = Run(tmp_path, num_steps=10, overrides=overrides)
    async with run.started() as command:
        for number, name in enumerate(names, start=1):
            await command.log.until_trained(2 * number)
            await command.log.pass_over(moments_of(name).randrange(EVENTS_PER_STEP))
            psutil.Process(command.log.pids[name]).suspend()
            await command.log.until_restarted(name)
        await finish(run, command)
    await audit(run, killed=names)
    async with run.reopened() as bus:
        ended = [event for _, event in await read_all(bus, run) if isinstance(event, ActorExited)]
    reasons = {event.actor: event.reason for event in ended if event.reason != "stopped"}
    assert reasons == dict.fromkeys(names[:-1], "did not answer for 5 s") | {
        "rollout": "event loop was blocked for 8 s"
    }


async def test_an_engine_that_hangs_is_found_by_the_tokens_that_do_not_come(tmp_path: Path) -> None:
    """As of a server that still answers health checks: here its daemon checks too seldom to notice."""
    name = "engine.policy.0"
    limits = ("first_token_after_s=6", "next_token_after_s=6", "unresponsive_after_s=3000")
    run = Run(tmp_path, num_steps=6, overrides=tuple(f"engines.policy.{limit}" for limit in limits))
    async with run.started() as command:
        for steps in (1, 3):
            await command.log.until_trained(steps)
            await command.log.pass_over(moments_of(name).randrange(EVENTS_PER_STEP))
            psutil.Process(command.log.pids[name]).suspend()
            await command.log.until_restarted(name)
        await finish(run, command)
    await audit(run, killed=[name, name])
    async with run.reopened() as bus:
        events = [event for _, event in await read_all(bus, run)]
    reasons = [event.reason for event in events if isinstance(event, ActorExited) and event.actor == name]
    suspects = [event for event in events if isinstance(event, EngineStateChanged) and event.new is EngineState.SUSPECT]
    assert reasons[:-1] == [event.reason for event in suspects]  # the last one ended with the run
    assert len(suspects) == 2
    assert all("no first token within 6 s" in reason or "no answer within" in reason for reason in reasons[:-1])
