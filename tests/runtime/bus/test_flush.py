"""A flush that ends before its PONG arrives must not end the connection."""

import msgspec
import pytest

from messages.base import Plane
from messages.events import GroupCompleted, PromptsLoaded
from runtime.bus.bus import Bus
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer


@pytest.mark.anyio
async def test_a_consumer_closed_while_the_server_pauses_leaves_the_connection_alive(
    own_nats_server: NatsServer, run_name: str
) -> None:
    limits = msgspec.structs.replace(TEST_LIMITS, drain_timeout_s=0.2)
    async with Bus.connect(own_nats_server.url, run_name, name="test", limits=limits) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        try:
            async with bus.consume(GroupCompleted, durable="filter"):
                own_nats_server.pause()
        finally:
            own_nats_server.resume()
        assert await bus.publish(PromptsLoaded(data="d", num_prompts=1, num_too_long=0, took_s=0.0)) == 1
        assert (await bus.state(Plane.EVENT)).messages == 1
        assert bus.stats()["bus/reconnects"] == 0
