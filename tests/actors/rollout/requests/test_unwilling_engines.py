"""Engines that are up and answer nothing that can be used: whom that costs what, and what is told of it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from actors.rollout.requests.verdict import Outcome
from actors.rollout.sglang.errors import EnginesUnwilling, RequestRefused
from messages import EngineRequestsFailed, EngineState, EngineStateChanged, Message
from runtime.report.report import Line, Report
from runtime.util.retrying import Backoff
from tests.support.behind_proxies import LONG, SHORT, Behind, Choose, behind_proxies, outcome, request
from tests.support.odd_answers import CASES
from tests.support.spoiling_proxy import Case
from tests.support.tiny_engine import running_engine
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BY_NAME: Final = {case.name: case for case in CASES}
FLAGS: Final = ("--load-format", "dummy", "--max-running-requests", "64", "--incremental-streaming-output")
TERMINAL_S: Final = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_engine(model, *FLAGS)).url for _ in range(2)]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent again soon, and engines judged soon."""
    monkeypatch.setattr("actors.rollout.engines.failures.FAILING_FOR_S", 0.2)
    monkeypatch.setattr("actors.rollout.requests.sending.RESEND", Backoff(first_s=0.02, max_s=0.2))


def never(_: dict[str, Any]) -> None:
    return None


def always(name: str) -> Choose:
    return lambda _: BY_NAME[name]


async def asked_all(
    behind: Behind, number: int, *, first: int = 0, streamed: bool = False, limit_s: float = 60.0
) -> list[str]:
    """What became of so many requests that were sent at once, of prompts from `first` on."""
    found: list[str] = []

    async def ask(index: int) -> None:
        asked = request(f"group{index}-0-1", LONG if streamed else SHORT, seed=index, streamed=streamed)
        found.append(await outcome(behind, asked, limit_s=limit_s))

    async with anyio.create_task_group() as group:
        for index in range(first, first + number):
            group.start_soon(ask, index)
    return found


