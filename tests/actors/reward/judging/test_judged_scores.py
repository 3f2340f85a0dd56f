"""Scores of judges, from the reward actor on a real bus: answers, named failures, engines that move, users' graders."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.reward.actor import RewardActor
from messages import EngineRequestsFailed
from runtime.bus.addresses import Address, address_key, engine_key
from runtime.bus.bus import Bus
from runtime.functions.hidden_files import RUN_DIR
from runtime.process.actor import InputError
from runtime.util.errors import flatten
from runtime.util.retrying import Backoff
from tests.actors.reward.test_pool import AMPLE_S
from tests.actors.reward.test_reward_actor import Asker
from tests.build.topology import topology_with
from tests.support import judging
from tests.support.judging import ScriptedJudge, completion, serving

pytestmark = pytest.mark.anyio
OWN = f"{Path(judging.__file__)}"


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.reward.judging.judge.RESEND", Backoff(first_s=0.01, max_s=0.01))


@pytest.fixture
async def asker(bus: Bus) -> AsyncGenerator[Asker]:
    async with bus.score_inbox(lambda _: None) as inbox:
        yield Asker(bus, inbox)


@asynccontextmanager
async def running(bus: Bus, judge: dict[str, Any], model: str = "m", **reward: Any) -> AsyncGenerator[RewardActor]:
    """A reward actor with the judge "digits", which has a pool of this model unless it names a URL."""
    engines = {"policy": {"kind": "tiny"}, "judge": {"kind": "tiny", "hf_checkpoint": model}}
    judges = {"digits": {"template": "{response}", "timeout_s": AMPLE_S, **judge}}
    settings = {"processes": 1, "timeout_s": AMPLE_S, "judges": judges, **reward}
    actor = RewardActor(topology_with(data=[], engines=engines, reward=settings), bus)
    async with anyio.create_task_group() as group:
        await group.start(actor.run)
        yield actor
        group.cancel_scope.cancel()


def at(judge: ScriptedJudge) -> dict[str, Any]:
    return {"url": f"{judge.url}/v1", "model": "m"}


async def place(bus: Bus, judge: ScriptedJudge) -> None:
    """Publish the address of an engine of the pool, as its node daemon does."""
    await bus.kv.put(address_key("engine", "judge", 0), Address(url=judge.url))


async def test_the_number_in_the_answer_is_the_reward(bus: Bus, asker: Asker) -> None:
    async with serving(ScriptedJudge("I say 0.5", "so 8")) as judge, running(bus, at(judge)) as actor:
        scores = await asker.scores("digits", "first", own=False)
        scores += await asker.scores("digits", "second", own=False)
        assert actor.stats()["num_judge_requests"] == 2
    assert [(score.reward, score.error, score.details) for score in scores] == [
        (0.5, None, {"judge_answer": "I say 0.5"}),
        (8.0, None, {"judge_answer": "so 8"}),
    ]
    assert [body["messages"][0]["content"] for body in judge.bodies] == ["first", "second"]


async def test_the_samples_of_a_request_are_judged_together_and_fail_apart(bus: Bus, asker: Asker) -> None:
    texts = [f"r{number}" for number in range(20)]
    async with serving(ScriptedJudge("1", "none", (400, "no"), "1")) as judge:
        async with running(bus, {**at(judge), "concurrency": 1}):  # in the order of the script
            scores = await asker.scores("digits", *texts, own=False)
    failed = [score for score in scores if score.error is not None]
    assert [score.reward for score in failed] == [None, None]
    assert {score.reward for score in scores if score.error is None} == {1.0}
    assert sorted((score.error or "").partition(":")[0] for score in failed) == ["bad_answer", "refused"]


async def test_a_cut_answer_is_no_score_for_built_in_parsers_alone(bus: Bus, asker: Asker) -> None:
    async with serving(ScriptedJudge((200, completion("1", "length")))) as judge:
        async with running(bus, at(judge)):
            (score,) = await asker.scores("digits", "r", own=False)
        async with running(bus, {**at(judge), "parser": f"{OWN}:digits"}):
            (own,) = await asker.scores("digits", "r", own=False)
    assert (score.reward, own.reward) == (None, 1 / judging.MAX_SCORE)
    assert "its answer reached max_tokens" in (score.error or "")


async def test_a_judge_that_hangs_ends_by_its_timeout_and_says_so(bus: Bus, asker: Asker) -> None:
    """The reward is missing, not 0; an event names the server, for the terminal; other graders go on."""
    async with serving(ScriptedJudge(None)) as judge, running(bus, {**at(judge), "timeout_s": 1.0, "max_tries": 2}):
        judged = await asker.ask("digits", "r", own=False)
        matched = await asker.ask("exact_match", "x", label="x")
        answers = {answer.request_id: answer for answer in [await asker.answer(), await asker.answer()]}
        (other,), answer = answers[matched].scores, answers[judged]
        async with bus.read(EngineRequestsFailed) as events:
            first = await anext(events.so_far())
    assert other.reward == 1.0
    assert answer.scores[0].reward is None
    assert (
        answer.scores[0].error == f"timeout: no answer within 1 s (timeout_s), 2 times (judge digits, {judge.url}/v1)"
    )
    assert first.message.engine == f"{judge.url}/v1 (judge digits)"
    assert first.message.reason == "timeout: no answer within 1 s (timeout_s)"


async def test_a_score_survives_an_engine_that_dies_and_moves(bus: Bus, asker: Asker) -> None:
    async with running(bus, {}) as actor:
        await asker.ask("digits", "r", own=False)
        async with serving(ScriptedJudge(None)) as gone:
            await place(bus, gone)
            with anyio.fail_after(AMPLE_S):
                while not gone.bodies:  # noqa: ASYNC110 - the server has no event for it
                    await anyio.sleep(0.01)
            assert "engines.judge: 1 answer of the judge digits" in actor.waits_for()
        async with serving(ScriptedJudge("3")) as moved:
            await place(bus, moved)
            answer = await asker.answer()
    assert (answer.scores[0].reward, answer.scores[0].error) == (3.0, None)
    assert moved.keys[-1] == f"Bearer {(await engine_key(bus.kv)).reveal()}"
    assert moved.bodies[-1]["model"] == "m"


@pytest.mark.parametrize("function", ["asks", "asks_later"])
async def test_a_users_grader_calls_the_judge_itself(function: str, bus: Bus, asker: Asker) -> None:
    async with serving(ScriptedJudge("99")) as judge:
        async with running(bus, {}, graders={"own": f"{OWN}:{function}"}):
            await asker.ask("own", "r", own=False)
            await place(bus, judge)  # its engine comes later than the call
            answer = await asker.answer()
    assert (answer.scores[0].reward, answer.scores[0].error) == (18 / judging.MAX_SCORE, None)


async def test_a_timeout_of_a_grader_names_the_judge_that_limited_the_rate_meanwhile(bus: Bus, asker: Asker) -> None:
    graders = {"own": f"{OWN}:asks"}
    async with serving(ScriptedJudge((429, "slow"))) as judge:
        async with running(bus, at(judge), graders=graders, limits={"own": {"timeout_s": 0.5}}):
            await asker.ask("digits", "r", own=False)
            with anyio.fail_after(AMPLE_S):
                while len(judge.bodies) < 2:  # noqa: ASYNC110 - the server has no event for it
                    await anyio.sleep(0.01)
            (score,) = await asker.scores("own", "r", own=False)
    assert score.cause == "timeout"
    assert score.error == "timeout: no answer within 0.5 s (timeout_s); meanwhile status 429 from the judge digits"


async def test_a_judge_that_refuses_the_first_scores_ends_the_run(bus: Bus, asker: Asker) -> None:
    async with serving(ScriptedJudge((401, "who are you"))) as judge:
        for group in range(4):
            await asker.ask("digits", "a", "b", own=False, group_id=group)
        with pytest.raises(BaseExceptionGroup) as error:
            async with running(bus, at(judge)):
                await anyio.sleep(AMPLE_S)
    (ended,) = flatten(error.value)  # and no closed stream of another task, which would hide the reason
    assert isinstance(ended, InputError)
    assert "the first 8 calls of graders in this run, for 4 prompt groups, all failed; digits: refused: status 401" in (
        str(ended)
    )


async def test_a_missing_key_ends_the_actor(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(BaseExceptionGroup) as error:
        async with running(bus, {"url": "http://h/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}):
            pass
    (ended,) = flatten(error.value)
    assert "reward.judges.digits.api_key_env = 'NO_SUCH_KEY': this variable is not set on this node" in str(ended)


async def test_a_kept_answer_costs_no_request_and_evaluation_asks_again(
    bus: Bus, asker: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    async with serving(ScriptedJudge("1", "2", "3")) as judge:
        for _ in range(2):  # the answers outlast the actor
            async with running(bus, {**at(judge), "cache_bytes": 1 << 20}):
                first = await asker.scores("digits", "same", own=False)
                again = await asker.scores("digits", "same", own=False)
            assert [score.reward for score in (*first, *again)] == [1.0, 1.0]
        async with running(bus, {**at(judge), "cache_bytes": 1 << 20}):
            (evaluated,) = await asker.scores("digits", "same", own=False, evaluation=True)
        async with running(bus, {**at(judge), "cache_bytes": 1 << 20, "cache_in_eval": True}):
            (kept,) = await asker.scores("digits", "same", own=False, evaluation=True)
    assert (evaluated.reward, kept.reward, len(judge.bodies)) == (2.0, 1.0, 2)


async def test_an_answer_without_a_score_is_not_kept(
    bus: Bus, asker: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    rewards: list[float | None] = []
    async with (
        serving(ScriptedJudge("none", "0.5", "0.7")) as judge,
        running(bus, {**at(judge), "cache_bytes": 1 << 20}),
    ):
        for _ in range(3):
            rewards += [score.reward for score in await asker.scores("digits", "same", own=False)]
    assert rewards == [None, 0.5, 0.5]


async def test_another_model_of_the_pool_has_no_kept_answers(
    bus: Bus, asker: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    rewards: list[float | None] = []
    async with serving(ScriptedJudge("0.1", "0.2")) as judge:
        await place(bus, judge)
        for model in ("m", "m", "other"):
            async with running(bus, {"cache_bytes": 1 << 20}, model):
                rewards += [score.reward for score in await asker.scores("digits", "same", own=False)]
    assert rewards == [0.1, 0.1, 0.2]


async def test_the_budget_of_a_run_outlasts_its_actor(bus: Bus, asker: Asker) -> None:
    async with serving(ScriptedJudge("1")) as judge:
        for expected in (None, "refused"):
            async with running(bus, {**at(judge), "budget_requests": 2}):
                scores = await asker.scores("digits", "first", own=False)
                scores += await asker.scores("digits", "second", own=False)
            assert [score.cause for score in scores] == [expected] * 2
    assert len(judge.bodies) == 2
