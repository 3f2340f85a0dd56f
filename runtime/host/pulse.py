"""Signs that the event loop of a process runs: bytes in a pipe whose other end its node agent has."""

import os
from contextlib import suppress
from typing import Final

import anyio

PULSE_VARIABLE: Final = "PHYSARUM_PULSE"  # in the environment: the file descriptor to write to
EVERY_S: Final = 1.0


async def give_pulse(every_s: float = EVERY_S) -> None:
    """Give a sign once in `every_s` until cancelled; return at once where nobody looks for them."""
    descriptor = os.environ.pop(PULSE_VARIABLE, None)  # a process that we start has its own, or none
    if descriptor is None:
        return
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)
    with suppress(BrokenPipeError):  # the agent has died, and we with it
        while True:
            with suppress(BlockingIOError):  # full: the agent stands still, and finds hours of signs
                os.write(pipe, b".")
            await anyio.sleep(every_s)
