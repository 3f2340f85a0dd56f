"""Test rig: fleet and generator on a server, connected as in a rollout actor."""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.weights.updater import Mode, Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.requests.request import GenerateRequest
from actors.rollout.requests.sending import Generator
from actors.rollout.sglang.body import generate_body
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.reading import AnswerReader
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.sglang.updates import WeightUpdates
from messages import SamplingParams, WeightsAnnounced
from runtime.models.checksums import checksums_of
from tests.sglang.server import Server, checksum_of
from tests.support.rollout import announcement
from tests.support.sampled import Generated, generate, request_of

READY_S = 120.0  # only ends a wait that hangs
ADMIN_S = 60.0  # for control calls, so that a machine that stands still fails none
POLL_S = 0.02


@dataclass
class Rig:
    """The parts of one rollout actor, and its server."""

    server: Server
    client: SglangClient
    updater: Updater
    fleet: Fleet
    generator: Generator
    weights: dict[int, Path]
    checksums: dict[int, str]  # by version, as this server computes them
    raw_ends: dict[tuple[int, ...], dict[str, Any] | None] = field(default_factory=dict)  # the server's, by tokens

    def __post_init__(self) -> None:
        ask, stream = self.client.generate, self.client.stream

        async def generate(
            router: str, body: dict[str, Any], readers: Sequence[AnswerReader], *, routing_key: str = ""
        ) -> None:
            await ask(router, body, readers, routing_key=routing_key)
            self.raw_ends |= {tuple(reader.ids.tolist()): reader.meta.finish_reason for reader in readers}

        async def streamed(router: str, body: dict[str, Any], reader: AnswerReader, **more: Any) -> None:
            await stream(router, body, reader, **more)
            self.raw_ends[tuple(reader.ids.tolist())] = reader.meta.finish_reason

        self.client.generate, self.client.stream = generate, streamed

    def announced(self, version: int) -> WeightsAnnounced:
        """Make the event that publishes a version."""
        directory = self.weights[version]
        return announcement(version, path=str(directory), checksum=checksums_of(directory).total)

    async def update(self, version: int) -> None:
        """Make a version the target, and wait until the engine holds it."""
        await self.fleet.set_target(self.announced(version))
        with anyio.fail_after(READY_S):
            await self.fleet.next_version(version - 1)

    async def generate(self, request: GenerateRequest) -> Generated:
        """Send a request through the router."""
        generated = await generate(self.generator, request)
        assert generated is not None
        return generated

    async def until_load(self, true: Callable[[dict[str, Any]], bool]) -> None:
        """Poll the engine's load until a condition holds."""
        load: dict[str, Any] = {}
        with anyio.move_on_after(READY_S):
            while not true(load := await anyio.to_thread.run_sync(self.server.loads)):  # noqa: ASYNC110 - no event
                await anyio.sleep(POLL_S)
            return
        raise AssertionError(f"not so within {READY_S} s; at last {load}")

    async def until_running(self, number: int) -> None:
        """Wait until the engine decodes this number of requests."""
        await self.until_load(lambda load: load["num_running_reqs"] == number)

    async def until_tokens(self, number: int) -> None:
        """Wait until the engine holds at least this number of tokens of running requests."""
        await self.until_load(lambda load: load["num_running_reqs"] > 0 and load["num_used_tokens"] >= number)

    async def slow_down(self, seconds: float) -> None:
        await anyio.to_thread.run_sync(self.server.slow_down, seconds)


def request(
    prompt: list[int],
    max_new_tokens: int,
    *,
    rid: str | None = None,
    round: int | None = 0,
    streamed: bool = False,
    **params: Any,
) -> GenerateRequest:
    """Make a request of one sample."""
    return request_of(
        rid or uuid.uuid4().hex,
        [prompt],
        SamplingParams(max_new_tokens=max_new_tokens, **params),
        seeds=[uuid.uuid4().int >> 97],
        streamed=streamed,
        round=round,
    )


def body_of(asked: GenerateRequest) -> dict[str, Any]:
    """Return the body of a request, under its own id."""
    ids = [each.ids() for each in asked.inputs]
    return generate_body(asked.rid, ids, asked.params, max_new_tokens=asked.max_new_tokens)


def readers_of(asked: GenerateRequest) -> list[AnswerReader]:
    """Return readers for one try of a request."""
    asked.readers = [AnswerReader(each.buffer) for each in asked.inputs]
    return list(asked.readers)


@asynccontextmanager
async def rig_of(
    server: Server, router: str, weights: dict[int, Path], checksums: dict[int, str], model: ServedModel, mode: Mode
) -> AsyncGenerator[Rig]:
    """Run the generator and fleet of a rollout actor, with the first weights in the engine."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, anyio.create_task_group() as group:
        client = SglangClient(session, admin_timeout_s=ADMIN_S)
        updater = Updater(client, mode)
        fleet = Fleet(
            client,
            WeightVerifier(
                client, updater, UpdateTracker(settle_timeout_s=READY_S), verify=None, trainer_dtype="float32"
            ),
        )
        generator = Generator(client, fleet.serving, model)
        updater.interrupt_by(generator.running.interrupt)
        rig = Rig(server, client, updater, fleet, generator, weights, checksums)
        await client.update_weights(server.url, str(weights[1]), "1@clean")  # tests may go back to it
        group.start_soon(fleet.run_engine, "engine-0", server.url)
        group.start_soon(fleet.run_router, router)
        group.start_soon(generator.running.run)
        await rig.update(1)
        try:
            yield rig
        finally:
            group.cancel_scope.cancel()


async def until_read(asked: GenerateRequest, number: int = 1) -> None:
    """Poll until the client has read at least this number of tokens of a streamed answer."""
    await until(lambda: bool(asked.readers) and asked.readers[0].num_tokens >= number)


async def until(true: Callable[[], bool], limit_s: float = READY_S) -> None:
    """Poll until a condition in this process holds."""
    with anyio.fail_after(limit_s):
        while not true():  # noqa: ASYNC110 - short polling is enough in tests
            await anyio.sleep(POLL_S)


async def left_as_found(client: SglangClient, server: Server) -> None:
    """Undo what a test left in an engine: requests, a pause, a weight sync."""
    with contextlib.suppress(EngineError):
        await client.abort(server.url, None)
    with contextlib.suppress(EngineError):
        await client.proceed(server.url)
    with contextlib.suppress(EngineError):  # most leave no weight sync open
        await WeightUpdates(client).end_update(server.url, timeout_s=READY_S)


async def learn_checksums(client: SglangClient, server: Server, weights: dict[int, Path]) -> dict[int, str]:
    """Update to each version once, and read its checksum."""
    found: dict[int, str] = {}
    for version, directory in reversed(weights.items()):
        await client.update_weights(server.url, str(directory), f"{version}@learnt")
        found[version] = await anyio.to_thread.run_sync(checksum_of, server)
    return found
