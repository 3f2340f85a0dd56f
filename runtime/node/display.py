"""Prints lines in a background task, so that no caller waits for a terminal."""

import time
from collections.abc import Callable

import anyio
import anyio.to_thread
import structlog

from runtime.util.formatting import count_of

log = structlog.get_logger()

LINES_BOUND = 1000  # queued lines; while a terminal is blocked, further lines are only counted
REWRITE_EVERY_S = 1.0  # interval of the progress line on a terminal
HEARTBEAT_S = 30.0  # the same elsewhere, after this time without another line
CLOSE_TIMEOUT_S = 1.0

Show = Callable[[str], None]


class Display:
    """A bounded queue of lines, with a progress line while nothing else is printed.

    Args:
        show: prints a line; may block.
        rewrite: replaces the line that it printed last, on a terminal; none elsewhere.
        progress: returns the progress line for a Unix time.
        rewrite_every_s: seconds between progress lines on a terminal.
        heartbeat_s: seconds without another line after which the progress line is printed elsewhere.
    """

    def __init__(
        self,
        show: Show,
        rewrite: Show | None,
        progress: Callable[[float], str],
        *,
        rewrite_every_s: float = REWRITE_EVERY_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._print = show
        self._reprint = rewrite
        self._progress = progress
        self._rewrite_every_s = rewrite_every_s
        self._heartbeat_s = heartbeat_s
        send, receive = anyio.create_memory_object_stream[tuple[Show, str]](LINES_BOUND)
        self._lines, self._waiting = send, receive
        self._num_left_out = 0
        self._shown_at = 0.0  # on the event loop's clock
        self._ended = anyio.Event()

    def show(self, text: str) -> None:
        """Queue a line; never block."""
        if not self._put(self._print, text):
            self._num_left_out += 1

    async def run(self) -> None:
        """Print lines until closed or cancelled."""
        self._shown_at = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._beat)
            async with self._waiting:
                async for show, text in self._waiting:
                    await self._show(show, text)
                    self._show_what_is_left_out()
            tasks.cancel_scope.cancel()
        self._ended.set()

    async def close(self) -> None:
        """Print the queued lines, unless the terminal is blocked."""
        self._lines.close()
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await self._ended.wait()

    def _put(self, show: Show, text: str) -> bool:
        try:
            self._lines.send_nowait((show, text))
        except anyio.WouldBlock:
            return False
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # at the very end
            return True
        return True

    async def _show(self, show: Show, text: str) -> None:
        try:
            await anyio.to_thread.run_sync(show, text, abandon_on_cancel=True)
        except Exception as error:  # noqa: BLE001 - an output error must not end the run
            log.warning("line_not_shown", error=repr(error))
        if show is self._print:
            self._shown_at = anyio.current_time()

    def _show_what_is_left_out(self) -> None:
        if self._num_left_out and not self._waiting.statistics().current_buffer_used:
            number, self._num_left_out = self._num_left_out, 0
            self.show(f"{count_of(number, 'line')} left out here: they came faster than they could be shown")

    async def _beat(self) -> None:
        """Print the progress line at intervals."""
        while True:
            await anyio.sleep(self._rewrite_every_s)
            if self._reprint is not None:
                if not self._waiting.statistics().current_buffer_used:
                    self._put(self._reprint, self._progress(time.time()))
            elif anyio.current_time() - self._shown_at >= self._heartbeat_s:
                self.show(self._progress(time.time()))
