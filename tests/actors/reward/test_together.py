"""Calls of async functions run together in grader processes: what one does, the others do not notice."""

import os
import signal
import time
from typing import Any

import anyio
import pytest

from actors.reward.frames import Graded, GraderSpec
from actors.reward.gradings import CallLimits, RateLimit
from actors.reward.pool import GraderPool
from actors.reward.samples import GradedSample
from tests.actors.reward.test_pool import LENGTH, USER_CODE, pool_of

pytestmark = pytest.mark.anyio

TOLD = GraderSpec(name=f"{USER_CODE}:told")
RANK = GraderSpec(name=f"{USER_CODE}:rank_together", group=True)


def together(num_processes: int = 1, **options: Any):
    return pool_of(num_processes, graders=(TOLD, RANK, LENGTH), reward_key="score", **{"timeout_s": 5, **options})


async def tell(pool: GraderPool, *commands: str, limits: CallLimits | None = None) -> list[Graded]:
    with anyio.fail_after(20):
        return await pool.grade(TOLD, [GradedSample(response=command) for command in commands], limits)


def summary(grades: list[Graded]) -> list[float | str | None]:
    return [graded.reward if graded.error is None else graded.cause for graded in grades]


async def test_calls_of_an_async_function_run_together_in_one_process() -> None:
    async with together() as pool:
        await tell(pool, "fine")
        start = time.perf_counter()
        grades = await tell(pool, *["wait 0.2"] * 60)
        took_s = time.perf_counter() - start
    assert summary(grades) == [1.0] * 60
    assert took_s < 4  # one after another: 12 s
    assert all(0.2 <= graded.took_s < 4 for graded in grades)


async def test_no_more_calls_run_together_than_the_recipe_allows() -> None:
    async with together(bounds={"at_once": 2}) as pool:
        await tell(pool, "fine")
        start = time.perf_counter()
        await tell(pool, *["wait 0.1"] * 6)
        took_s = time.perf_counter() - start
        assert pool.calls_at_once(TOLD) == 2
    assert took_s >= 0.3


async def test_a_group_function_may_be_async_and_plain_functions_run_beside() -> None:
    async with together() as pool:
        ranked = await pool.grade(RANK, [GradedSample(response=text) for text in ("a", "abc")])
        plain = await pool.grade(LENGTH, [GradedSample(response="abc")])
    assert summary([*ranked, *plain]) == [0.0, 1.0, 3.0]


async def test_each_failure_has_its_cause_and_costs_no_process() -> None:
    async with together(timeout_s=0.3) as pool:
        grades = await tell(pool, "raise", "nan", "text", "none", "dict", "never", "cancel", "exit", "wait 0")
        assert pool.stats()["num_deaths"] == 0
        assert pool.stats()["num_bad_answer_scores"] == 4
    bad = ["bad_answer"] * 4
    assert summary(grades) == ["raised", *bad, "timeout", "raised", "raised", 1.0]


@pytest.mark.parametrize("command", ["block", "swallow"])
async def test_a_call_that_cannot_be_stopped_ends_its_process_and_no_other_call(command: str) -> None:
    async with together(timeout_s=1.5) as pool:
        grades = await tell(pool, *["wait 0.1"] * 5, command, *["wait 1.2"] * 5)
    assert summary(grades) == [1.0] * 5 + ["timeout"] + [1.0] * 5


async def test_of_calls_that_die_together_the_one_to_blame_is_found() -> None:
    async with together(max_tries=2) as pool:
        grades = await tell(pool, "wait 0.2", "die", "wait 0.2")
        assert pool.stats()["num_deaths"] == 4  # three together, two together, twice alone
    assert summary(grades) == [1.0, "sandbox_lost", 1.0]
    assert grades[1].error == "the grader process exited with code 7, 2 times"


async def test_a_call_that_blocks_in_a_task_of_its_own_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.reward.together.GRACE_S", 0.5)
    async with together(timeout_s=0.5) as pool:
        grades = await tell(pool, "wait 0.1", "block_child")
    assert summary(grades) == [1.0, "timeout"]


async def test_a_killed_process_costs_no_score() -> None:
    async with together() as pool:
        (pid,) = await tell(pool, "pid")
        grades: list[Graded] = []

        async def ask() -> None:
            grades.extend(await tell(pool, *["wait 0.3"] * 10))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.1)
            os.kill(int(pid.reward or 0), signal.SIGKILL)
    assert summary(grades) == [1.0] * 10


async def test_a_suspended_process_loses_no_time_of_its_calls() -> None:
    async with together(timeout_s=0.8) as pool:
        (pid,) = await tell(pool, "pid")
        grades: list[Graded] = []

        async def ask() -> None:
            grades.extend(await tell(pool, "wait 0.5"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.1)
            os.kill(int(pid.reward or 0), signal.SIGSTOP)
            await anyio.sleep(1.5)  # the suspension itself
            os.kill(int(pid.reward or 0), signal.SIGCONT)
    assert summary(grades) == [1.0]


async def test_a_grader_has_its_own_timeout_and_rate() -> None:
    async with together() as pool:
        await tell(pool, "fine")
        slow = await tell(pool, "wait 1", limits=CallLimits(timeout_s=0.2))
        start = time.perf_counter()
        grades = await tell(pool, *["fine"] * 6, limits=CallLimits(rate=RateLimit(20)))
        took_s = time.perf_counter() - start
    assert summary(slow) == ["timeout"]
    assert summary(grades) == [1.0] * 6
    assert took_s >= 0.25


async def test_a_score_nobody_waits_for_is_not_graded() -> None:
    async with together(bounds={"at_once": 1}) as pool, anyio.create_task_group() as tasks:
        await tell(pool, "fine")
        tasks.start_soon(lambda: tell(pool, "wait 0.3"))
        await anyio.sleep(0.1)
        with anyio.move_on_after(0.05):
            await tell(pool, *["fine"] * 5)
        await tell(pool, "fine")
        assert pool.stats()["num_scores"] == 3
