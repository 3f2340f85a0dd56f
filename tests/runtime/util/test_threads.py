"""Abandoned threads keep their places, and give them back."""

import threading

import anyio
import pytest

from runtime.util.threads import BoundedThreads

pytestmark = pytest.mark.anyio


async def test_a_call_returns_its_result_or_its_error() -> None:
    threads = BoundedThreads(1)
    assert await threads.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 8) == 8


async def test_abandoned_calls_are_bounded_and_give_their_places_back() -> None:
    threads, gate, started = BoundedThreads(2), threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        started.release()
        gate.wait(20)

    try:
        for _ in range(5):
            with anyio.move_on_after(0.1) as waited:
                await threads.run(hang)
            assert waited.cancelled_caught
        assert [started.acquire(blocking=False) for _ in range(3)] == [True, True, False]
    finally:
        gate.set()
    with anyio.fail_after(10):
        assert await threads.run(lambda: "free again") == "free again"
        assert await threads.run(lambda: "and again") == "and again"


async def test_a_caller_that_is_cancelled_before_its_thread_began_leaves_its_place() -> None:
    threads = BoundedThreads(1)
    for _ in range(3):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await threads.run(lambda: None)
    with anyio.fail_after(200):
        assert await threads.run(lambda: "free") == "free"


def test_a_call_that_outlives_the_event_loop_ends_quietly() -> None:
    gate, ended = threading.Event(), threading.Event()

    def hang() -> None:
        gate.wait(20)
        ended.set()

    async def abandon() -> None:
        with anyio.move_on_after(0.1):
            await BoundedThreads(1).run(hang)

    anyio.run(abandon)
    gate.set()
    assert ended.wait(10)
