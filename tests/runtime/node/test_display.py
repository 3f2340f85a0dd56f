"""Lines for people: a bound, a heartbeat, and nobody who waits."""

import threading

import anyio
import pytest

from runtime.node import display
from runtime.node.display import Display

pytestmark = pytest.mark.anyio


class Printed:
    """Lines that were printed, and a way to wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._more:
            self.lines.append(text)
            self._more.notify_all()

    def wait_for(self, number: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.lines) >= number, timeout=10)


async def test_a_long_silence_has_a_heartbeat() -> None:
    printed = Printed()
    shown = Display(printed, None, lambda now: f"0 of 16 groups at {now > 0}", rewrite_every_s=0.01, heartbeat_s=0.05)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shown.run)
        shown.show("first")
        await anyio.to_thread.run_sync(printed.wait_for, 3)
        await shown.close()
    assert printed.lines[:3] == ["first", "0 of 16 groups at True", "0 of 16 groups at True"]


async def test_on_a_terminal_the_line_is_rewritten_and_needs_no_heartbeat() -> None:
    printed, rewritten = Printed(), Printed()
    shown = Display(printed, rewritten, lambda now: "12 of 16 groups", rewrite_every_s=0.01, heartbeat_s=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shown.run)
        await anyio.to_thread.run_sync(rewritten.wait_for, 3)
        await shown.close()
    assert set(rewritten.lines) == {"12 of 16 groups"}
    assert printed.lines == []


async def test_lines_that_come_too_fast_are_counted() -> None:
    printed = Printed()
    shown = Display(printed, None, lambda now: "")
    for number in range(display.LINES_BOUND + 7):
        shown.show(f"line {number}")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shown.run)
        await anyio.to_thread.run_sync(printed.wait_for, display.LINES_BOUND + 1)
        await shown.close()
    assert printed.lines[-1] == "7 lines left out here: they came faster than they could be shown"
