"""Calls that run together in a process of users' code, with a keeper and without one; no graders."""

from collections import deque

import anyio
import pytest

from runtime.functions.child import Child
from runtime.functions.frames import ANSWERED, LATE, RAISED, FrameError
from runtime.functions.limits import UserLimits
from runtime.functions.sandbox import Sandbox
from runtime.functions.together import TICK_S, CallsTogether
from runtime.util.running_time import RunningTime

pytestmark = pytest.mark.anyio
WORDS = ("tests.runtime.functions.waiting:answering",)
ALL_S = 50.0


class OneCall:
    """A call that keeps how it ended."""

    def __init__(self, text: str, timeout_s: float = ALL_S) -> None:
        self.text, self.timeout_s, self.abandoned = text, timeout_s, False
        self.ended: tuple[bytes, bytes] | str | None = None

    @property
    def is_done(self) -> bool:
        return self.ended is not None

    async def wait(self) -> None:
        raise AssertionError("none of these calls is a suspect")

    def payload(self) -> bytes:
        return self.text.encode()

    def end(self, kind: bytes, content: bytes) -> None:
        self.ended = kind, content

    def refuse(self, error: FrameError) -> None:
        self.ended = "too large"


@pytest.mark.parametrize("limits", [UserLimits(), Sandbox()], ids=["plain", "kept"])
async def test_calls_run_together_and_end_in_any_order(limits: UserLimits) -> None:
    calls = [OneCall("forever", 0.2), OneCall("raise"), OneCall("x" * 2000), OneCall("abc")]
    child = await Child.open(WORDS, limits, hello=b"olleh")
    assert child.greeting == b"hello"
    left, ended = deque(calls), anyio.create_memory_object_stream[OneCall](len(calls))

    async def none() -> list[OneCall]:
        await anyio.sleep_forever()
        return []

    running = RunningTime(anyio.current_time, TICK_S)
    together = CallsTogether(
        child, none, ended[0].send_nowait, at_once=4, max_frame_bytes=1000, running=running, left=left, suspects=deque()
    )
    with anyio.fail_after(ALL_S), ended[0], ended[1]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(together.run)
            for _ in calls:
                await ended[1].receive()
            tasks.cancel_scope.cancel()
    late, raised, large, done = (call.ended for call in calls)
    assert (late, large, done) == ((LATE, b""), "too large", (ANSWERED, b"ABC"))
    assert raised is not None
    assert (raised[0], raised[1][:20]) == (RAISED, b"KeyError('as told')\0")


def test_time_in_which_a_process_is_suspended_is_lost_time() -> None:
    times = iter((0.0, 1.1, 1.1, 5.1, 5.1, 5.1, 6.0))  # a tick is due at 1, at 2.1 and at 6.1
    running = RunningTime(lambda: next(times), 1.0)
    lost_s = [running.lost_s]
    for _ in range(2):
        running.tick()
        lost_s.append(running.lost_s)
    assert lost_s == pytest.approx([0.0, 3.0, 3.0])
