"""Heartbeats of a process's event loop: bytes in a pipe that the node daemon reads."""

import os
from contextlib import suppress
from typing import Final

import anyio

PULSE_VARIABLE: Final = "PHYSARUM_PULSE"  # environment variable: the file descriptor to write to
EVERY_S: Final = 1.0


async def give_pulse(every_s: float = EVERY_S) -> None:
    """Send a heartbeat every `every_s` seconds until cancelled; return at once without a pipe."""
    descriptor = os.environ.pop(PULSE_VARIABLE, None)  # child processes must not inherit it
    if descriptor is None:
        return
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)
    with suppress(BrokenPipeError):  # the daemon died, and this process will too
        while True:
            with suppress(BlockingIOError):  # full: the daemon is suspended
                os.write(pipe, b".")
            await anyio.sleep(every_s)
