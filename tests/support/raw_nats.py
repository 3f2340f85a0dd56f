"""Minimal NATS client that sends any bytes, as an external client may."""

import anyio


async def publish_raw(url: str, subject: str | bytes, payload: bytes, headers: bytes | None = None) -> None:
    """Publish bytes and wait until the server has received them.

    Args:
        headers: Header lines without the version line, sent as they are.
    """
    host, _, port = url.removeprefix("nats://").rpartition(":")
    name = subject.encode() if isinstance(subject, str) else subject
    if headers is None:
        message = b"PUB %s %d\r\n%s\r\n" % (name, len(payload), payload)
    else:
        block = b"NATS/1.0\r\n" + headers + b"\r\n\r\n"
        sizes = (name, len(block), len(block) + len(payload))
        message = b"HPUB %s %d %d\r\n" % sizes + block + payload + b"\r\n"
    with anyio.fail_after(200):
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(b'CONNECT {"verbose":false,"headers":true,"protocol":1}\r\n' + message + b"PING\r\n")
            heard = b""
            while b"PONG" not in heard:
                heard += await stream.receive()
