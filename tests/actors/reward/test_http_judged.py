"""An async grader calls an HTTP judge: each failure has its cause, and no other score waits for it."""

import sys
from collections.abc import AsyncGenerator

import anyio
import pytest

from actors.reward.grades import Graded, GraderSpec
from actors.reward.gradings import CallLimits
from actors.reward.pool import GraderPool
from actors.reward.samples import GradedSample
from runtime.functions.sandbox import Sandbox
from tests.actors.reward.test_pool import AMPLE_S, pool_of
from tests.support import http_judged

pytestmark = pytest.mark.anyio
JUDGED = GraderSpec(name=f"{http_judged.__file__}:judged")
CAUSES = {
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
        with anyio.fail_after(AMPLE_S):
            url = f"http://127.0.0.1:{int(await judge.stdout.receive())}/"
        async with pool_of(graders=(JUDGED,), sandbox=Sandbox(also={http_judged.URL: url})) as opened:
            await opened.grade(JUDGED, [GradedSample()])
            yield opened
        judge.kill()


async def test_each_failure_of_the_judge_has_its_cause_and_nothing_waits_or_is_lost(pool: GraderPool) -> None:
    num_fine, late = 0, list[Graded]()

    async def fine() -> None:
        nonlocal num_fine
        (graded,) = await pool.grade(JUDGED, [GradedSample(response="fine")])
        assert (graded.reward, graded.error) == (1.0, None)
        num_fine += 1

    async def hang(limits: CallLimits | None = None) -> None:
        late.extend(await pool.grade(JUDGED, [GradedSample(response="hang")] * 5, limits))

    with anyio.fail_after(AMPLE_S):
        async with anyio.create_task_group() as hanging:
            hanging.start_soon(hang)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hang, CallLimits(timeout_s=1.0))
                for _ in range(NUM_FINE):
                    tasks.start_soon(fine)
                grades = await pool.grade(JUDGED, [GradedSample(response=command) for command in CAUSES] * 5)
            hanging.cancel_scope.cancel()  # none has waited for these calls
    assert [graded.cause for graded in late] == ["timeout"] * 5
    assert [graded.cause for graded in grades] == [*CAUSES.values()] * 5
    assert num_fine == NUM_FINE
    stats = pool.stats()
    assert (stats["num_deaths"], stats["num_timeout_scores"], stats["num_worker_lost_scores"]) == (0, 5, 5)
