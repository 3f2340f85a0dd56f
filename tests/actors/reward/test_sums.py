"""Weighted sums of graders: values, details and failures of parts, and sums of a reward actor on a real bus."""

from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.reward.actor import RewardActor
from actors.reward.grader_check import SampleRow, check_graders
from actors.reward.grades import Graded, GraderSpec, unpacked
from actors.reward.gradings import sum_of, summed
from actors.reward.recipe import graders_of
from actors.rollout.samples.failures import FailurePolicy
from actors.rollout.samples.sample import OpenSample
from messages import Int32Array, Prompt, SampleStatus, Score, UserFunctionRaised
from runtime.bus.bus import Bus
from runtime.settings.rules.topology import topology_problems
from runtime.settings.topology import grader_names, own_graders
from tests.actors.reward.test_reward_actor import USER_CODE, Asker
from tests.build.topology import topology_with
from tests.support.checks import context_of
from tests.support.judging import ScriptedJudge, serving

pytestmark = pytest.mark.anyio

WEIGHTS = {"f1": 0.25, "digits": -2.0}


def test_the_parts_of_a_sum_are_the_named_rewards_that_gdpo_trains() -> None:
    gdpo = {"normalize_advantages": True, "estimator": {"type": "gdpo", "reward_keys": tuple(WEIGHTS)}}
    data = [{"name": "d", "path": "p", "rm_type": "total"}]
    reward = {"sums": {"total": WEIGHTS}, "graders": {"digits": "m.py:f"}, "reward_key": "f1"}
    topology = topology_with(data=data, reward=reward, algorithm=gdpo)
    assert list(topology_problems(topology)) == []
    graded = sum_of("total", WEIGHTS, {"f1": Graded(reward=1.0), "digits": Graded(reward=0.25)})
    sample = OpenSample(index=0, prompt_len=1, status=SampleStatus.COMPLETED)
    score = Score(index=0, reward=graded.reward, details=graded.details)
    sample.take_score(score, policy=FailurePolicy(), reward_keys=tuple(WEIGHTS))
    assert (sample.reward, sample.rewards) == (-0.25, {"f1": 1.0, "digits": 0.25})


def test_the_check_tries_the_functions_of_a_sum() -> None:
    reward = {"graders": {"own": f"{USER_CODE}:full"}, "sums": {"total": {"f1": 1.0, "own": 0.5}}}
    topology = topology_with(data=[{"name": "d", "path": "p", "rm_type": "total"}], reward=reward)
    prompt = Prompt(data="d", row=3, text="p", prompt_ids=Int32Array([1]), rm_type="total", label="1")
    (problem,) = check_graders(context_of(topology), {"data.0": SampleRow(prompt, group=False)})
    assert "user_graders.py:full" in str(problem)


def test_only_the_first_process_of_the_check_imports_all_graders(tmp_path: Path) -> None:
    # An import of 10 s cost 10 s for each data source, also for those with other graders.
    imports = tmp_path / "imports.txt"
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            f"with open({str(imports)!r}, 'a') as file:\n    print({name!r}, file=file)\n"
            "def grade(sample):\n    return 0.0\n"
        )
    data = [{"name": name, "path": "p", "rm_type": f"{tmp_path}/{name}.py:grade"} for name in ("one", "two")]
    topology = topology_with(data=data, reward={"sandbox": "none"})
    rows = {
        f"data.{number}": SampleRow(
            Prompt(data=source["name"], row=0, text="p", prompt_ids=Int32Array([1]), rm_type=source["rm_type"]), False
        )
        for number, source in enumerate(data)
    }
    context = context_of(topology)
    assert (list(check_graders(context, rows)), context.notes) == ([], [])
    assert sorted(imports.read_text().split()) == ["one", "two", "two"]


def test_a_sum_adds_rewards_per_token_and_puts_a_single_reward_on_the_last_token() -> None:
    per_token = Graded(reward=3.0, token_rewards=array("f", [1, 2, 0]).tobytes())
    found = sum_of("total", WEIGHTS, {"f1": per_token, "digits": Graded(reward=0.5)})
    assert found.reward == -0.25
    assert list(unpacked(found.token_rewards or b"")) == [0.25, 0.5, -1.0]


@pytest.fixture
async def asker(bus: Bus) -> AsyncGenerator[Asker]:
    async with bus.score_inbox(lambda _: None) as inbox:
        yield Asker(bus, inbox)


@asynccontextmanager
async def running(bus: Bus, judge: ScriptedJudge, weights: dict[str, float]) -> AsyncGenerator[RewardActor]:
    """A reward actor with the sum "total"; its parts may be built-in graders, "told" and "digits"."""
    reward: dict[str, Any] = {
        "processes": 1,
        "judges": {"digits": {"template": "{response}", "url": f"{judge.url}/v1", "model": "m", "max_tries": 1}},
        "graders": {"told": f"{USER_CODE}:told", "raises": f"{USER_CODE}:as_told"},
        "sums": {"total": weights},
    }
    engines = {"policy": {"kind": "tiny"}}
    actor = RewardActor(topology_with(data=[], engines=engines, reward=reward), bus)
    async with anyio.create_task_group() as group:
        await group.start(actor.run)
        yield actor
        group.cancel_scope.cancel()


