"""The NATS server is killed in the middle of many publishes: each of them arrives, and counts once."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from messages import (
    GroupCompleted,
    GroupsIssued,
    IssuedGroup,
    Message,
    SampleStatus,
    SampleSummary,
    ScoreRequested,
    SegmentsPublished,
)
from runtime.bus.bus import Bus
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, Stage, fold
from tests.chaos.harness import LIMITS, moments_of
from tests.fixtures.nats import TEST_STREAMS, NatsServer, eventually, score_request, segments

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

NUM_MESSAGES = 1000
AT_ONCE = 100
KILLS = 5


@pytest.fixture
async def own_bus(own_nats_server: NatsServer, run_name: str) -> AsyncGenerator[Bus]:
    """A bus on the test's own server whose publishes outlast its slowest start."""
    async with Bus.connect(own_nats_server.url, run_name, name="test", limits=LIMITS) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        yield bus


def completed(group_id: int) -> GroupCompleted:
    sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, prompt_len=1, response_len=1, reward=1.0)
    return GroupCompleted(
        group_id=group_id, attempt=0, lease=f"{group_id}", round=0, instance="r", data="d", samples=(sample,)
    )


async def publish_all(bus: Bus, make: Callable[[int], Message], server: NatsServer) -> dict[int, int]:
    """Publish many messages, kill the server at random moments between; return their sequences by number."""
    moments = moments_of(f"publish {make.__name__}")
    numbers, seqs = iter(range(NUM_MESSAGES)), dict[int, int]()

    async def work() -> None:
        for number in numbers:
            seqs[number] = await bus.publish(make(number))

    async with anyio.create_task_group() as group:
        for _ in range(AT_ONCE):
            group.start_soon(work)
        for kill in range(KILLS):
            share = (kill + moments.random()) / KILLS
            await eventually(lambda share=share: len(seqs) >= share * (NUM_MESSAGES - 2 * AT_ONCE))
            await server.restart()
    return seqs


async def test_each_event_counts_once(own_bus: Bus, own_nats_server: NatsServer) -> None:
    issued = tuple(IssuedGroup(group_id=number, attempt=0, prompt=number) for number in range(NUM_MESSAGES))
    await own_bus.append(GroupsIssued(incarnation=1, round=0, min_version=1, groups=issued), expected_last=0)
    await publish_all(own_bus, completed, own_nats_server)
    state = LedgerState()
    async with own_bus.read(*LEDGER_EVENTS) as events:
        async for received in events.so_far():
            fold(state, received.message, received.seq)
    assert state.books().closed
    assert [group.stage for group in state.groups.values()] == [Stage.COMPLETED] * NUM_MESSAGES


async def test_each_payload_lies_where_its_publisher_was_told(own_bus: Bus, own_nats_server: NatsServer) -> None:
    seqs = await publish_all(own_bus, segments, own_nats_server)
    for number, seq in seqs.items():
        assert (await own_bus.fetch(SegmentsPublished, seq)).group_id == number


async def test_each_piece_of_work_is_done_once(own_bus: Bus, own_nats_server: NatsServer) -> None:
    """As long as its worker lives: a redelivery is to be expected only for what was not acknowledged in time."""

    def work(number: int) -> ScoreRequested:
        return score_request(f"{number}")

    done: list[str] = []
    async with workers(own_bus, done):
        await publish_all(own_bus, work, own_nats_server)
        await eventually(lambda: len(set(done)) >= NUM_MESSAGES)
    assert sorted(set(done)) == sorted(f"{number}" for number in range(NUM_MESSAGES))


@asynccontextmanager
async def workers(bus: Bus, done: list[str]) -> AsyncGenerator[None]:
    async def work() -> None:
        async with bus.consume(ScoreRequested, durable="w", ack_wait_s=5.0) as deliveries:
            async for delivery in deliveries:
                await delivery.ack()
                done.append(delivery.message.request_id)

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        yield
        group.cancel_scope.cancel()
