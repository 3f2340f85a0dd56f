"""A first connect that fails again and again until its time is over, which comes once the expected failure is seen."""

import anyio

from runtime.bus.errors import BusUnavailable
from runtime.bus.limits import BusLimits
from runtime.bus.nats.connection import Connection
from tests.fixtures.nats import eventually


async def failing_connect(url: str, expected: str, certificate: str | None = None) -> str:
    """Connect, and end the time for that when a failure has this text; return the text of the error."""
    connection, reasons = Connection(BusLimits(connect_timeout_s=600.0)), list[str]()

    async def connect() -> None:
        try:
            await connection.start(url, "test", "_INBOX.test", lambda: None, certificate)
        except BusUnavailable as error:
            reasons.append(str(error))
        else:
            await connection.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connect)
        await eventually(lambda: bool(reasons) or connection.is_connected or expected in connection.last_error)
        if connection._connecting is not None:
            connection._connecting.cancel()
    (reason,) = reasons
    return reason
