"""Requests to a judge: what is sent again by which cause, and what the error says."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from actors.reward.judging.budget import Budget, Spent, open_budgets
from actors.reward.judging.gateway import KEY_VARIABLE, URL_VARIABLE, gateway
from actors.reward.judging.judge import Judge, JudgeLimits
from actors.reward.judging.requests import JudgeAnswer, JudgeError
from actors.reward.judging.servers import JudgeServer, JudgeServers
from runtime.bus.bus import Bus
from runtime.settings.tables.reward import JudgeConfig
from runtime.util.retrying import Backoff
from runtime.util.secrets import Secret
from tests.support.judging import ScriptedJudge, completion, serving

pytestmark = pytest.mark.anyio
KEY = "sk-very-secret"
AMPLE_S = 50.0  # the limit of an answer that must not be late, even on a machine that stands still for some seconds
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 3}


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.reward.judging.judge.RESEND", Backoff(first_s=0.01, max_s=0.01))


@asynccontextmanager
async def judge_of(*servers: JudgeServer, is_pool: bool = False, **limits: float) -> AsyncGenerator[Judge]:
    known = JudgeServers("engines.judge", is_pool=is_pool)
    for server in servers:
        known.add(server)
    wanted: dict[str, Any] = {"timeout_s": AMPLE_S, "max_tries": 3, "at_once": 8, **limits}
    reports: list[tuple[str, str, int]] = []
    async with aiohttp.ClientSession() as session:
        judge = Judge("strict", known, JudgeLimits(**wanted), session, lambda *one: reports.append(one))
        judge.reports = reports  # type: ignore[attr-defined]
        yield judge


def server_at(judge: ScriptedJudge, name: str = "u", **options: Any) -> JudgeServer:
    return JudgeServer(name, f"{judge.url}/v1", "m", Secret(KEY), **options)


async def test_a_request_has_the_model_and_the_key_of_its_server() -> None:
    async with serving(ScriptedJudge("7")) as scripted, judge_of(server_at(scripted)) as judge:
        answer = await judge.ask(BODY)
    assert (answer.text, answer.truncated) == ("7", False)
    assert scripted.bodies == [{**BODY, "model": "m"}]
    assert scripted.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize("first", [(429, "slow"), (503, "busy"), (200, {"odd": 1})])
async def test_a_busy_or_odd_server_is_asked_again(first: tuple[int, Any]) -> None:
    async with serving(ScriptedJudge(first, first, "7")) as scripted, judge_of(server_at(scripted)) as judge:
        assert (await judge.ask(BODY)).text == "7"
    assert len(scripted.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "cause", "number"),
    [
        ((500, "broken"), "failed: status 500", 3),
        ((200, {}), "bad_answer: no chat completion", 3),
        ((400, "no"), "refused: status 400", 1),
        ((302, "elsewhere"), "refused: status 302", 1),
        (None, r"timeout: no answer within 0\.2 s \(timeout_s\)", 3),
    ],
)
async def test_the_last_failure_names_cause_judge_and_server(reply: Any, cause: str, number: int) -> None:
    timeout_s = 0.2 if reply is None else AMPLE_S
    async with serving(ScriptedJudge(reply)) as scripted, judge_of(server_at(scripted), timeout_s=timeout_s) as judge:
        with pytest.raises(JudgeError, match=f"^{cause}.*\\(judge strict, u\\)$") as error:
            await judge.ask(BODY)
        assert judge.waits_for() == ""
    assert judge.counts["requests"] == number
    if reply is not None:  # on a busy machine a request may be given up before the server has read it
        assert len(scripted.bodies) == number
    assert ("3 times" in str(error.value)) == (number == 3)
    reports: list[tuple[str, str, int]] = judge.reports  # type: ignore[attr-defined]
    assert [(name, count) for name, _, count in reports] == [("u (judge strict)", n) for n in (1, 2)[:number]]


class BusyJudge(ScriptedJudge):
    """Says when it wants the next request: as a date, which has no fractions of a second, or in seconds."""

    def __init__(self, *, is_date: bool) -> None:
        super().__init__((429, ""), "7")
        self.is_date = is_date

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers = {"Retry-After": formatdate(time.time() + 2, usegmt=True) if self.is_date else "0.3"}
        return await super().answer(request)


@pytest.mark.parametrize("is_date", [False, True])
async def test_the_server_says_when_it_wants_the_next_request(is_date: bool) -> None:
    async with serving(BusyJudge(is_date=is_date)) as scripted, judge_of(server_at(scripted)) as judge:
        began = anyio.current_time()
        await judge.ask(BODY)
        assert anyio.current_time() - began >= 0.3


async def test_no_error_shows_the_key_that_a_server_repeats() -> None:
    scripted = ScriptedJudge((401, f"wrong key {KEY}"))
    async with serving(scripted), judge_of(server_at(scripted)) as judge:
        with pytest.raises(JudgeError) as error:
            await judge.ask(BODY)
    assert KEY not in str(error.value)
    assert r"wrong key \*\*\*".replace("\\", "") in str(error.value)


async def test_no_error_shows_the_key_that_a_server_repeats_in_place_of_http() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"no HTTP: {KEY}\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        async with judge_of(JudgeServer("u", url, "m", Secret(KEY)), max_tries=1) as judge:
            with pytest.raises(JudgeError) as error:
                await judge.ask(BODY)
    assert KEY not in str(error.value)
    assert "no HTTP: ***" in str(error.value)


async def test_a_url_that_nobody_listens_on_costs_tries() -> None:
    async with serving(ScriptedJudge("7")) as scripted:
        server = server_at(scripted)
    async with judge_of(server) as judge:
        with pytest.raises(JudgeError, match=r"^unreachable: .*3 times"):
            await judge.ask(BODY)


async def test_an_engine_that_ends_and_moves_costs_no_try() -> None:
    """The request is lost with the first engine more often than max_tries, and answered by its successor."""
    known = JudgeServers("engines.judge", is_pool=True)
    found: list[str] = []
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        judge = Judge("strict", known, JudgeLimits(AMPLE_S, 1, 8), session)

        async def ask() -> None:
            found.append((await judge.ask(BODY)).text)

        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert judge.waits_for() == "engines.judge: 1 answer of the judge strict"
        async with serving(ScriptedJudge(None)) as gone:
            known.add(server_at(gone, "engine.judge.0"))
            with anyio.fail_after(200):
                while not gone.bodies:  # noqa: ASYNC110 - the server has no event for it
                    await anyio.sleep(0.01)
        with anyio.fail_after(200):
            while judge.counts["unreachable_requests"] < 4:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        async with serving(ScriptedJudge("7")) as moved:
            known.add(server_at(moved, "engine.judge.0"))
            with anyio.fail_after(200):
                while not found:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
    assert found == ["7"]


async def test_another_engine_answers_what_the_first_one_lost() -> None:
    async with serving(ScriptedJudge("7")) as gone:
        away = server_at(gone, "engine.judge.0")
    async with serving(ScriptedJudge("8")) as scripted:
        async with judge_of(away, server_at(scripted, "engine.judge.1"), is_pool=True) as judge:
            assert [(await judge.ask(BODY)).text for _ in range(4)] == ["8"] * 4


async def test_a_silent_engine_without_a_sign_of_life_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.reward.judging.servers.LOOK_S", 0.1)
    killed: list[str] = []

    async def kill(reason: str) -> None:
        killed.append(reason)

    async with serving(ScriptedJudge(None)) as scripted:
        async with judge_of(server_at(scripted, kill=kill), is_pool=True, timeout_s=0.1, max_tries=2) as judge:
            with pytest.raises(JudgeError, match=r"^timeout"):
                await judge.ask(BODY)
    assert killed == ["timeout: no answer within 0.1 s (timeout_s)"]  # the last try needs none


async def test_an_engine_that_answers_one_token_is_not_killed() -> None:
    killed: list[str] = []

    async def kill(reason: str) -> None:
        killed.append(reason)

    async with serving(ScriptedJudge(None, "1", "7")) as scripted:
        async with judge_of(server_at(scripted, kill=kill), is_pool=True, timeout_s=2.0) as judge:
            assert (await judge.ask(BODY)).text == "7"
    assert killed == []


async def test_requests_in_flight_are_bounded() -> None:
    async with serving(ScriptedJudge("7")) as scripted, judge_of(server_at(scripted), at_once=3) as judge:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(judge.ask, BODY)
    assert scripted.most <= 3
    assert len(scripted.bodies) == 20


@asynccontextmanager
async def open_gateway(
    *script: Any, timeout_s: float = AMPLE_S
) -> AsyncGenerator[tuple[ScriptedJudge, dict[str, str], aiohttp.ClientSession]]:
    async with serving(ScriptedJudge(*script)) as scripted, judge_of(server_at(scripted), timeout_s=timeout_s) as judge:
        async with gateway({"strict": judge}) as env, aiohttp.ClientSession() as session:
            yield scripted, env, session


async def call(
    session: aiohttp.ClientSession, env: dict[str, str], body: Any, key: str | None = None
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key or env[KEY_VARIABLE]}"}
    async with session.post(f"{env[URL_VARIABLE]}/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_a_graders_request_goes_to_the_judge_that_its_model_names() -> None:
    async with open_gateway("7") as (scripted, env, session):
        status, answer = await call(session, env, {**BODY, "model": "strict"})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "7")
        assert scripted.bodies == [{**BODY, "model": "m"}]
        assert KEY not in str(env)
        for body, key, expected, words in (
            ({**BODY, "model": "strict"}, "wrong", 401, "the key is not PHYSARUM_JUDGE_KEY"),
            ({**BODY, "model": "other"}, None, 404, "model names no judge; allowed: strict"),
            ({**BODY, "model": "strict", "stream": True}, None, 400, "stream = true is not supported"),
            ([], None, 400, "the body is no JSON object"),
        ):
            status, answer = await call(session, env, body, key)
            assert (status, words in answer["error"]["message"]) == (expected, True)
    assert len(scripted.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "status", "cause"),
    [(None, 504, "timeout"), ((429, ""), 429, "rate_limited"), ((422, ""), 422, "refused"), ((500, ""), 503, "failed")],
)
async def test_a_grader_learns_why_the_judge_gave_no_answer(
    reply: Any, status: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.reward.judging.judge.ANSWERLESS_S", 0.5)
    async with open_gateway(reply, timeout_s=0.2 if reply is None else AMPLE_S) as (_, env, session):
        got, answer = await call(session, env, {**BODY, "model": "strict"})
    assert (got, answer["error"]["type"]) == (status, cause)
    assert answer["error"]["message"].startswith(f"{cause}: ")


async def test_the_request_of_a_grader_that_was_killed_ends() -> None:
    async with open_gateway(None) as (scripted, env, session):
        with anyio.fail_after(AMPLE_S):
            async with anyio.create_task_group() as killed:
                killed.start_soon(call, session, env, {**BODY, "model": "strict"})
                while not scripted.now:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.01)
                killed.cancel_scope.cancel()
            while scripted.now:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(scripted.bodies) == 1


async def test_a_request_waits_for_an_engine_of_the_pool_for_a_limited_time() -> None:
    async with judge_of(is_pool=True, wait_s=0.1) as judge:
        with pytest.raises(
            JudgeError, match=r"^unreachable: no engine of engines.judge answered within 0.1 s \(wait_s"
        ):
            await judge.ask(BODY)
    async with serving(ScriptedJudge("7")) as gone:
        server = server_at(gone)
    async with judge_of(server, is_pool=True, wait_s=0.2) as judge:
        for _ in range(5):  # one that stands still for the whole wait sends but one request
            before = judge.counts["unreachable_requests"]
            with pytest.raises(JudgeError, match=r"^unreachable: no engine"):
                await judge.ask(BODY)
            if judge.counts["unreachable_requests"] - before > 1:
                break
        else:
            pytest.fail("no request was sent again")


@pytest.mark.parametrize(("limits", "number"), [({"budget_requests": 6}, 3), ({"budget_tokens": 40}, 2)])
async def test_over_the_budget_of_its_actor_no_request_is_sent(limits: dict[str, int], number: int) -> None:
    reply = {**completion("7"), "usage": {"total_tokens": 10}}
    async with serving(ScriptedJudge((200, reply))) as scripted, judge_of(server_at(scripted)) as judge:
        budget = judge._budget = Budget("strict", JudgeConfig(url="http://u", model="m", **limits), 2)
        for _ in range(number):
            await judge.ask(BODY)
        with pytest.raises(
            JudgeError, match=r"^refused: the budget of \d+ \w+ is spent \(reward.judges.strict.budget_"
        ):
            await judge.ask(BODY)
    assert len(scripted.bodies) == number
    assert budget.spent == Spent(requests=number, tokens=10 * number)


async def test_requests_that_the_server_refuses_cost_nothing_of_the_budget() -> None:
    replies = (429, "slow"), (503, "busy"), (200, completion("7"))
    async with serving(ScriptedJudge(*replies)) as scripted, judge_of(server_at(scripted)) as judge:
        budget = judge._budget = Budget("strict", JudgeConfig(url="http://u", model="m", budget_requests=1), 1)
        assert (await judge.ask(BODY)).text == "7"
        with pytest.raises(JudgeError, match=r"^refused: the budget of 1 requests is spent"):
            await judge.ask(BODY)
    assert len(scripted.bodies) == 3
    assert budget.spent.requests == 1


async def test_a_crash_forgets_no_request_and_costs_a_hundredth_of_the_budget() -> None:
    """At each moment what is stored is at least what was sent, of requests and of tokens that were reported."""
    config, stored = JudgeConfig(url="http://u", model="m", budget_requests=1000, budget_tokens=4000), [Spent()]
    sent = 0

    async def store(spent: Spent) -> None:
        stored.append(spent)

    async def sends_in_turn() -> None:
        nonlocal sent
        while True:
            budget = Budget("strict", config, 1, stored[-1], store)
            for _ in range(sent % 37):  # then it dies
                await budget.begin()
                sent += 1
                assert stored[-1].requests >= sent
                budget.end(JudgeAnswer("7", False, b"", 3))
            await budget.begin()
            sent += 1

    with pytest.raises(JudgeError, match="the budget of 1000 requests is spent"):
        await sends_in_turn()
    assert 700 < sent <= 1000
    assert len(stored) < 300


async def test_the_end_of_an_actor_costs_nothing_of_the_budget(bus: Bus) -> None:
    configs = {"strict": JudgeConfig(url="http://u", model="m", budget_requests=1000)}
    for number in (0, 3, 6):
        async with open_budgets(configs, bus, 1) as budgets:
            assert budgets["strict"].spent == Spent(requests=number)
            for _ in range(3):
                await budgets["strict"].begin()


@pytest.mark.parametrize("retry_after", ["0.1", ""])
@pytest.mark.parametrize("number", [9, 50])
async def test_a_server_that_limits_the_rate_answers_all_in_the_end(number: int, retry_after: str) -> None:
    """With eight answers in a tenth of a second; a pause without Retry-After is a hundredth."""
    limited = LimitedJudge(**({"Retry-After": retry_after} if retry_after else {}))
    async with serving(limited), judge_of(server_at(limited), at_once=64) as judge:
        async with anyio.create_task_group() as group:
            for _ in range(number):
                group.start_soon(judge.ask, BODY)
    assert judge.counts["requests"] - judge.counts["rate_limited_requests"] == number


@pytest.mark.parametrize(("answerless_s", "wait_s"), [(0.2, 600.0), (120.0, 0.2)])
async def test_a_spent_quota_fails_a_request_after_a_while(
    answerless_s: float, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.reward.judging.judge.ANSWERLESS_S", answerless_s)
    async with serving(ScriptedJudge((429, "slow"))) as scripted, judge_of(server_at(scripted), wait_s=wait_s) as judge:
        began = anyio.current_time()
        with pytest.raises(JudgeError, match=r'^rate_limited: status 429: "slow" \(judge strict, u\)$'):
            await judge.ask(BODY)
        assert anyio.current_time() - began >= 0.2
        num_requests = len(scripted.bodies)
        if answerless_s < wait_s:  # the judge knows it now
            with pytest.raises(JudgeError):
                await judge.ask(BODY)
            assert len(scripted.bodies) == num_requests + 1


class LimitedJudge(ScriptedJudge):
    """Answers eight requests in each tenth of a second, and refuses the others until the next one."""

    def __init__(self, **headers: str) -> None:
        super().__init__("7", **headers)
        self.answered: list[float] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        now = anyio.current_time()
        self.answered = [time for time in self.answered if time > now - 0.1]
        if len(self.answered) == 8:
            self.bodies.append(await request.json())
            return web.json_response({}, status=429, headers=self.headers)
        self.answered.append(now)
        return await super().answer(request)
