"""Server-sent events, cut out of a stream of bytes."""

from collections.abc import AsyncGenerator

import aiohttp

END_OF_EVENT = b"\n\n"
DONE = b"[DONE]"  # data of the last one


async def events_of(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Data of server-sent events."""
    buffer, searched = bytearray(), 0
    async for part in content.iter_any():
        buffer += part
        while (end := buffer.find(END_OF_EVENT, searched)) >= 0:
            yield bytes(buffer[:end]).removeprefix(b"data: ")
            del buffer[: end + len(END_OF_EVENT)]
            searched = 0
        searched = max(0, len(buffer) - len(END_OF_EVENT) + 1)
