"""What nats-py leaves open is bounded: first connect, sizes, side errors, buffers, a close for good."""

import asyncio

import anyio
import pytest
from structlog.testing import capture_logs

from messages import encode
from messages.subjects import subject_of
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, BusUnavailable, MessageTooLarge
from runtime.bus.limits import BusLimits
from runtime.bus.nats.connection import open_connection, wire_size
from tests.fixtures.nats import TEST_STREAMS, NatsServer, eventually, group_failed

pytestmark = pytest.mark.anyio
NO_SERVER = "nats://127.0.0.1:9"  # the discard port


async def test_a_first_connect_to_no_server_ends() -> None:
    with anyio.fail_after(200), pytest.raises(BusUnavailable, match="not established within"):
        async with Bus.connect(NO_SERVER, "run", name="test", limits=BusLimits(connect_timeout_s=0.3)):
            pass


async def test_a_run_name_that_is_no_subject_token_is_refused() -> None:
    with pytest.raises(ValueError, match="run name"):
        async with Bus.connect(NO_SERVER, "a.b", name="test"):
            pass


async def test_header_bytes_count_and_the_largest_message_that_fits_goes_through(bus: Bus) -> None:
    connection = bus._connection
    headers = {"Content-Type": "application/json", "Name": "größer"}
    room = connection.max_payload - wire_size(b"", headers)
    await connection.send("phy.size", b"x" * room, headers)
    with pytest.raises(MessageTooLarge) as refused:
        await connection.send("phy.size", b"x" * (room + 1), headers)
    assert refused.value.size_bytes == refused.value.limit_bytes + 1
    assert await bus.publish(group_failed(1))  # the connection lives


async def test_a_message_over_the_limit_is_refused_before_it_is_sent(bus: Bus) -> None:
    with pytest.raises(MessageTooLarge):
        await bus.publish(group_failed(1, reason="x" * 8 * 1024 * 1024))
    assert await bus.publish(group_failed(2)) == 1


async def test_a_connection_that_closes_for_good_cancels_its_owner(nats_server: NatsServer) -> None:
    """Exactly what the size check prevents: payload at the limit plus a header makes the server close."""

    async def owner() -> None:
        async with open_connection(nats_server.url, name="test", limits=BusLimits()) as connection:
            await connection._client.publish("phy.size", b"x" * connection.max_payload, headers={"a": "b"})
            await anyio.sleep_forever()

    with pytest.raises(BusUnavailable, match="closed for good"):
        await owner()


async def test_a_close_that_meets_a_reconnect_is_not_a_cancellation(nats_server: NatsServer) -> None:
    """nats-py cancels its reconnect, which may wait for the end of the transport, as the close then does."""
    async with open_connection(nats_server.url, name="test", limits=BusLimits()) as connection:
        client = connection._client
        assert client._transport is not None
        reconnect = client._reconnection_task = asyncio.create_task(client._transport.wait_closed())
        await asyncio.sleep(0)  # it waits
    assert reconnect.cancelled()


async def test_a_cancelled_close_stays_cancelled(nats_server: NatsServer) -> None:
    with anyio.CancelScope() as scope:
        async with open_connection(nats_server.url, name="test", limits=BusLimits()):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_an_error_of_the_block_comes_out_as_itself(nats_server: NatsServer) -> None:
    with pytest.raises(KeyError):
        async with Bus.connect(nats_server.url, "run", name="test"):
            raise KeyError("mine")


async def test_an_outage_does_not_flood_the_log(own_bus: Bus, own_nats_server: NatsServer) -> None:
    with capture_logs() as lines:
        own_nats_server.kill()
        await eventually(lambda: own_bus.stats()["bus/async_errors"] >= 10)
        own_nats_server.spawn()
        await own_nats_server.wait_ready()
        await own_bus.publish(group_failed(1))
    errors = [line for line in lines if line["event"] == "bus_error"]
    assert 4 <= len(errors) <= int(own_bus.stats()["bus/async_errors"]).bit_length()  # at 1, 2, 4, 8, ...
    assert [line["event"] for line in lines if line["event"] in ("bus_disconnected", "bus_reconnected")] == [
        "bus_disconnected",
        "bus_reconnected",
    ]
    assert all("exc_info" not in line for line in lines)


async def test_what_is_sent_in_an_outage_is_bounded(own_nats_server: NatsServer) -> None:
    limits = BusLimits(pending_bytes=100_000)
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=limits) as bus:
        own_nats_server.kill()
        await eventually(lambda: not bus._connection.is_connected)
        for _ in range(9):
            await bus.notify(group_failed(1, reason="x" * 10_000), to=f"_INBOX.{bus.run}.a")
        with pytest.raises(BusError, match="OutboundBufferLimit"):
            await bus.notify(group_failed(1, reason="x" * 10_000), to=f"_INBOX.{bus.run}.a")


async def test_two_runs_share_a_server_and_do_not_meet(nats_server: NatsServer) -> None:
    async with (
        Bus.connect(nats_server.url, "one-run", name="test") as one,
        Bus.connect(nats_server.url, "other-run", name="test") as other,
    ):
        await one.ensure_streams(TEST_STREAMS)
        await other.ensure_streams(TEST_STREAMS)
        assert await one.publish(group_failed(1)) == 1
        assert await other.publish(group_failed(2)) == 1


def test_wire_size_is_the_length_of_the_block_that_is_sent() -> None:
    encoded = encode(group_failed(1))
    block = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in encoded.headers.items()) + "\r\n"
    assert wire_size(encoded.payload, encoded.headers) == len(block.encode()) + len(encoded.payload)
    assert subject_of("run", group_failed(1)) == "phy.run.event.group.failed.1.1"


async def test_a_server_that_is_stopped_in_order_is_no_end(own_bus: Bus, own_nats_server: NatsServer) -> None:
    await own_bus.publish(group_failed(1))
    own_nats_server.stop()
    own_nats_server.spawn()
    await own_nats_server.wait_ready()
    assert await own_bus.publish(group_failed(2)) == 2


async def test_what_arrives_faster_than_it_is_handled_is_dropped_and_counted(nats_server: NatsServer) -> None:
    limits = BusLimits(inbox_messages=8)
    async with open_connection(nats_server.url, name="test", limits=limits) as connection:
        handled: list[bytes] = []
        await connection.subscribe("phy.burst", lambda message: handled.append(message.data))
        for _ in range(2000):
            await connection.send("phy.burst", b"x")
        counters = connection.counters
        await eventually(lambda: len(handled) + counters.slow_consumer_drops == 2000)
        assert counters.slow_consumer_drops > 0
        assert connection.is_connected
