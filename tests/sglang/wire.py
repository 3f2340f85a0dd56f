"""Relay between a client and a server that records the bytes sent to the server."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Wire:
    """A relay on its own port."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname, parts.port
        self.url = ""
        self.sent = bytearray()  # from clients to the server

    def times_sent(self, text: str) -> int:
        """Count the occurrences of a text in the sent bytes."""
        return bytes(self.sent).count(text.encode())

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one client connection."""
        try:
            there = await asyncio.open_connection(self._host, self._port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, there[1], keep=True))
                group.create_task(self._copy(there[0], writer, keep=False))
        except* OSError:
            pass
        finally:
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool) -> None:
        try:
            while data := await reader.read(65536):
                if keep:
                    self.sent += data
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def recorded(target: str) -> AsyncGenerator[Wire]:
    """Run a relay to a server."""
    wire = Wire(target)
    server = await asyncio.start_server(wire.relay, "127.0.0.1", 0)
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
        server.close_clients() if hasattr(server, "close_clients") else None