def terminal(told: list[Message]) -> list[str]:
    """What a person reads of events."""
    report = Report("r", 1, 0.0)
    notices = [notice for seq, event in enumerate(told) for notice in report.apply(event, seq + 1, 1.0)]
    return [notice.text for notice in notices if isinstance(notice, Line)]


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("spoiled", ["HTML", "an abort with 500"])
async def test_an_engine_that_fails_alone_is_quarantined_by_name_and_tried_again(
    engines: list[str], model: Path, dispatch_by: str | None, monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    monkeypatch.setattr("actors.rollout.engines.engine.QUARANTINE", Backoff(first_s=2.0))
    broken = True

    def first(_: dict[str, Any]) -> Case | None:
        return BY_NAME[spoiled] if broken else None

    async with behind_proxies(engines, dispatch_by, model, [first, never]) as behind:
        began = time.monotonic()
        url, lines = behind.proxies[0].url, list[str]()
        with anyio.fail_after(200):
            while not any(line.startswith(f"engine.policy.0 is quarantined: {url}: ") for line in lines):
                assert await asked_all(behind, 24, streamed=spoiled.startswith("an abort")) == ["good"] * 24
                lines = terminal(behind.told)
        assert any(f"engine.policy.0 ({url}" in line for line in lines)
        assert not any("engine.policy.1 is" in line for line in lines)
        assert time.monotonic() - began < 60
        broken = False
        with anyio.fail_after(200):
            await behind.fleet.until(lambda: behind.fleet.serving.num_admitted() == 2)
        changes = [(each.old, each.new) for each in behind.told if isinstance(each, EngineStateChanged)]
        assert (EngineState.QUARANTINED, EngineState.STARTING) in changes
        calls = behind.proxies[0].num_calls
        assert await asked_all(behind, 8, first=24) == ["good"] * 8  # prompts that no engine had before
        assert behind.proxies[0].num_calls > calls


@pytest.mark.usefixtures("_quick")
async def test_the_last_engine_of_others_is_asked_on_until_the_run_ends_and_names_it(
    engines: list[str], model: Path, dispatch_by: str | None
) -> None:
    async with behind_proxies(engines[:1], dispatch_by, model, [always("HTML")], give_up_after_s=3.0) as behind:
        ended: list[str] = []

        async def ask(index: int) -> None:
            with pytest.raises(EnginesUnwilling) as raised:
                await behind.generator.generate(request(f"group{index}-0-1", SHORT))
            ended.append(str(raised.value))

        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(ask, index)
        assert behind.fleet.serving.num_admitted() == 1
        who = f"engine.policy.0 ({behind.proxies[0].url})"
        assert all(f"for 3 s (rollout.generate_timeout_s); last failure: {who}: " in text for text in ended)
        assert len(ended) == 4


@pytest.mark.usefixtures("_quick")
async def test_the_last_engine_of_the_run_is_restarted(
    engines: list[str], model: Path, dispatch_by: str | None
) -> None:
    broken = True

    def choose(_: dict[str, Any]) -> Case | None:
        return BY_NAME["HTML"] if broken else None

    async with behind_proxies(engines[:1], dispatch_by, model, [choose], ours=True) as behind:
        async with anyio.create_task_group() as group:
            group.start_soon(asked_all, behind, 8)
            with anyio.fail_after(200):
                while not behind.killed:  # noqa: ASYNC110 - as short a wait as an event, in tests
                    await anyio.sleep(0.02)
            broken = False  # as a new process is
        assert "unreadable answer" in behind.killed[0]
        assert any(line.startswith("engine.policy.0 is suspect: ") for line in terminal(behind.told))
        assert await asked_all(behind, 4) == ["good"] * 4


async def test_two_prompts_that_always_fail_cost_no_engine_that_answers_others(
    engines: list[str], model: Path, dispatch_by: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.rollout.requests.sending.MAX_FAILURES", 4)

    def choose(body: dict[str, Any]) -> Case | None:
        return BY_NAME["HTML"] if body["rid"].startswith("cursed") else None

    async with behind_proxies(engines[:1], dispatch_by, model, [choose], ours=True) as behind:
        ended: list[str] = []

        async def ask(index: int) -> None:
            with pytest.raises(RequestRefused, match="failed 4 times"):
                await behind.generator.generate(request(f"cursed{index % 2}-{index}-1", SHORT))
            ended.append("cursed")

        async with anyio.create_task_group() as group:
            for index in range(8):
                group.start_soon(ask, index)
            number = 0
            while len(ended) < 8:
                assert await outcome(behind, request(f"good{number}-0-1", SHORT), limit_s=60) == "good"
                number += 1
        assert behind.killed == []


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_a_full_queue_costs_no_request_and_is_told_with_the_engines_name(
    engines: list[str], model: Path, dispatch_by: str | None, streamed: bool
) -> None:
    running: set[str] = set()

    def choose(body: dict[str, Any]) -> Case | None:
        done = {rid for rid in running if rid in behind.proxies[0].truths}
        running.difference_update(done)
        if len(running) >= 6:
            return BY_NAME["an abort with 503"]._replace(asks=True)
        running.add(body["rid"])
        return None

    async with behind_proxies(engines[:1], dispatch_by, model, [choose]) as behind:
        assert await asked_all(behind, 24, streamed=streamed) == ["good"] * 24
        assert behind.proxies[0].spoiled["an abort with 503"] >= 12
        first = next(event for event in behind.told if isinstance(event, EngineRequestsFailed))
        assert first.engine == f"engine.policy.0 ({behind.proxies[0].url})"
        assert first.reason.startswith("503 ")
        assert "The request queue is full." in first.reason
        assert behind.fleet.serving.num_admitted() == 1


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("name", ["a break at once", "HTML"])
async def test_a_request_whose_stream_always_breaks_without_a_token_fails_after_ten_tries(
    engines: list[str], model: Path, dispatch_by: str | None, name: str
) -> None:
    def choose(body: dict[str, Any]) -> Case | None:
        return BY_NAME[name] if body["rid"].startswith("cursed") else None

    async with behind_proxies(engines[:1], dispatch_by, model, [choose]) as behind:
        found: list[str] = []

        async def others() -> None:
            found.extend(await asked_all(behind, 8, streamed=True))

        async with anyio.create_task_group() as group:
            group.start_soon(others)
            with pytest.raises(RequestRefused, match=r"failed 10 times, last at engine\.policy\.0"):
                await behind.generator.generate(request("cursed-0-1", LONG, streamed=True))
        assert found == ["good"] * 8
        assert behind.proxies[0].spoiled[name] == 10
        assert behind.fleet.serving.num_admitted() == 1


@pytest.mark.usefixtures("_quick")
async def test_a_halt_ends_the_wait_of_a_request_that_fails(
    engines: list[str], model: Path, dispatch_by: str | None
) -> None:
    async with behind_proxies(engines[:1], dispatch_by, model, [always("HTTP 503")]) as behind:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with anyio.fail_after(200):
                    assert await behind.generator.generate(request("g-0-1", SHORT)) is Outcome.ABORTED

            group.start_soon(ask)
            with anyio.fail_after(200):
                while not behind.told or behind.proxies[0].num_calls < 3:  # noqa: ASYNC110 - as short as an event
                    await anyio.sleep(0.02)
            behind.generator.running.halt(0)


async def test_an_engine_of_others_that_is_ready_and_generates_nothing_ends_the_run_by_name(
    engines: list[str], model: Path, dispatch_by: str | None
) -> None:
    async with behind_proxies(engines[:1], dispatch_by, model, [always("silence")], give_up_after_s=12.0) as behind:
        behind.proxies[0].hangs_probes = True
        with anyio.fail_after(200), pytest.raises(EnginesUnwilling, match=behind.proxies[0].url):
            await behind.generator.generate(request("g-0-1", SHORT))
        assert any(line.startswith("engine.policy.0 is suspect: no first token") for line in terminal(behind.told))


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_a_request_that_a_live_engine_lost_is_aborted_there_and_sent_again(
    engines: list[str], model: Path, dispatch_by: str | None, streamed: bool
) -> None:
    def choose(body: dict[str, Any]) -> Case | None:
        return BY_NAME["silence"] if body["rid"] == "lost-0-1-0" else None

    async with behind_proxies(engines[:1], dispatch_by, model, [choose]) as behind:
        found: list[str] = []

        async def ask() -> None:
            asked = request("lost-0-1", LONG if streamed else SHORT, streamed=streamed)
            found.append(await outcome(behind, asked, limit_s=60))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            for index in range(12):
                others = await outcome(behind, request(f"o{index}-0-1", LONG, streamed=True), limit_s=60)
                assert others == "good"
        assert found == ["good"]
        assert {"rid": "lost-0-1-0"} in behind.proxies[0].aborts
        assert behind.fleet.serving.num_admitted() == 1
        reasons = [event.reason for event in behind.told if isinstance(event, EngineRequestsFailed)]
        assert any("got no token for long" in reason for reason in reasons)
