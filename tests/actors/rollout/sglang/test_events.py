"""Server-sent events out of a connection."""

import asyncio

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from actors.rollout.sglang.events import events_of

pytestmark = pytest.mark.anyio


async def test_what_came_before_a_connection_broke_is_read_though_nobody_looked_until_then() -> None:
    """On a busy machine the last chunk and the end of the connection are met in one turn of the loop."""
    loop = asyncio.get_running_loop()
    content = aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop)
    content.feed_data(b"data: one\n\ndata: t")
    content.feed_data(b"wo\n\ndata: thr")
    content.set_exception(aiohttp.ClientPayloadError("the connection broke"))
    events = events_of(content)
    assert [await anext(events), await anext(events)] == [b"one", b"two"]
    with pytest.raises(aiohttp.ClientPayloadError):
        await anext(events)
