"""A trainer on a real bus for the duration of a block, and what it said."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from actors.trainer.actor import HeldOutPairs, TrainerActor, no_pairs
from messages import (
    BatchTrained,
    CheckpointSaved,
    CheckpointSetAside,
    Message,
    MessageT,
    PairsEvaluated,
    PayloadsMissing,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.process.hosting import Hosted, host
from runtime.settings.topology import Topology
from runtime.util.errors import flatten

SAID = (
    TrainerStarted,
    BatchTrained,
    PairsEvaluated,
    PayloadsMissing,
    CheckpointSaved,
    CheckpointSetAside,
    WeightsAnnounced,
)
TIMEOUT_S = 40.0


@asynccontextmanager
async def running(
    topology: Topology,
    bus: Bus,
    run_dir: Path,
    *,
    through: Callable[[Bus], Bus] = lambda view: view,
    held_out: Callable[[], HeldOutPairs] = no_pairs,
) -> AsyncGenerator[None, None]:
    """A trainer for the duration of a block, ended as SIGTERM would.

    Args:
        through: what it sees of the bus.
        held_out: reads its evaluation sets of preference pairs.
    """

    def build(view: Bus) -> TrainerActor:
        return TrainerActor(topology, through(view), run_dir=run_dir, held_out=held_out)

    trainer = Hosted(name="trainer", role="trainer", actor_type=TrainerActor, build=build)
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [trainer])
        yield
        group.cancel_scope.cancel()


async def errors_of(
    topology: Topology,
    bus: Bus,
    run_dir: Path,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
    *,
    through: Callable[[Bus], Bus] = lambda view: view,
) -> list[BaseException]:
    """What a trainer that ends by itself raises."""
    try:
        async with running(topology, bus, run_dir, through=through):
            if meanwhile is not None:
                await meanwhile()
            await anyio.sleep(TIMEOUT_S)
    except ExceptionGroup as group:
        return flatten(group)
    raise AssertionError("the trainer did not end")


async def said_until(bus: Bus, last: type[Message], count: int = 1, *, from_seq: int = 1) -> list[Message]:
    """What the trainer said, up to the count-th event of a type."""
    said: list[Message] = []
    with anyio.fail_after(TIMEOUT_S):
        async with bus.read(*SAID, from_seq=from_seq) as events:
            async for received in events:
                said.append(received.message)
                count -= isinstance(received.message, last)
                if not count:
                    return said
    raise AssertionError


def names(events: list[Message]) -> list[str]:
    return [type(event).__name__ for event in events]


def of(events: list[Message], kind: type[MessageT]) -> list[MessageT]:
    return [event for event in events if isinstance(event, kind)]