def test_the_reward_is_the_weighted_sum_and_the_details_hold_the_parts() -> None:
    parts = {
        "f1": Graded(reward=0.5, took_s=1.0),
        "digits": Graded(reward=3.0, details={"judge_answer": "3"}, took_s=2.0),
    }
    assert sum_of("total", WEIGHTS, parts) == Graded(
        reward=-5.875, details={"f1": 0.5, "digits": 3.0, "digits.judge_answer": "3"}, took_s=3.0
    )


def test_the_first_failed_part_in_the_order_of_the_weights_fails_the_sum_with_its_cause() -> None:
    late, busy = Graded(error="timeout", cause="timeout"), Graded(error="failed: busy", cause="rate_limited")
    weights = {"a": 1.0, "b": 0.0, "c": 1.0}
    found = sum_of("total", weights, {"c": late, "b": busy, "a": Graded(reward=2.0)})
    assert (found.reward, found.cause, found.details) == (None, "rate_limited", {"a": 2.0})
    assert found.error == "failed: busy (part b of reward.sums.total)"


def test_a_sum_that_is_not_finite_is_a_bad_answer() -> None:
    huge = {"a": Graded(reward=1e308), "b": Graded(reward=-1e308)}
    for weights, problem in (
        ({"a": 10.0}, "inf, not a finite number"),
        ({"a": 10.0, "b": 10.0}, "nan, not a finite number"),
        ({"a": 1.0}, "1e+308, beyond the 1e+15 that a reward may be"),
    ):
        found = sum_of("total", weights, huge)
        assert (found.reward, found.cause, found.error) == (None, "bad_answer", f"reward.sums.total is {problem}")


async def test_parts_run_together_and_answers_stay_with_their_samples() -> None:
    begun = {"a": anyio.Event(), "b": anyio.Event()}

    async def grade_by(part: str) -> Sequence[Graded]:
        begun[part].set()
        await begun["b" if part == "a" else "a"].wait()
        return [Graded(reward=number) for number in ((1.0, 2.0) if part == "a" else (10.0, 20.0))]

    with anyio.fail_after(200):
        grades = await summed("total", {"a": 1.0, "b": 0.5}, grade_by)
    assert [graded.reward for graded in grades] == [6.0, 12.0]


async def test_a_sum_of_a_built_in_grader_a_function_and_a_judge(bus: Bus, asker: Asker) -> None:
    weights = {"positional_match": 1.0, "told": 0.5, "digits": 0.25}
    async with serving(ScriptedJudge("8")) as judge, running(bus, judge, weights):
        (score,) = await asker.scores("total", "wait 0", label="wait 1", own=False)
    assert score.error is None
    assert score.reward == pytest.approx(5 / 6 + 0.5 + 2.0)
    assert score.details == {
        "positional_match": pytest.approx(5 / 6),
        "told": 1.0,
        "digits": 8.0,
        "digits.judge_answer": "8",
    }


async def test_of_a_sum_the_traceback_of_the_part_is_published_and_not_that_of_a_judge(bus: Bus, asker: Asker) -> None:
    async with serving(ScriptedJudge("none")) as judge, running(bus, judge, {"digits": 1.0, "raises": 1.0}):
        await asker.scores("total", "raise", own=False)
    async with bus.read(UserFunctionRaised) as events:
        first, second = await events.next(timeout_s=30), await events.next(timeout_s=0.1)
    assert first is not None
    assert (first.message.function, second) == (f"{USER_CODE}:as_told", None)


async def test_a_failed_part_fails_only_its_samples(bus: Bus, asker: Asker) -> None:
    async with serving(ScriptedJudge("1", "none")) as judge, running(bus, judge, {"exact_match": 1.0, "digits": 1.0}):
        (good,) = await asker.scores("total", "a", label="a", own=False)
        (bad,) = await asker.scores("total", "b", label="b", own=False)
    assert (good.reward, bad.reward, bad.cause) == (2.0, None, "bad_answer")
    assert (bad.error or "").endswith("(part digits of reward.sums.total)")
    assert bad.details == {"exact_match": 1.0, "digits.judge_answer": "none"}


def test_parts_are_started_with_the_grader_processes_and_sums_have_a_queue() -> None:
    reward = {"graders": {"mine": "m.py:f"}, "sums": {"total": {"f1": 1.0, "mine": 1.0}}, "group_rm": True}
    data = [{"name": "d", "path": "p", "rm_type": "total"}]
    evals = [{"name": "e", "path": "p", "rm_type": "total", "interval": 1}]
    topology = topology_with(data=data, eval=evals, reward=reward)
    assert own_graders(topology) == {"mine": "m.py:f", "f1": "f1"}
    assert set(grader_names(topology)) == {"mine", "f1", "total"}
    expected = {GraderSpec(name=name, group=group) for name in ("f1", "m.py:f") for group in (True, False)}
    assert set(graders_of(topology)) == expected
