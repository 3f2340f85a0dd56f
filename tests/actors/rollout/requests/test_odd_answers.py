"""Unusual answers of an engine (tests/support/odd_answers.py), each streamed and whole: nothing wrong is believed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from structlog.testing import capture_logs

from actors.rollout.requests.watching import TokenTimeouts
from tests.support.behind_proxies import LONG, PATIENCE, SHORT, behind_proxies, outcome, request
from tests.support.odd_answers import CASES
from tests.support.odd_table import check_every_row
from tests.support.spoiling_proxy import Case
from tests.support.tiny_engine import running_engine
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # an engine starts, for all tests

NO_WATCH: Final = TokenTimeouts(first_s=600.0, next_s=600.0)
LIMIT_S: Final = 150.0

FLAGS: Final = ("--load-format", "dummy", "--max-running-requests", "64", "--incremental-streaming-output")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[str]:
    with running_engine(model, *FLAGS) as engine:
        yield engine.url


async def test_no_unusual_answer_is_believed_and_each_request_is_answered_in_the_end(
    engine: str, model: Path, dispatch_by: str | None
) -> None:
    await check_every_row(engine, dispatch_by, model, limits=PATIENCE, limit_s=LIMIT_S)


async def test_what_cannot_be_true_is_said_with_the_engine_and_its_url(
    engine: str, model: Path, dispatch_by: str | None
) -> None:
    names = ("a null log-prob", "a log-prob of nan", "token id -1", "no token and a stop")
    rows = [case for case in CASES if case.name in names]
    found: list[str] = []

    def first_try(body: dict[str, Any]) -> Case | None:
        rid = body["rid"]
        return rows[int(rid.partition("-")[0]) // 2] if rid.endswith("-0") else None

    with capture_logs() as logged:
        async with (
            behind_proxies([engine], dispatch_by, model, [first_try], limits=NO_WATCH) as behind,
            anyio.create_task_group() as group,
        ):
            url = behind.proxies[0].url

            async def ask(number: int) -> None:
                asked = request(f"{number}-0-1", LONG if number % 2 else SHORT, streamed=bool(number % 2))
                found.append(await outcome(behind, asked, limit_s=LIMIT_S))

            for number in range(2 * len(rows)):
                group.start_soon(ask, number)
    assert found == ["good"] * 2 * len(rows)
    lost = [entry["error"] for entry in logged if entry["event"] == "request_lost"]
    assert len(lost) == 2 * len(rows)
    assert all(error.startswith(f"engine.policy.0 ({url}): ") for error in lost), lost
