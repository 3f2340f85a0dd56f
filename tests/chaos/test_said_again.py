"""Every fact of a run is stored again, later and in another order, while the run goes on: nothing changes.

What the buffer decides is left out: it is appended, at most once, and nobody else may write there.
"""

import random
from pathlib import Path

import anyio
import pytest

from messages import ActorExited, ActorStarted, Message, RunFinished
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from tests.chaos.audit import Log, audit, read_all
from tests.chaos.harness import Command, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

OF_THE_TEST = (ActorStarted, ActorExited)  # it follows processes by them
HELD_BACK = 100  # events that wait to be said again; which one comes next is drawn


async def say_again(command: Command, moments: random.Random, again: set[int]) -> None:
    """Follow the log to the end of the run, store each event again, and add the new sequence to a set."""
    waiting: list[Message] = []
    async with command.bus.read() as events:
        async for received in events:
            event = received.message
            if isinstance(event, RunFinished):
                return
            if received.seq in again or event.topic.startswith("ledger.") or isinstance(event, OF_THE_TEST):
                continue
            waiting.append(event)
            if len(waiting) > HELD_BACK:
                again.add(await command.bus.publish(waiting.pop(moments.randrange(len(waiting)))))
    raise AssertionError("the log ended")


async def test_events_that_are_stored_again_late_and_in_disorder_change_nothing(tmp_path: Path) -> None:
    """One step off, where more is under way at a time than in a synchronous run."""
    run = Run(tmp_path, num_steps=12, overrides=("rollout.max_staleness=1",))
    moments = moments_of("said again 1")
    again: set[int] = set()

    async with run.started() as command, anyio.create_task_group() as group:
        group.start_soon(say_again, command, moments, again)
        await command.log.until_trained(4)
        command.log.kill("buffer")  # who folds it all from its beginning
        await command.log.until_trained(8)
        command.log.kill("trainer")
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
        group.cancel_scope.cancel()  # its bus may have ended before it came to the end of the log
    assert len(again) > HELD_BACK
    await audit(run, killed=["buffer", "trainer"], ordered=False, repeats=sorted(again))
    async with run.reopened() as bus:
        log = await read_all(bus, run)
    assert folded(log, set()) == folded(log, again)


def folded(log: Log, left_out: set[int]) -> LedgerState:
    """What the log folds to without some of its events; where it ends is not compared."""
    state = LedgerState()
    for seq, event in log:
        if isinstance(event, LEDGER_EVENTS) and seq not in left_out:
            fold(state, event, seq)
    state.last_seq = 0
    return state
