"""Events that this version does not know, that are too long, or that are gone."""

import time
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import msgspec
import pytest

from messages import (
    BufferStarted,
    GroupCompleted,
    GroupFailed,
    MessageDeadLettered,
    Plane,
    RunStalled,
    VerdictGiven,
    encode,
    tag_of,
)
from messages.subjects import subject_of
from runtime.bus.bus import Bus
from runtime.bus.errors import LogTrimmedAway, MessageRefused, MessageTooLarge, UnknownDecision
from runtime.bus.limits import MIB
from runtime.bus.nats.server import ServerSettings
from runtime.ledger.fold import LEDGER_EVENTS
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer, eventually, group_failed
from tests.support.raw_nats import publish_raw
from tests.support.running_server import running_server

pytestmark = pytest.mark.anyio


async def num_stored(bus: Bus, number: int) -> None:
    """Wait until the log holds so many messages: the server stores a little after it received."""

    async def are_stored() -> bool:
        return (await bus.state(Plane.EVENT)).messages == number

    await eventually(are_stored)


async def read_all(bus: Bus, *types: type) -> list[object]:
    with anyio.fail_after(200):
        async with bus.read(*types) as events:
            return [received.message async for received in events.so_far()]


@pytest.mark.parametrize("headers", [b"Physarum-Type: checkpoint_compared", b"X: 1", None], ids=str)
async def test_events_of_other_programs_are_ignored(bus: Bus, url: str, headers: bytes | None) -> None:
    for number in range(100):
        await publish_raw(url, f"phy.{bus.run}.event.my-tool.said", b'{"n":%d}' % number, headers)
    await bus.publish(group_failed(1))
    assert await read_all(bus) == [group_failed(1)]
    assert (await bus.state(Plane.EVENT)).messages == 101
    assert (await bus.state(Plane.DEAD)).messages == 0


async def test_a_field_that_this_version_does_not_know_is_ignored(bus: Bus, url: str) -> None:
    payload, headers = encode(group_failed(1))
    lines = "\r\n".join(f"{name}: {value}" for name, value in headers.items()).encode()
    await publish_raw(url, subject_of(bus.run, group_failed(1)), payload[:-1] + b',"later":{"a":1}}', lines)
    await num_stored(bus, 1)
    assert await read_all(bus, GroupFailed) == [group_failed(1)]


@pytest.mark.parametrize("types", [LEDGER_EVENTS, ()], ids=["who folds", "who reads all"])
async def test_a_decision_of_an_unknown_type_ends_the_reader(bus: Bus, url: str, types: tuple[type, ...]) -> None:
    await bus.append(BufferStarted(incarnation=1), expected_last=0)
    await publish_raw(
        url, f"phy.{bus.run}.event.ledger.groups_split", b"{}", b"Physarum-Type: groups_split\r\nPhysarum-Version: 7"
    )
    await num_stored(bus, 2)
    with pytest.raises(UnknownDecision, match=r"event 2 .*'groups_split': version 7 .* this is version 1"):
        await read_all(bus, *types)


async def test_a_decision_says_the_version_of_its_writer(bus: Bus) -> None:
    await bus.append(BufferStarted(incarnation=1), expected_last=0)
    (stored,) = [stored async for stored in bus.stored(Plane.EVENT, below_seq=10)]
    assert stored.headers["Physarum-Version"] == "1"


@pytest.mark.parametrize("headers", [b"Physarum-Type: group_completed", b"Physarum-Type: group_completed_2"], ids=str)
async def test_an_ending_that_cannot_be_read_is_buried_under_its_group(bus: Bus, url: str, headers: bytes) -> None:
    await publish_raw(url, f"phy.{bus.run}.event.group.completed.17.2", b"{}", headers)
    await num_stored(bus, 1)
    assert await read_all(bus, GroupCompleted) == []
    (told,) = await read_all(bus, MessageDeadLettered)
    assert isinstance(told, MessageDeadLettered)
    assert told.subject.endswith(".group.completed.17.2")


@pytest.fixture
async def generous(tmp_path: Path, run_name: str) -> AsyncGenerator[tuple[Bus, str], None]:
    """A bus on a server that takes messages of 40 MiB, and its URL."""
    settings = ServerSettings(store_dir=tmp_path / "store", max_payload=40 * MIB)
    streams = msgspec.structs.replace(TEST_STREAMS, event_bytes=256 * MIB)
    async with running_server(tmp_path, settings) as server:
        async with Bus.connect(server.url, run_name, name="test", limits=TEST_LIMITS) as bus:
            await bus.ensure_streams(streams)
            yield bus, server.url


async def test_a_reader_gets_past_whatever_the_server_took(generous: tuple[Bus, str]) -> None:
    bus, url = generous
    await bus.publish(group_failed(1))
    await publish_raw(url, f"phy.{bus.run}.event.group.failed.2.1", b"x" * (17 * MIB), b"Physarum-Type: group_failed")
    await publish_raw(url, f"phy.{bus.run}.event.note.made", b"x" * (39 * MIB))
    await bus.publish(group_failed(3))
    assert await read_all(bus, GroupFailed) == [group_failed(1), group_failed(3)]
    assert len(await read_all(bus)) == 3  # with the one about the dead letter


async def test_a_message_over_what_a_request_asks_for_is_asked_for_with_more(generous: tuple[Bus, str]) -> None:
    """As one is that lies there from a time when the server took more."""
    bus, url = generous
    await publish_raw(url, f"phy.{bus.run}.event.note.made", b"x" * (39 * MIB))
    await bus.publish(group_failed(3))
    async with bus.read() as events:
        events._reader._pull._max_bytes = MIB
        with anyio.fail_after(200):
            assert (await anext(events)).message == group_failed(3)


