"""Engines supervised as by a node daemon, and a rollout actor's generator over them."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.abc

from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.requests.request import GenerateRequest
from actors.rollout.requests.sending import Generator
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.served_model import ServedModel
from messages import ActorExited
from runtime.node.supervisor.state_changes import Change, Exited, Ready
from runtime.node.supervisor.supervision import Supervision
from runtime.settings.processes import ProcessSpec
from tests.support.rollout import announcement
from tests.support.sampled import generate


class Engines:
    """Forwards starts and exits of the engines to a fleet."""

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
                self._fleet.crashes.note_exit(ActorExited(actor=name, node="local", pid=change.pid, **how))
            case _:
                pass

    async def _run(self, name: str, url: str, pid: int) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[name] = scope
            await self._fleet.run_engine(name, url, pid=pid)


@asynccontextmanager
async def generating(
    directory: Path, router: str, model: Path, specs: Sequence[ProcessSpec], *, start_s: float, believed: Path
) -> AsyncGenerator[tuple[Generator, Engines]]:
    """Run a generator over engines that are restarted when they die.

    Args:
        directory: Directory for their output.
        router: URL of a router without engines.
        model: Directory of the served model.
        specs: Process specs of the engines.
        start_s: Longest start of an engine, in seconds.
        believed: Model directory that the generator reads.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = SglangClient(session)
        updater = Updater(client, "drain")
        fleet = Fleet(client, WeightVerifier(client, updater, UpdateTracker(), verify="never", trainer_dtype="float32"))
        generator = Generator(client, fleet.serving, ServedModel.read(believed))
        async with anyio.create_task_group() as group:
            engines = Engines(fleet, group)
            supervision = Supervision(directory, environment={}, listener=engines)
            await group.start(supervision.run)
            for spec in specs:
                supervision.start(spec)
            group.start_soon(fleet.run_router, router)
            group.start_soon(generator.running.run)
            await fleet.set_target(announcement(1, path=str(model)))
            with anyio.fail_after(start_s):
                await fleet.next_version(0)
            try:
                yield generator, engines
            finally:
                await supervision.stop()
                group.cancel_scope.cancel()


async def check_that_one_fails_alone(
    generator: Generator, engines: Engines, requests: Sequence[GenerateRequest], deadly: int
) -> None:
    """Send requests at once. One of them kills engines: after four deaths it is refused. The others complete."""
    completed: list[int] = []
    refused: dict[int, str] = {}

    async def ask(number: int) -> None:
        request = requests[number]
        try:
            generated = await generate(generator, request)
        except RequestRefused as error:
            refused[number] = str(error)
        else:
            assert generated is not None
            assert len(generated.answers[0].output_ids) == request.max_new_tokens
            completed.append(number)

    async with anyio.create_task_group() as group:
        for number in range(len(requests)):
            group.start_soon(ask, number)
    assert refused == {deadly: "it crashes engines: 2 crashed while it was their only request"}
    assert sorted(completed) == [number for number in range(len(requests)) if number != deadly]
    assert engines.num_deaths == 4  # two with other requests running, two without
