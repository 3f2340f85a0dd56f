"""A run's streams: made once, brought up to date, refused where they cannot be."""

import msgspec
import pytest

from messages import Plane
from messages.subjects import stream_of
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, StreamConflict
from runtime.bus.limits import GIB, MIB
from runtime.bus.nats.store import api_call
from runtime.bus.nats.streams import stream_configs
from tests.fixtures.nats import TEST_STREAMS, NatsServer, group_failed

pytestmark = pytest.mark.anyio


def test_every_stream_is_bounded_and_stored_in_files() -> None:
    for config in stream_configs("run", TEST_STREAMS):
        assert config["max_bytes"] > 0
        assert config["storage"] == "file"


async def test_making_streams_twice_keeps_what_they_hold(bus: Bus) -> None:
    await bus.publish(group_failed(1))
    await bus.ensure_streams(TEST_STREAMS)
    assert (await bus.state(Plane.EVENT)).messages == 1


async def test_the_server_holds_exactly_what_was_wanted(bus: Bus) -> None:
    for wanted in stream_configs(bus.run, TEST_STREAMS):
        info = await api_call(bus._connection, f"STREAM.INFO.{wanted['name']}")
        assert {key: info["config"].get(key, type(value)()) for key, value in wanted.items()} == wanted


async def test_other_limits_are_brought_up_to_date(bus: Bus) -> None:
    await bus.publish(group_failed(1))
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=96 * MIB))
    info = await api_call(bus._connection, f"STREAM.INFO.{stream_of(bus.run, Plane.EVENT)}")
    assert info["config"]["max_bytes"] == 96 * MIB
    assert info["state"]["messages"] == 1


async def test_a_stream_of_another_kind_under_the_name_is_a_conflict(nats_server: NatsServer, run_name: str) -> None:
    async with Bus.connect(nats_server.url, run_name, name="test") as bus:
        name = stream_of(run_name, Plane.WORK)
        await api_call(bus._connection, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"other.{run_name}.>"]})
        with pytest.raises(StreamConflict, match="retention"):
            await bus.ensure_streams(TEST_STREAMS)


async def test_streams_over_the_servers_storage_are_refused(nats_server: NatsServer, run_name: str) -> None:
    async with Bus.connect(nats_server.url, run_name, name="test") as bus:
        with pytest.raises(BusError, match="stream phy-"):
            await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=1000 * GIB))
