"""A request that kills engines: found by sending suspects alone, and failed; those that were there with it complete."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.abc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.deaths import was_killed
from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.weights.disk import Updater
from actors.rollout.engines.weights.loads import Loads
from actors.rollout.engines.weights.prover import Prover
from actors.rollout.requests.poison import DeathRecord, Standing
from actors.rollout.requests.request import GenerateRequest
from actors.rollout.requests.sending import Generator
from actors.rollout.requests.served_model import ServedModel
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from messages import ActorExited, SamplingParams
from runtime.agent.supervision.changes import Change, Exited, Ready
from runtime.agent.supervision.supervisor import Supervision
from runtime.settings.processes import PortRequest, ProcessSpec, Tier, WhenListening
from tests.support.rollout import announcement
from tests.support.tiny_models import write_model

DEADLY = 63
NUM_REQUESTS = 256
NUM_TOKENS = 24


def test_records_by_hand() -> None:
    record = DeathRecord()
    standings = [record.standing]
    for alone, killed in [(False, False), (False, False), (True, True), (True, False), (True, False)]:
        record = record.after_death(alone=alone, killed=killed)
        standings.append(record.standing)
    ordinary, suspect, poison = Standing.ORDINARY, Standing.SUSPECT, Standing.POISON
    assert standings == [ordinary, ordinary, suspect, suspect, suspect, poison]


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_nothing_is_poison_but_what_two_engines_died_of_alone(deaths: list[tuple[bool, bool]]) -> None:
    record = DeathRecord()
    for alone, killed in deaths:
        record = record.after_death(alone=alone, killed=killed)
    of_it = sum(alone and not killed for alone, killed in deaths)
    assert (record.standing is Standing.POISON) == (of_it >= 2)
    assert (record.standing is Standing.ORDINARY) == (len(deaths) < 2)


@pytest.mark.parametrize(
    ("exit_code", "reason", "killed"),
    [
        (-9, "killed by SIGKILL", True),
        (-15, "killed by SIGTERM", True),
        (-9, "no first token for 300 s, of 1 request that may be there", False),  # its agent was asked to
        (-11, "killed by SIGSEGV", False),
        (7, "exit code 7", False),
    ],
)
def test_what_counts_as_a_kill_from_outside(exit_code: int, reason: str, killed: bool) -> None:
    event = ActorExited(actor="engine.policy.0", node="local", pid=1, exit_code=exit_code, reason=reason)
    assert was_killed(event) == killed


class Engines:
    """Embedded engines under supervision, as a node agent has them, and a fleet that follows them."""

    def __init__(self, fleet: Fleet, group: anyio.abc.TaskGroup) -> None:
        self.num_deaths = 0
        self.pids: dict[str, int] = {}
        self._fleet = fleet
        self._group = group
        self._scopes: dict[str, anyio.CancelScope] = {}

    def __call__(self, change: Change) -> None:
        name = change.spec.name
        match change:
            case Ready():
                if name in self._scopes:
                    self._scopes[name].cancel()
                self.pids[name] = change.pid
                self._group.start_soon(self._run, name, f"http://{change.host}:{change.port}", change.pid)
            case Exited():
                self.num_deaths += change.restart_in_s is not None
                how: dict[str, Any] = {"exit_code": change.exit_code, "reason": change.reason}
                self._fleet.deaths.note_exit(ActorExited(actor=name, node="local", pid=change.pid, **how))
            case _:
                pass

    async def _run(self, name: str, url: str, pid: int) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[name] = scope
            await self._fleet.run_engine(name, url, pid=pid)


@asynccontextmanager
async def generating(directory: Path, router: str, number: int) -> AsyncGenerator[tuple[Generator, Engines]]:
    """A generator over engines that die of a token and are started again."""
    model = write_model(directory / "model")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = SglangClient(session)
        updater = Updater(client, "drain")
        fleet = Fleet(client, Prover(client, updater, Loads(), verify="never", trainer_dtype="float32"))
        generator = Generator(client, fleet, ServedModel.read(model))
        async with anyio.create_task_group() as group:
            engines = Engines(fleet, group)
            supervision = Supervision(directory, environment={}, listener=engines)
            await group.start(supervision.run)
            for index in range(number):
                supervision.start(spec(model, index))
            group.start_soon(fleet.run_router, router)
            group.start_soon(generator.running.run)
            await fleet.set_target(announcement(1, path=str(model)))
            with anyio.fail_after(60):
                await fleet.next_version(0)
            try:
                yield generator, engines
            finally:
                await supervision.stop()
                group.cancel_scope.cancel()


def spec(model: Path, index: int) -> ProcessSpec:
    command = (sys.executable, "-m", "tests.support.mortal_engine", str(DEADLY), "--model-path", str(model))
    return ProcessSpec(
        name=f"engine.policy.{index}",
        command=(*command, "--port", "{port}", "--load-format", "dummy", "--max-running-requests", "256"),
        port=PortRequest(),
        ready=WhenListening(),
        tier=Tier.SERVICE,
        max_restarts=30,
    )


def request(number: int, prompt: list[int]) -> GenerateRequest:
    return GenerateRequest(
        rid=f"lease-{number}-1",
        input_ids=[prompt],
        params=SamplingParams(max_new_tokens=NUM_TOKENS),
        max_new_tokens=NUM_TOKENS,
        min_version=1,
        round=0,
        seeds=[number],
    )


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_one_request_that_kills_engines_fails_and_255_complete(tmp_path: Path, router_url: str) -> None:
    completed: list[int] = []
    refused: dict[int, str] = {}

    async with generating(tmp_path, router_url, 2) as (generator, engines):

        async def ask(number: int) -> None:
            prompt = [DEADLY if number == 100 else 1, 1 + number % 60, 1 + number // 60]
            try:
                generated = await generator.generate(request(number, prompt))
            except RequestRefused as error:
                refused[number] = str(error)
            else:
                assert generated is not None
                assert len(generated.answers[0].output_ids) == NUM_TOKENS
                completed.append(number)

        async with anyio.create_task_group() as group:
            for number in range(NUM_REQUESTS):
                group.start_soon(ask, number)
        deaths = engines.num_deaths
    assert refused == {100: "engines die of it: 2 that had nothing else to do"}
    assert sorted(completed) == [number for number in range(NUM_REQUESTS) if number != 100]
    assert deaths == 4  # two with others, two alone
