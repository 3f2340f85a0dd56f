"""Who takes part in a session and does nothing any more: it ends within its deadline, and says who it was and where."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from actors.rollout.sglang.client import SglangClient
from tests.support.corruptions import LAST
from tests.support.tiny_engine import running_engine
from tests.support.weight_line import ENGINE, Corruption, Halves, Sending, Transport, drawn, stuck_before

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

DEADLINE_S: Final = 3.0  # of each step
WHOLE_S: Final = 5 * DEADLINE_S  # for the trainer to be told, and at the end of the session
NUM_HANGS: Final = 20


class Hang(NamedTuple):
    """Who stands still, and when."""

    who: str  # engine, trainer
    transport: Transport
    bucket: int  # before which; one more than there are: after the last

    @property
    def says(self) -> str:
        """What is said of the engine."""
        return f"bucket {self.bucket}: " if self.bucket <= LAST else "/end_weight_update"


FEW: Final = (Hang("engine", "ipc", 1), Hang("engine", "collective", LAST + 1), Hang("trainer", "collective", 2))


def random_hangs(number: int, seed: int) -> list[Hang]:
    """A trainer stands still in a broadcast alone: in shared memory there is nothing that anybody waits in."""
    generator = random.Random(seed)
    return [
        generator.choice(
            (
                Hang("engine", "collective", generator.randrange(LAST + 2)),
                Hang("engine", "ipc", generator.randrange(LAST + 2)),
                Hang("trainer", "collective", generator.randrange(LAST + 1)),
            )
        )
        for _ in range(number)
    ]


def stopped(hang: Hang, pid: int) -> Corruption:
    """The engine's process stands still from a moment on."""

    def corrupt(sending: Sending) -> Iterator[Sending]:
        if sending.step.index == hang.bucket:
            os.kill(pid, signal.SIGSTOP)
        yield sending
        if sending.step.index == LAST and hang.bucket > LAST:
            os.kill(pid, signal.SIGSTOP)

    return lambda sending: corrupt(sending)


async def outlive(hang: Hang, model: Path, client: SglangClient) -> None:
    """It ends in time, and says who and where; another engine gets the weights afterwards."""
    with running_engine(model, "--load-format", "dummy") as engine:
        halves = Halves(client, engine.url, model, transport=hang.transport, timeout_s=DEADLINE_S)
        assert await halves.sync(drawn(model, 1)) == {}
        try:
            with ExitStack() as stack:
                is_stuck = hang.who == "trainer"
                corrupt = (
                    stack.enter_context(stuck_before(hang.bucket)) if is_stuck else stopped(hang, engine.process.pid)
                )
                failed = await halves.sync(drawn(model, 2), corrupt, within_s=WHOLE_S, ended=engine.process.kill)
        finally:
            engine.process.kill()
    assert list(failed) == [ENGINE]
    assert hang.says in failed[ENGINE]
    with running_engine(model, "--load-format", "dummy") as engine:
        halves = Halves(client, engine.url, model, transport=hang.transport)
        assert await halves.sync(drawn(model, 2)) == {}
        await halves.leave()


@pytest.mark.slow
@pytest.mark.parametrize("hang", FEW, ids=str)
async def test_a_session_ends_within_its_deadline(hang: Hang, model: Path, client: SglangClient) -> None:
    await outlive(hang, model, client)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(NUM_HANGS))
async def test_random_sessions_end_within_their_deadline(number: int, model: Path, client: SglangClient) -> None:
    await outlive(random_hangs(NUM_HANGS, seed=1)[number], model, client)


def test_random_hangs_are_of_everybody() -> None:
    hangs = random_hangs(NUM_HANGS, seed=1)
    assert {(hang.who, hang.transport) for hang in hangs} == {(hang.who, hang.transport) for hang in FEW}
    assert {hang.bucket for hang in hangs} == set(range(LAST + 2))
