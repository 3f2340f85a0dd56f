"""The INFO line that a NATS server sends to every client, read without the NATS client."""

import socket
from typing import Final
from urllib.parse import urlsplit

import msgspec

PORT: Final = 4222
LONGEST: Final = 64 * 1024  # bytes


class Greeting(msgspec.Struct, frozen=True):
    """Fields of the server's INFO line that decide whether a run can use the server."""

    jetstream: bool = False
    auth_required: bool = False
    max_payload: int = 0  # bytes
    cluster: str = ""  # name of the cluster; none: the server is alone


def greeting_of(url: str, timeout_s: float) -> Greeting | None:
    """Connect to one URL and read the server's INFO line; None if it is not plain text (tls, ws).

    Raises:
        OSError: no server answers.
        ValueError: the server is not a NATS server, or the URL is malformed.
    """
    parts = urlsplit(url)
    port = parts.port or {"wss": 443, "ws": 80}.get(parts.scheme, PORT)
    with socket.create_connection((parts.hostname or "", port), timeout=timeout_s) as connected:
        if parts.scheme in ("ws", "wss"):
            return None
        line = connected.makefile("rb").readline(LONGEST)
    word, _, rest = line.partition(b" ")
    if word != b"INFO":
        raise ValueError("the answer is not that of a NATS server")
    try:
        return msgspec.json.decode(rest, type=Greeting)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the answer is not that of a NATS server: {error}") from error
