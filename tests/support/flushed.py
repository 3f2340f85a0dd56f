"""Wait until the server has processed what a plain nats-py client sent."""

from nats.aio.client import Client


async def flushed(client: Client, timeout_s: int = 30) -> None:
    """Wait until the server has processed all that the client sent.

    nats-py's flush writes its PING before what is pending, such as a SUB, which is written after it. So the answer to
    one flush says nothing of it; the answer to the next one does.

    Raises:
        nats.errors.FlushTimeoutError: no answer.
    """
    for _ in range(2):
        await client.flush(timeout_s)
