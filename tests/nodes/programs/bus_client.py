"""Program for tests of the bus between machines: store a payload and read it back. bus_client.py URL"""

import sys

import anyio

from messages import SegmentsPublished
from runtime.bus.bus import Bus
from tests.fixtures.nats import TEST_STREAMS, segments


async def main(url: str) -> None:
    async with Bus.connect(url, "run", name="client") as bus:
        await bus.ensure_streams(TEST_STREAMS)
        seq = await bus.publish(segments(7))
        payload = await bus.fetch(SegmentsPublished, seq)
        print("group", payload.group_id)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
