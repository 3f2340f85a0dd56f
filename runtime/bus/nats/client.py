"""The client of nats-py with corrections: what it reads, when it ends a connection, and where it connects."""

import asyncio
from importlib import import_module
from typing import Any

from runtime.util.imports import without

with without("aiohttp"):  # nats-py uses it for WebSockets alone: half of an actor's time to import
    from nats import errors as nats_errors
    from nats.aio import client as nats_client
    from nats.aio import transport
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

__all__ = ["CorrectedClient", "Msg", "Subscription", "load_websockets", "nats_errors"]

nats_client.DEFAULT_BUFFER_SIZE = 256 * 1024  # bytes per read; nats-py has no option for it, and payloads are large


def load_websockets() -> None:
    """Give nats-py the packages that it needs for ws:// and wss://."""
    for name in ("aiohttp", "multidict"):
        setattr(transport, name, import_module(name))


class CorrectedClient(Client):
    """nats-py 2.16 client that survives three errors after which the original reads nothing while connected.

    These are a PONG for a cancelled or timed-out flush, a subject that is not UTF-8, and malformed headers.

    It also cuts a lost connection at once; the original first waits until the lost server has taken all bytes.

    With `requires_tls` it sends no login to a server that offers no TLS; the original would send it in plain text. It
    connects to the servers that it was given and to no others; the original also connects to the addresses that a
    cluster announces, which may be out of reach, and which anyone on the way can change.
    """

    requires_tls = False

    @property
    def is_clustered(self) -> bool:
        return bool(self._server_info.get("cluster"))

    def _connect_command(self) -> bytes:
        if self.requires_tls and not self._server_info.get("tls_required"):
            raise nats_errors.Error("the server offers no TLS, so that no login is sent to it")
        return super()._connect_command()  # pyright: ignore[reportUnknownMemberType]

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        info = {key: value for key, value in info.items() if key != "connect_urls"}
        await super()._process_info(info, initial_connection)  # pyright: ignore[reportUnknownMemberType]

    async def _process_op_err(self, e: Exception) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and not self.is_closed and not self.is_reconnecting:
            writer.transport.abort()
        await super()._process_op_err(e)

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        if not subject.isascii():
            subject = subject.decode(errors="replace").encode()
        return super()._build_message(sid, subject, reply, data, headers)  # pyright: ignore[reportUnknownMemberType]

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if not headers:
            return None
        try:
            return await super()._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]
        except (ValueError, LookupError):
            return None

    async def _process_pong(self) -> None:
        pongs: list[asyncio.Future[Any]] = self._pongs  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if pongs and pongs[0].done():
            pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()
