"""A LoRA run whose processes die in the middle of an export, a load or an unload of an adapter.

The books close, only verified adapters sample what is trained, and engines keep no adapter but the newest: they are
asked.
"""

import signal
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import pytest

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from messages import ActorExited, ActorStarted, BatchReady, GroupCompleted, Message, WeightsApplied
from runtime.bus.addresses import engine_key
from runtime.models.versions import ADAPTERS, WEIGHTS, versions_in
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import EVENT_S, Command, Run
from tests.chaos.outliving import died, prepare
from tests.chaos.rank_moments import GATE, Moment
from tests.chaos.test_kill import finish, url_of
from tests.chaos.weight_moments import OF_AN_ADAPTER, Step, When, at
from tests.fixtures.nats import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.anyio, pytest.mark.timeout(1800)]

ENGINE, ROLLOUT, TRAINER = "engine.policy.0", "rollout", "trainer"
PLACES: Final[dict[str, tuple[tuple[When, Step], ...]]] = {  # by who dies
    ENGINE: (("before", "load"), ("during", "load"), ("after", "load"), ("before", "unload"), ("during", "unload")),
    ROLLOUT: (("before", "load"), ("during", "load"), ("after", "load"), ("during", "unload"), ("after", "unload")),
    TRAINER: (("before", "export"), ("during", "export"), ("after", "export"), ("before", "commit")),
}
IN_A_STEP: Final[tuple[tuple[str, When, Step], ...]] = (  # at which the daemon dies, while the process stands still
    (TRAINER, "during", "export"),
    (ROLLOUT, "during", "load"),
    (ENGINE, "during", "load"),
    (ENGINE, "during", "unload"),
)
SETTINGS: Final = ("trainer.lora.rank=2", "optimizer.lr=1e-2", "reward.timeout_s=600")
STEPS: Final = 3  # for each moment: to come to it, and those that were under way meanwhile


def run_of(directory: Path, num_moments: int, grader: str) -> Run:
    overrides = (*SETTINGS, grader)
    return Run(directory, num_steps=STEPS * (1 + num_moments), eval_interval=1000, overrides=overrides, paced=False)


@pytest.mark.parametrize("process", PLACES)
async def test_a_process_dies_at_each_step_of_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    moments = tuple(at(*place, process=process) for place in PLACES[process])
    marks, grader = prepare(tmp_path, monkeypatch, moments)
    run = run_of(tmp_path, len(moments), grader)
    async with run.started() as command:
        for moment in moments:
            await until_back(command, moment, marks)
            await until_the_newest_alone(command, run)
            (marks / GATE).unlink()
        await finish(run, command)
    await audit(run, killed=died(moments))
    await check_adapters(run)


async def test_the_daemon_dies_while_adapters_are_exported_loaded_and_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = tuple(at(when, step, process=process, signal="SIGSTOP") for process, when, step in IN_A_STEP)
    marks, grader = prepare(tmp_path, monkeypatch, moments)
    run = run_of(tmp_path, len(moments), grader)
    for moment in moments:
        async with run.started() as command:
            await eventually((marks / moment.name).exists, timeout_s=EVENT_S)
            family = command.family()
            command.send(signal.SIGKILL)
            assert await command.end() == -signal.SIGKILL
        await run.gone(family)
        (marks / GATE).unlink()
    async with run.started() as command:
        await command.log.until_trained(run.num_steps - 1)
        await finish(run, command)
    await audit(run, killed=None)
    await check_adapters(run)


async def until_back(command: Command, moment: Moment, marks: Path) -> None:
    """Wait for a kill point, and for the restart of its process."""
    has_ended = False

    def is_back(event: Message) -> bool:
        nonlocal has_ended
        has_ended |= isinstance(event, ActorExited) and event.actor == moment.process
        return has_ended and isinstance(event, ActorStarted) and event.actor == moment.process

    await eventually((marks / moment.name).exists, timeout_s=EVENT_S)
    await command.log.until(is_back)


async def until_the_newest_alone(command: Command, run: Run) -> None:
    """Wait until the engine has the newest adapter and no other one, by its own account. No request is running then."""
    with anyio.fail_after(EVENT_S):
        while True:
            newest = [number for number, _ in versions_in(run.directory / WEIGHTS / ADAPTERS)][-1:]
            if await loaded(command) == newest:
                return
            await command.log.read_for(0.2)


async def loaded(command: Command) -> list[int]:
    """Ask the engine for the versions of its adapters."""
    async with aiohttp.ClientSession() as session:
        client = SglangClient(session, await engine_key(command.bus.kv))
        try:
            names = await client.adapters(url_of(command, ENGINE))
        except EngineError:  # it is starting
            return []
    versions = [OF_AN_ADAPTER.search(name) for name in names]
    return sorted(int(version[1]) for version in versions if version is not None)


async def check_adapters(run: Run) -> None:
    """Check that all tokens that were trained are of versions that an engine had verified."""
    async with run.reopened() as bus:
        log = await read_all(bus, run)
    verified = {event.version for _, event in log if isinstance(event, WeightsApplied)}
    completed = {seq: event for seq, event in log if isinstance(event, GroupCompleted)}
    trained = [completed[ref.event_seq] for _, event in log if isinstance(event, BatchReady) for ref in event.groups]
    samples = [sample for group in trained for sample in group.samples]
    sampled_by = {version for each in samples for version in (each.first_version, each.last_version)}
    assert len(sampled_by) > run.num_steps / 2
    assert sampled_by <= verified, sampled_by - verified
