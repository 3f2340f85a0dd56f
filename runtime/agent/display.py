"""Shows lines to people, in a task of its own: who has something to show never waits for a terminal."""

import time
from collections.abc import Callable

import anyio
import anyio.to_thread
import structlog

from runtime.wording import count_of

log = structlog.get_logger()

LINES_BOUND = 1000  # waiting to be shown; what comes while a terminal stands still is counted
REWRITE_EVERY_S = 1.0  # the line that says how far a step is, on a terminal
HEARTBEAT_S = 30.0  # the same elsewhere, when nothing else was shown for so long
CLOSE_TIMEOUT_S = 1.0

Show = Callable[[str], None]


class Display:
    """A bounded queue of lines, and a line of its own for as long as nothing else is shown.

    Args:
        show: prints a line; may block.
        rewrite: prints a line in the place of the one that it printed last, on a terminal; none elsewhere.
        progress: the line that says how far everything is, as of a Unix time.
    """

    def __init__(self, show: Show, rewrite: Show | None, progress: Callable[[float], str]) -> None:
        self._print = show
        self._reprint = rewrite
        self._progress = progress
        send, receive = anyio.create_memory_object_stream[tuple[Show, str]](LINES_BOUND)
        self._lines, self._waiting = send, receive
        self._num_left_out = 0
        self._shown_at = 0.0  # on the loop's clock
        self._ended = anyio.Event()

    def show(self, text: str) -> None:
        """Have a line shown, soon; never waits."""
        if not self._put(self._print, text):
            self._num_left_out += 1

    async def run(self) -> None:
        """Show lines until closed or cancelled."""
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
        """Show what waits, unless the terminal stands still."""
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
        except Exception as error:  # noqa: BLE001 - wherever lines go and whatever is wrong there, the run goes on
            log.warning("line_not_shown", error=repr(error))
        if show is self._print:
            self._shown_at = anyio.current_time()

    def _show_what_is_left_out(self) -> None:
        if self._num_left_out and not self._waiting.statistics().current_buffer_used:
            number, self._num_left_out = self._num_left_out, 0
            self.show(f"{count_of(number, 'line')} left out here: they came faster than they could be shown")

    async def _beat(self) -> None:
        """Show how far everything is."""
        while True:
            await anyio.sleep(REWRITE_EVERY_S)
            if self._reprint is not None:
                if not self._waiting.statistics().current_buffer_used:
                    self._put(self._reprint, self._progress(time.time()))
            elif anyio.current_time() - self._shown_at >= HEARTBEAT_S:
                self.show(self._progress(time.time()))