async def test_no_writer_stores_an_event_that_is_too_long(generous: tuple[Bus, str]) -> None:
    bus, _ = generous
    with pytest.raises(MessageTooLarge, match=r"event group.failed: .* allowed: at most 8388608"):
        await bus.publish(group_failed(1, reason="x" * (9 * MIB)))


async def test_what_cannot_be_encoded_is_refused_and_nothing_sent(bus: Bus) -> None:
    with pytest.raises(MessageRefused, match=f"{tag_of(GroupFailed)}: "):
        await bus.publish(group_failed(1, reason="\ud800"))
    assert (await bus.state(Plane.EVENT)).messages == 0


STALLED = RunStalled(idle_s=1.0, waiting={})
QUICK = msgspec.structs.replace(TEST_LIMITS, attempt_timeout_s=1.0, pull_heartbeat_s=0.2)


async def test_a_reader_that_was_away_while_the_log_was_trimmed_says_so(
    own_nats_server: NatsServer, run_name: str
) -> None:
    async with Bus.connect(own_nats_server.url, run_name, name="test", limits=QUICK) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        await bus.publish(group_failed(1))
        async with bus.read(GroupFailed) as events:
            await anext(events)
            await events._reader._pull.close()  # as one that hears nothing for a while
            for number in range(2, 6):
                await bus.publish(group_failed(number))
            await bus.purge(Plane.EVENT, below_seq=5)
            await own_nats_server.restart()
            with pytest.raises(LogTrimmedAway, match="begins at 5: messages from 2 on were deleted"):
                with anyio.fail_after(200):
                    await anext(events)


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
async def test_what_a_reader_missed_does_not_depend_on_its_clock(
    own_nats_server: NatsServer, run_name: str, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """With a clock ahead of the server's, lost events counted as read."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    async with Bus.connect(own_nats_server.url, run_name, name="test", limits=QUICK) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        await bus.publish(group_failed(1))
        async with bus.read(GroupFailed) as missing, bus.read(VerdictGiven) as complete:
            await anext(missing)
            assert await missing.next(1.0) is None  # some heartbeats
            await missing._reader._pull.close()
            for number in range(2, 6):
                await bus.publish(group_failed(number))
            while complete._reader._pull.idle_seq < 5:  # until a heartbeat tells how far the server has looked
                assert await complete.next(0.1) is None
            await bus.purge(Plane.EVENT, below_seq=5)
            await own_nats_server.restart()
            assert await complete.next(1.0) is None
            with pytest.raises(LogTrimmedAway, match="begins at 5: messages from 2 on were deleted"):
                with anyio.fail_after(200):
                    await anext(missing)


@pytest.mark.slow
async def test_a_reader_that_had_read_it_all_does_not_mind_that_the_log_is_trimmed(
    own_nats_server: NatsServer, run_name: str
) -> None:
    async with Bus.connect(own_nats_server.url, run_name, name="test", limits=QUICK) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        for number in range(1, 6):
            await bus.publish(group_failed(number))
        async with bus.read(VerdictGiven) as events:  # of which there was none
            assert await events.next(1.0) is None  # some heartbeats
            await bus.purge(Plane.EVENT, below_seq=5)
            await own_nats_server.restart()
            assert await events.next(1.0) is None


async def test_a_reader_of_steady_events_keeps_its_consumer(bus: Bus) -> None:
    """The server sends no heartbeats while it sends messages: each of these is a sign of life, too."""
    async with bus.read(GroupFailed) as events:
        pull, consumer = events._reader._pull, events._reader._consumer
        assert await events.next(0.05) is None  # has the pull begin
        for number in range(1, 4):
            lost_at = pull._request_end
            await bus.publish(group_failed(number))
            received = await events.next(30)
            assert received is not None
            assert received.seq == number
            assert pull._request_end > lost_at
        assert events._reader._consumer == consumer


IMPATIENT = msgspec.structs.replace(TEST_LIMITS, pull_expires_s=1.0)


async def test_a_connected_reader_that_lags_behind_a_trim_says_so(bus: Bus, url: str) -> None:
    async with Bus.connect(url, bus.run, name="slow", limits=IMPATIENT) as slow:
        await bus.publish(group_failed(1))
        async with slow.read(GroupFailed) as events:
            await anext(events)
            await anyio.sleep(3.0)  # as one whose work takes long: its requests end unanswered
            for number in range(2, 6):
                await bus.publish(group_failed(number))
            await bus.purge(Plane.EVENT, below_seq=5)
            with pytest.raises(LogTrimmedAway, match="begins at 5: messages from 2 on were deleted"):
                with anyio.fail_after(200):
                    await anext(events)


async def test_a_connected_reader_that_lags_and_lost_nothing_goes_on(bus: Bus, url: str) -> None:
    async with Bus.connect(url, bus.run, name="slow", limits=IMPATIENT) as slow:
        for number in range(1, 4):
            await bus.publish(group_failed(number))
        async with slow.read(GroupFailed) as events:
            await anext(events)
            await anyio.sleep(3.0)
            await eventually(lambda: len(events._reader._pull.buffered) == 2)
            await bus.purge(Plane.EVENT, below_seq=3)  # which had been sent
            await bus.publish(group_failed(4))
            with anyio.fail_after(200):
                assert [(await anext(events)).message.group_id for _ in range(3)] == [2, 3, 4]
