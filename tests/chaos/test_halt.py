"""A person halts the running round with bin/halt: its groups go on from their tokens, and nothing is lost.

Rollout is killed right after a halt, so that it reads the halt again and answers the tasks of the halted round.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import anyio.to_thread
import pytest

from messages import GroupAborted, GroupsIssued, Message, RoundHalted
from runtime.bus.addresses import engine_key
from runtime.node.halting import NotHalted, halt_round
from runtime.node.reopen import find_run
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import LAPTOP, ROOT, Command, Run
from tests.chaos.test_kill import url_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

COLOCATED = ROOT / "topologies" / "laptop-colocated.toml"
GRADERS = Path(__file__).with_name("graders.py")
SLOW_S: Final = 2.0  # of each token while a round is to be halted: it is generated for seconds


def halt_as_a_person(run: Run) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "halt", str(run.directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def slow_down(command: Command, seconds: float) -> None:
    """Have the engine take so much longer for each token."""
    url, key = url_of(command, "engine.policy.0"), (await engine_key(command.bus.kv)).reveal()
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(f"{url}/slow_down", json={"forward_sleep_time": seconds}) as answer,
    ):
        assert answer.status == 200, await answer.text()


def is_issued(event: Message) -> bool:
    return isinstance(event, GroupsIssued)


@pytest.mark.parametrize(
    "topology", [LAPTOP, pytest.param(COLOCATED, marks=pytest.mark.nightly)], ids=lambda path: path.stem
)
async def test_rollout_is_killed_right_after_a_person_halted_the_round(tmp_path: Path, topology: Path) -> None:
    run = Run(tmp_path, num_steps=12, topology=topology, overrides=(f"data.0.rm_type={GRADERS}:slowly",))
    async with run.started() as command:
        await command.log.until_trained(1)
        await slow_down(command, SLOW_S)
        done = None
        while done is None or done.returncode:  # it may come while the trainer works
            await command.log.until(is_issued)
            done = await anyio.to_thread.run_sync(halt_as_a_person, run)
            assert done.returncode == 0 or "no group is being generated" in done.stderr, done
        assert "in flight go back to the pool, and the run goes on" in done.stdout
        command.log.kill("rollout")
        await slow_down(command, 0.0)
        await command.log.until_trained(3)
        await slow_down(command, SLOW_S)
        with anyio.fail_after(200):
            while True:
                await command.log.until(is_issued)
                try:
                    await halt_round(find_run(str(run.directory)))
                except NotHalted:
                    continue
                break
        await command.log.until(lambda event: isinstance(event, GroupAborted))  # or the groups may end first
        await slow_down(command, 0.0)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    after = await anyio.to_thread.run_sync(halt_as_a_person, run)
    assert (after.returncode, after.stderr) == (1, "no node daemon runs r: nothing is being generated\n")
    books = await audit(run, killed=["rollout"], ordered=False)
    assert (books.dropped, books.failed, books.in_flight) == (0, 0, 0)
    async with run.reopened() as bus:
        log = await read_all(bus, run)
    halts = [(seq, event) for seq, event in log if isinstance(event, RoundHalted) and event.by_hand]
    assert len(halts) == 2
    for seq, halt in halts:
        given_back = {
            event.group_id
            for at, event in log
            if at > seq and isinstance(event, GroupAborted) and event.round == halt.round
        }
        (again,) = [
            event for at, event in log if at > seq and isinstance(event, GroupsIssued) and event.round == halt.round + 1
        ][:1]
        assert given_back
        assert given_back <= {group.group_id for group in again.groups if group.attempt}
