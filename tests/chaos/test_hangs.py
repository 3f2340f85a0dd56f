"""What hangs is treated like what died: each row of the table "Hangs" in docs/understand/failure-model.md."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from messages import ActorExited
from tests.chaos.audit import audit
from tests.chaos.harness import ROOT, Command, Run
from tests.chaos.test_deaths import FILTERED, ROUTED
from tests.fixtures.nats import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

SERVERS = ("engine.policy.0", "router.policy", "nats-server")
ACTORS = ("reward", "filter", "rollout", "buffer", "trainer")
STOPPED_S = 45.0  # longer than a publish waits
LINES = {  # by words of a row: the tests that make it hang
    "a server: engine, router, nats-server": ("test_upkeep.py::test_servers_and_an_actor_that_hang_are_started_again",),
    "a call that blocks an actor's event loop": (
        "test_heartbeats.py::test_a_blocking_call_is_named_though_it_holds_the_interpreters_lock",
    ),
    "an actor whose event loop stands still": (
        "test_upkeep.py::test_servers_and_an_actor_that_hang_are_started_again",
    ),
    "an engine that answers and generates nothing": (
        "test_upkeep.py::test_an_engine_that_hangs_is_found_by_the_tokens_that_do_not_come",
    ),
    "a grader, a filter, a data function": (
        "test_pool.py::test_a_grader_that_hangs_is_killed_and_replaced",
        "test_filter_actor.py::test_a_filter_that_hangs_costs_its_group_alone",
        "test_source_class.py::test_a_class_that_hangs_is_killed_with_what_it_started",
    ),
    "a rollout actor that was replaced meanwhile, on another machine or with external engines": (
        "test_ownership.py::test_the_later_process_has_the_engine_and_the_earlier_one_may_call_it_no_more",
        "test_ownership.py::test_a_call_of_an_actor_that_stood_still_changes_nothing_for_its_successor",
    ),
    "the whole run": ("test_stalls.py::test_the_agent_shows_a_stall_in_a_line",),
}


def test_each_row_is_tested() -> None:
    text = (ROOT / "docs" / "understand" / "failure-model.md").read_text()
    section = text.partition("\n## Hangs")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (an? [^|]*|the [^|]*) \|", section, re.MULTILINE) == [*LINES]
    for cited in {test for tests in LINES.values() for test in tests}:
        file, _, name = cited.partition("::")
        assert [path for path in ROOT.glob(f"tests/**/{file}") if f"def {name}(" in path.read_text()], cited


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("names", [SERVERS, ACTORS])
async def test_at_the_defaults_what_is_stopped_for_good_is_killed_and_named(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    run = Run(tmp_path, num_steps=6, overrides=(*FILTERED, *ROUTED))
    limits = run.topology
    reasons = {name: f"event loop was blocked for {limits.run.unresponsive_after_s:g} s" for name in ACTORS}
    reasons |= {name: f"did not answer for {limits.engines['policy'].unresponsive_after_s:g} s" for name in SERVERS}
    reasons["nats-server"] = f"did not answer for {limits.bus.unresponsive_after_s:g} s"
    named: dict[str, str] = {}
    async with run.started() as command:
        command.log.event_s = 900.0
        await command.log.until_trained(2)
        with command.log.held():
            for name in names:
                os.kill(command.log.pids[name], signal.SIGSTOP)
            while not named.keys() >= set(names):
                event = await command.log.until(lambda event: isinstance(event, ActorExited))
                assert isinstance(event, ActorExited)
                named.setdefault(event.actor, event.reason)
        assert await command.end() == 0
    for name in names:  # its rollout actor may find an engine first, by a request without an answer
        assert named[name].startswith(reasons[name]) or (
            name == "engine.policy.0" and "no answer within" in named[name]
        )
    await audit(run, killed=names)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*SERVERS, *ACTORS])
async def test_at_the_defaults_the_run_outlives_a_stop_of_each_process(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path, num_steps=6, overrides=(*FILTERED, *ROUTED))
    async with run.started() as command:
        await command.log.until_trained(2)
        pid = command.log.pids[name]
        with command.log.held():
            os.kill(pid, signal.SIGSTOP)
            if name == "nats-server":
                await command.log.until_restarted(name)
            else:
                await stopped(command, STOPPED_S)
                with suppress(ProcessLookupError):  # a time limit of another process ended it
                    os.kill(pid, signal.SIGCONT)
        assert await command.end() == 0
    output = run.output.read_text()
    if name == "nats-server":
        assert "nats-server ended: did not answer for 15 s" in output
    else:
        assert re.search(rf"^{re.escape(name)} (has shown no sign of life for \d+ s|ended: )", output, re.MULTILINE)
    await audit(run, killed=[name] if name == "nats-server" else None)  # others may end by time limits of their own


async def stopped(command: Command, seconds: float) -> None:
    """Read the log for a time, in which there may be no event."""
    begin = anyio.current_time()
    await eventually(lambda: anyio.current_time() - begin > seconds, timeout_s=2 * seconds)
