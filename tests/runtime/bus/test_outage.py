"""A connection whose limits allow an outage: its seconds do not count against deadlines."""

import anyio
import pytest

from messages import DescribeRequested, Plane
from runtime.bus.bus import Bus
from runtime.bus.errors import CallTimeout, PublishTimeout
from runtime.bus.limits import BusLimits, over_network
from runtime.bus.nats import outages
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer, eventually, group_failed

pytestmark = pytest.mark.anyio
SHORT = BusLimits(publish_timeout_s=0.4, attempt_timeout_s=0.2)


async def test_a_publish_lasts_through_an_outage_that_is_longer_than_its_deadline(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = over_network(TEST_LIMITS, 600.0)
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=limits) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        own_nats_server.kill()
        await eventually(lambda: bus.away_s > 0)
        async with anyio.create_task_group() as group:
            group.start_soon(bus.publish, group_failed(1))
            group.start_soon(bus.kv.put, "key", 1)
            await anyio.wait_all_tasks_blocked()
            monkeypatch.setattr(outages, "_now", lambda: anyio.current_time() + 2 * limits.publish_timeout_s)
            own_nats_server.spawn()
            await own_nats_server.wait_ready()
        assert bus.away_s == 0
        assert bus.back_s < 60
        assert (await bus.state(Plane.EVENT)).messages == 1


async def test_a_publish_ends_when_the_outage_is_longer_than_allowed(own_nats_server: NatsServer) -> None:
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=over_network(SHORT, 1.0)) as bus:
        own_nats_server.kill()
        await eventually(lambda: bus.away_s > 0)
        with anyio.fail_after(200), pytest.raises(PublishTimeout):
            await bus.publish(group_failed(1))
        assert bus.away_s >= 1.0


async def test_a_call_keeps_its_own_deadline_in_an_outage(own_nats_server: NatsServer) -> None:
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=over_network(SHORT, 60.0)) as bus:
        own_nats_server.kill()
        await eventually(lambda: bus.away_s > 0)
        with anyio.fail_after(200), pytest.raises(CallTimeout):
            await bus.call("nobody", DescribeRequested(), timeout_s=0.3)


async def test_a_server_that_does_not_answer_is_noticed_within_seconds(own_nats_server: NatsServer) -> None:
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=over_network(SHORT, 60.0)) as bus:
        own_nats_server.pause()
        with anyio.fail_after(200):
            while not bus.away_s:  # noqa: ASYNC110 - the client's pings
                await anyio.sleep(0.1)
        own_nats_server.resume()
        await eventually(lambda: not bus.away_s)
