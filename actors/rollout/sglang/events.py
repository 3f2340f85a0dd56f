"""Server-sent events, cut out of a stream of bytes."""

from collections.abc import AsyncGenerator

import aiohttp

END_OF_EVENT = b"\n\n"
DONE = b"[DONE]"  # data of the last one


async def events_of(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Data of server-sent events."""
    buffer, searched = bytearray(), 0
    async for part in _parts_of(content):
        buffer += part
        while (end := buffer.find(END_OF_EVENT, searched)) >= 0:
            yield bytes(buffer[:end]).removeprefix(b"data: ")
            del buffer[: end + len(END_OF_EVENT)]
            searched = 0
        searched = max(0, len(buffer) - len(END_OF_EVENT) + 1)


async def _parts_of(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """What comes. What had come when the connection broke is given too: aiohttp keeps it and raises before that."""
    try:
        async for part in content.iter_any():
            yield part
    except aiohttp.ClientError:
        yield content._read_nowait(-1)  # pyright: ignore[reportPrivateUsage]  # there is no public way to it
        raise
