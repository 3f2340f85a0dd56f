"""An engine that takes turns with a trainer: what it is sent, in which order, and how often; recorded at the socket."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.memory import MemoryShare
from actors.rollout.engines.status import MemoryLevel
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.memory import Tag
from messages import WeightsAnnounced
from runtime.models.checksums import checksums_of
from tests.sglang.rig import READY_S
from tests.sglang.router import Router
from tests.sglang.server import Server
from tests.sglang.wire import Wire, recorded
from tests.support.rollout import announcement

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

OF_INTEREST = re.compile(
    rb"POST /(flush_cache|release_memory_occupation|resume_memory_occupation|update_weights_from_disk)"
)


class Notes:
    """What the bucket keeps, in memory."""

    def __init__(self) -> None:
        self.released: list[Tag] = []
        self.sure = True

    async def read(self) -> tuple[list[Tag], bool]:
        return list(self.released), self.sure

    async def write(self, released: list[Tag], *, sure: bool) -> None:
        self.released, self.sure = list(released), sure


@asynccontextmanager
async def rollout(
    client: SglangClient, url: str, router: str, notes: Notes
) -> AsyncGenerator[tuple[Fleet, MemoryShare]]:
    """A rollout actor's half, whose engine has nothing yet to do."""
    verifier = WeightVerifier(
        client, Updater(client, "drain"), UpdateTracker(settle_timeout_s=READY_S), verify=None, trainer_dtype="float32"
    )
    fleet, memory_share = Fleet(client, verifier), MemoryShare(client, "engine-0", url, notes=notes)
    await fleet.allow(MemoryLevel.NOTHING)
    async with anyio.create_task_group() as group:

        async def run() -> None:
            await fleet.run_engine("engine-0", url, memory_share=memory_share)

        group.start_soon(run)
        group.start_soon(fleet.run_router, router)
        try:
            yield fleet, memory_share
        finally:
            group.cancel_scope.cancel()


def sent(wire: Wire) -> list[str]:
    return [name.decode() for name in OF_INTEREST.findall(bytes(wire.sent))]


def announced(weights: dict[int, Path], version: int) -> WeightsAnnounced:
    path = weights[version]
    return announcement(version, path=str(path), checksum=checksums_of(path).total)


async def to(fleet: Fleet, memory_level: MemoryLevel) -> None:
    """Allow a memory level and wait until the engine is there; twice, since that is to do no harm."""
    for _ in range(2):
        await fleet.allow(memory_level)
        with anyio.fail_after(READY_S):
            await fleet.until(lambda: bool(fleet.engines) and fleet.engines[0].status.memory_level is memory_level)


async def test_memory_goes_and_comes_back_in_order_each_once_also_for_the_next_rollout_actor(
    server: Server, client: SglangClient, weights: dict[int, Path], session_router: Router
) -> None:
    notes, router = Notes(), session_router.url
    async with recorded(server.url) as wire:
        async with rollout(client, wire.url, router, notes) as (fleet, memory_share):
            await to(fleet, MemoryLevel.NOTHING)
            moved = memory_share.moved(MemoryLevel.NOTHING)
            assert (moved.reached, moved.bytes_before, moved.bytes_after) == (True, None, None)  # it is not shown
        assert sent(wire) == ["flush_cache", "release_memory_occupation"]
        async with rollout(client, wire.url, router, notes) as (fleet, memory_share):
            await to(fleet, MemoryLevel.NOTHING)  # as its predecessor left it: nothing more is sent
            await to(fleet, MemoryLevel.WEIGHTS)
            await fleet.set_target(announced(weights, 2))
            await to(fleet, MemoryLevel.LOADED)
        assert sent(wire)[2:] == ["resume_memory_occupation", "update_weights_from_disk"]
        async with rollout(client, wire.url, router, notes) as (fleet, memory_share):
            await fleet.set_target(announced(weights, 2))
            await fleet.allow(MemoryLevel.LOADED)
            await to(fleet, MemoryLevel.LOADED)
            await to(fleet, MemoryLevel.EVERYTHING)
            assert memory_share.room is MemoryLevel.EVERYTHING
        assert sent(wire)[4:] == ["update_weights_from_disk", "resume_memory_occupation"]
        bodies = [body.decode() for body in re.findall(rb'\{"tags":\[[^]]*\]\}', bytes(wire.sent))]
    assert bodies == [
        '{"tags":["kv_cache","weights","cuda_graph"]}',
        '{"tags":["weights"]}',
        '{"tags":["kv_cache","cuda_graph"]}',
    ]
    assert server.alive
    log_probs = await client.prompt_log_probs(server.url, [1, 2, 3])
    assert len(log_probs) == 3
