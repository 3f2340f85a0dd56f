"""An async grader calls an HTTP judge: each failure has its cause, and no other score waits for it."""

import sys
from collections.abc import AsyncGenerator

import anyio
import pytest

from actors.reward.frames import GraderSpec
from actors.reward.gradings import CallLimits
from actors.reward.pool import GraderPool
from actors.reward.samples import GradedSample
from actors.reward.sandbox import Sandbox
from tests.actors.reward.test_pool import pool_of
from tests.support import http_judged

pytestmark = pytest.mark.anyio
JUDGED = GraderSpec(name=f"{http_judged.__file__}:judged")
CAUSES = {
    "hang": "timeout",
    "429": "rate_limited",
    "400": "refused",
    "nonsense": "bad_answer",
    "null": "bad_answer",
    "html": "raised",
    "dies": "worker_lost",
}
NUM_FINE = 40


@pytest.fixture
async def pool() -> AsyncGenerator[GraderPool]:
    command = [sys.executable, http_judged.__file__, "0.1"]
    async with await anyio.open_process(command, stderr=None) as judge:
        assert judge.stdout is not None
        with anyio.fail_after(20):
            url = f"http://127.0.0.1:{int(await judge.stdout.receive())}/"
        async with pool_of(graders=(JUDGED,), sandbox=Sandbox(also={http_judged.URL: url})) as opened:
            await opened.grade(JUDGED, [GradedSample()], CallLimits(timeout_s=20))
            yield opened
        judge.kill()


async def test_each_failure_of_the_judge_has_its_cause_and_nothing_waits_or_is_lost(pool: GraderPool) -> None:
    took_s: list[float] = []

    async def fine() -> None:
        (graded,) = await pool.grade(JUDGED, [GradedSample(response="fine")], CallLimits(timeout_s=20))
        assert (graded.reward, graded.error) == (1.0, None)
        took_s.append(graded.took_s)

    hanging = [GradedSample(response=command) for command in CAUSES] * 5
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for _ in range(NUM_FINE):
                tasks.start_soon(fine)
            grades = await pool.grade(JUDGED, hanging, CallLimits(timeout_s=8))
    assert [graded.cause for graded in grades] == [*CAUSES.values()] * 5
    assert len(took_s) == NUM_FINE
    assert max(took_s) < 8  # none waited until the hanging calls ended
    stats = pool.stats()
    assert (stats["num_deaths"], stats["num_timeout_scores"], stats["num_worker_lost_scores"]) == (0, 5, 5)
