"""Heartbeats of a process's event loop: lines in a pipe that the node daemon reads, and stacks when they stay away."""

import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio

from runtime.util.stacks import stacks_now

PULSE_VARIABLE: Final = "PHYSARUM_PULSE"  # environment variable: the file descriptor to write to
EVERY_S: Final = 0.5
BEAT: Final = "beat"  # first word of a heartbeat's line; its time and the thread of the event loop follow
TICK_S: Final = 0.5  # between two looks of the watchdog
STACKS_AFTER_S: Final = (1.0, 4.5)  # seconds of silence after which the stacks are written
ASKS: Final = signal.SIGURG  # the node daemon asks a thread for its stack; who does not know it ignores this signal
MAX_BYTES: Final = 1 << 15  # of one dump: half of a pipe
END_S: Final = 2.0  # for the watchdog


async def give_pulse(every_s: float = EVERY_S) -> None:
    """Send a heartbeat every `every_s` seconds until cancelled; return at once without a pipe."""
    descriptor = os.environ.pop(PULSE_VARIABLE, None)  # child processes must not inherit it
    if descriptor is None:
        return
    pipe = int(descriptor)
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)
    watchdog = _Watchdog(pipe, every_s)
    watchdog.start()
    try:
        with suppress(BrokenPipeError):  # the daemon died, and this process will too
            while True:
                watchdog.beat()
                await anyio.sleep(every_s)
    finally:
        watchdog.end()


@asynccontextmanager
async def pulsing() -> AsyncGenerator[None]:
    """Send heartbeats for the duration of a block."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(give_pulse)
        yield
        tasks.cancel_scope.cancel()


class _Watchdog:
    """A thread that writes the stacks of all threads into the pipe while the event loop stands still.

    A call that holds the interpreter's lock, such as a regular expression, stops this thread too. Then the node daemon
    asks: faulthandler's handler of a signal needs no lock. It writes the stack of the thread that gets the signal and
    of no other, since reading the frames of a thread that runs may crash the process.
    """

    def __init__(self, pipe: int, every_s: float) -> None:
        self._pipe, self._every_s = pipe, every_s
        self._loop_thread = threading.get_ident()
        self._beat_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)  # nothing to clean up

    def start(self) -> None:
        faulthandler.register(ASKS, file=self._pipe, all_threads=False)
        self._thread.start()

    def beat(self) -> None:
        """Send a heartbeat.

        Raises:
            BrokenPipeError: nothing reads the pipe any more.
        """
        self._beat_at = time.monotonic()
        self._send(self._beat_at)

    def end(self) -> None:
        """End the thread, and send the last heartbeat: the silence that follows blocks nothing."""
        self._over.set()
        with suppress(BrokenPipeError):
            self._send(math.inf)
        self._thread.join(END_S)

    def _send(self, at: float) -> None:
        self._write(f"{BEAT} {at:.3f} {self._loop_thread:x}\n")

    def _run(self) -> None:
        silent_since, num_written = 0.0, 0
        while not self._over.wait(TICK_S):
            beat_at = self._beat_at
            if beat_at != silent_since:
                silent_since, num_written = beat_at, 0
            due_s = STACKS_AFTER_S[num_written] if num_written < len(STACKS_AFTER_S) else math.inf
            if time.monotonic() - beat_at - self._every_s >= due_s:
                num_written += 1
                with suppress(BrokenPipeError):
                    self._write(stacks_now(self._loop_thread)[:MAX_BYTES])

    def _write(self, text: str) -> None:
        with suppress(BlockingIOError):  # full: the daemon is suspended
            os.write(self._pipe, text.encode(errors="replace"))
