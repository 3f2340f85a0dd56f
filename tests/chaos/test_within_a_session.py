"""Others die within a weight sync: everything, the node daemon, the router. By each transport that has sessions."""

import os
import signal
from pathlib import Path
from typing import Final

import pytest

from actors.trainer.weights.shared_memory import SEGMENTS, segment_prefix
from tests.chaos.audit import audit
from tests.chaos.harness import EVENT_S, ROOT, SMALL, Command, Run
from tests.chaos.outliving import check_the_last_session
from tests.chaos.rank_moments import GATE, planned
from tests.chaos.test_kill import finish
from tests.chaos.weight_moments import at

pytestmark = [pytest.mark.anyio]

SPLIT: Final = ROOT / "topologies" / "laptop-split.toml", "trainer.0"
COLOCATED: Final = ROOT / "topologies" / "laptop-colocated.toml", "trainer"
NUM_STEPS: Final = 16  # after the death enough for an engine that starts slowly to be in the last session
ROUTER: Final = "router.policy"
CASES: Final = [
    pytest.param(*SPLIT, "everything", id="collective, everything", marks=pytest.mark.nightly),
    pytest.param(*COLOCATED, "everything", id="ipc, everything", marks=pytest.mark.chaos),
    pytest.param(*SPLIT, "node daemon", id="collective, node daemon", marks=pytest.mark.nightly),
    pytest.param(*COLOCATED, "node daemon", id="ipc, node daemon", marks=pytest.mark.nightly),
    pytest.param(*SPLIT, "router", id="collective, router", marks=pytest.mark.nightly),
    pytest.param(*COLOCATED, "router", id="ipc, router", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("topology", "trainer", "who"), CASES)
async def test_all_engines_get_the_newest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: Path, trainer: str, who: str
) -> None:
    """The trainer stands still before the third bucket of a session, while somebody is killed."""
    routed = ("engines.policy.router=sglang-router",) if who == "router" else ()
    settings = (*SMALL, "trainer.export_bucket_bytes=16384", *routed)
    run = Run(tmp_path, num_steps=NUM_STEPS, topology=topology, settings=settings)
    await outlive(run, monkeypatch, trainer, who)


async def outlive(
    run: Run, monkeypatch: pytest.MonkeyPatch, trainer: str, who: str, *, limit_s: float = EVENT_S
) -> None:
    """Run it to its end, with a death on the way.

    Args:
        run: has not been started.
        monkeypatch: for the run's environment.
        trainer: the process that stands still.
        who: is killed meanwhile: "everything", "node daemon" or "router".
        limit_s: for the next awaited event, and for the rest of the run.
    """
    (marks := run.output.parent / "marks").mkdir()
    moment = at("before", "bucket", 2, process=trainer, signal="SIGSTOP")
    for name, value in planned([moment], marks, in_turn=True).items():
        monkeypatch.setenv(name, value)
    async with run.started() as command:
        command.log.event_s = command.end_s = limit_s
        await command.log.until(lambda _: trainer in command.log.pids)
        await command.log.until_there((marks / moment.name).exists)
        if who == "router":
            await kill_the_router(command, trainer)
            await finish(run, command)
        else:
            await end(run, command, who)
    (marks / GATE).unlink()
    if who != "router":
        async with run.started() as command:
            command.log.event_s = command.end_s = limit_s
            await finish(run, command)
    await check(run, killed=[ROUTER] if who == "router" else None)


async def kill_the_router(command: Command, trainer: str) -> None:
    await command.log.until(lambda _: ROUTER in command.log.pids)
    command.log.kill(ROUTER)
    os.kill(command.log.pids[trainer], signal.SIGCONT)


async def end(run: Run, command: Command, who: str) -> None:
    """Kill the node daemon, or all processes; its guardian ends the rest."""
    if who == "everything":
        family = command.kill_everything()
    else:
        family = command.family()
        command.send(signal.SIGKILL)
    assert await command.end() == -signal.SIGKILL
    await run.gone(family)


async def check(run: Run, killed: list[str] | None) -> None:
    """The books close, engines hold the newest weights, and no shared memory is left."""
    await audit(run, killed=killed)
    await check_the_last_session(run)
    assert not list(SEGMENTS.glob(f"{segment_prefix(run.directory)}-*"))
