"""Who reaches the page of a run: this machine alone, and of it holders of the secret, or of a ticket for a request."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from aiohttp import web

from runtime.bus.addresses import host_port
from runtime.http.connections import SCHEME, has_secret
from runtime.settings.placement import is_loopback

TICKET_S: Final = 30.0  # in which a ticket is used
MAX_TICKETS: Final = 256  # not used yet; beyond, the oldest one is not valid any more


class Address(NamedTuple):
    """Where a page is served."""

    host: str
    port: int  # 0: any free one

    @classmethod
    def of(cls, text: str) -> "Address":
        """Read `host:port`.

        Raises:
            ValueError: it is not such an address, or other machines could reach it.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not an address: write host:port, such as 127.0.0.1:0 (any free port)")
        if not is_loopback(host):
            raise ValueError(
                f"{text!r}: the page has no TLS, so it is served on this machine alone, such as on 127.0.0.1:0; from "
                "another machine reach it with ssh -L"
            )
        return cls(host, int(port))

    def again(self, place: str) -> "Address":
        """Return the address with the port that a page at a place had, if any free port is wanted and it is free."""
        port = place.rpartition(":")[2]
        if self.port or place != self.url(int(port or 0)):
            return self
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as tried, suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((self.host, int(port)))
            return self._replace(port=int(port))
        return self

    def url(self, port: int) -> str:
        """Return the URL of a page at this address that got a port."""
        return f"http://{host_port(self.host, port)}"


class Access:
    """The secret of a page, and its tickets.

    A browser sends a cookie of one port to each port of the same address. So the page keeps the secret in the storage
    of its origin, and sends it in a header. A stream of events and a download have no header: they bring a ticket,
    which is valid once.

    Args:
        secret: returns the secret that is valid now.
    """

    def __init__(self, secret: Callable[[], str]) -> None:
        self.secret = secret
        self._tickets: dict[str, tuple[str, float]] = {}  # its secret, and until when it is valid on the loop's clock

    def allows(self, request: web.Request) -> bool:
        """Whether a request has the secret or a ticket, which is not valid any more afterwards."""
        if request.headers.get("Authorization", "").startswith(SCHEME):
            return has_secret(request, self.secret())
        secret, until = self._tickets.pop(request.query.get("ticket", ""), ("", 0.0))
        return secret == self.secret() and asyncio.get_running_loop().time() < until

    def ticket(self) -> str:
        """Return a new ticket."""
        while len(self._tickets) >= MAX_TICKETS:
            self._tickets.pop(next(iter(self._tickets)))
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = self.secret(), asyncio.get_running_loop().time() + TICKET_S
        return ticket


def is_foreign(request: web.Request) -> bool:
    """Whether a request is for another host name. A foreign page may have had that name resolved to this machine."""
    host, colon, port = request.host.rpartition(":")
    return not is_loopback(host if colon and port.isdigit() else request.host)
