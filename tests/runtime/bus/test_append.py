"""The ledger's compare-and-set: one writer, and nothing stored twice."""

import anyio
import pytest

from messages import BufferStarted, GroupsIssued, encode
from messages.subjects import ledger_filter, subject_of
from runtime.bus.bus import Bus
from runtime.bus.errors import SequenceMismatch
from runtime.bus.limits import BusLimits
from runtime.bus.nats.store import EXPECTED_LAST, EXPECTED_LAST_FILTER
from tests.fixtures.nats import TEST_STREAMS, NatsServer, eventually, group_failed

pytestmark = pytest.mark.anyio


def issued(number: int) -> GroupsIssued:
    return GroupsIssued(incarnation=1, round=number, min_version=0, groups=())


async def ledger_of(bus: Bus) -> list[int]:
    found: list[int] = []
    async with bus.read(BufferStarted, GroupsIssued) as events:
        while events.pending:
            received = await events.next(30)
            assert received is not None
            found.append(received.seq)
    return found


async def test_the_expectation_spans_all_ledger_subjects_and_no_others(bus: Bus) -> None:
    first = await bus.append(BufferStarted(incarnation=1), expected_last=0)
    await bus.publish(group_failed(1))
    second = await bus.append(issued(1), expected_last=first)
    assert second == first + 2
    assert await bus.last_ledger_seq() == second


async def test_of_two_writers_one_is_told_what_came_before(bus: Bus) -> None:
    first = await bus.append(BufferStarted(incarnation=1), expected_last=0)
    second = await bus.append(BufferStarted(incarnation=2), expected_last=first)
    with pytest.raises(SequenceMismatch) as refused:
        await bus.append(issued(1), expected_last=first)
    assert (refused.value.expected, refused.value.last) == (first, second)


async def test_of_writers_at_the_same_time_exactly_one_succeeds(bus: Bus) -> None:
    stored: list[int] = []

    async def append(number: int) -> None:
        try:
            stored.append(await bus.append(issued(number), expected_last=0))
        except SequenceMismatch:
            return

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(append, number)
    assert stored == [1] == await ledger_of(bus)


async def test_an_append_whose_answer_was_late_succeeds_and_is_stored_once(own_nats_server: NatsServer) -> None:
    """The server compares sequences before it looks for duplicates, so the retry is refused for our own message."""
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=BusLimits(attempt_timeout_s=0.1)) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        seqs: list[int] = []

        async def append() -> None:
            seqs.append(await bus.append(issued(1), expected_last=0))

        own_nats_server.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(append)
            await eventually(lambda: bus.stats()["bus/publish_retries"] >= 2)
            own_nats_server.resume()
        assert seqs == [1] == await ledger_of(bus)


async def test_a_late_duplicate_cannot_be_stored(bus: Bus) -> None:
    """A copy that was buffered somewhere arrives after others, even when the server has forgotten its id."""
    encoded = encode(issued(1))
    subject = subject_of(bus.run, issued(1))
    headers = encoded.headers | {EXPECTED_LAST: "0", EXPECTED_LAST_FILTER: ledger_filter(bus.run)}
    first = await bus._store.put(subject, encoded.payload, dict(headers))
    await bus.append(issued(2), expected_last=first)
    for _ in range(3):
        with pytest.raises(SequenceMismatch):
            await bus._store.put(subject, encoded.payload, dict(headers))
    assert len(await ledger_of(bus)) == 2


async def test_appends_go_on_over_a_killed_server(own_bus: Bus, own_nats_server: NatsServer) -> None:
    last, killed = 0, False
    for number in range(60):
        if number == 30 and not killed:
            own_nats_server.kill()
            own_nats_server.spawn()
            killed = True
        last = await own_bus.append(issued(number), expected_last=last)
    assert await ledger_of(own_bus) == list(range(1, 61))
