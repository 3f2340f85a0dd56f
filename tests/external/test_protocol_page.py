"""The programs of docs/reference/protocol.md, from the page's own text, against a real server with accounts."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from messages import Prompt, Score, ScoreItem, ScoresGiven
from messages.arrays import Int32Array
from messages.samples import SampleStatus
from runtime.data.stored_prompts import fetch_prompt, store_prompt
from tests.docs.snippets import snippets
from tests.fixtures.nats import eventually, group_failed
from tests.support.external import ALICE, BOB, RunServer, program, score_request
from tests.support.page_programs import PAGE, javascript_worker, python_program

MAX_LINES = 40

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="session")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """Command of the page's JavaScript worker."""
    return javascript_worker(tmp_path_factory.mktemp("javascript"))


@pytest.fixture(params=["python", "javascript"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Sequence[str]:
    """Command of a worker of the page, without the credential."""
    if request.param == "python":
        return python_program(0, tmp_path)
    return request.getfixturevalue("javascript")


def test_the_programs_are_short() -> None:
    assert all(text.count("\n") <= MAX_LINES for name in ("python", "javascript") for text in snippets(PAGE, name))


async def test_a_worker_of_the_page_grades(run_server: RunServer, worker: Sequence[str]) -> None:
    odd = {"list": [1, -2.5, None, True, 2**40, -(2**40), -70_000, "x" * 300], "map": {"k": b"bytes"}, "many": [0] * 20}
    items = [
        ScoreItem(index=0, prompt="p", response="47 ", label="47", status=SampleStatus.COMPLETED, metadata=odd),
        ScoreItem(index=7, part=2, prompt="p", response="x" * 70_000, label=5, status=SampleStatus.TRUNCATED),
    ]
    prompt = Prompt(
        data="d", row=0, text="long", prompt_ids=Int32Array(list(range(300))), label="yes", metadata={"k": "v" * 2000}
    )
    seqs = await store_prompt(run_server.bus, prompt, part_bytes=1000)
    keys = (await fetch_prompt(run_server.bus, seqs)).keys
    assert len(keys) > 1
    stored = ScoreItem(index=0, prompt="", response="yes", status=SampleStatus.COMPLETED)
    await run_server.put(score_request("first", items))
    async with program(*worker, run_server.credential(ALICE), cwd=run_server.directory):
        given = await run_server.answer()
        assert given == ScoresGiven(
            request_id="first", scores=(Score(index=0, reward=1.0), Score(index=7, part=2, reward=0.0))
        )
        await run_server.put(score_request("stored", [stored], keys))
        assert await run_server.answer() == ScoresGiven(request_id="stored", scores=(Score(index=0, reward=1.0),))
        await eventually(run_server.is_done)


async def test_the_viewer_of_the_page_prints_every_event_once(run_server: RunServer, tmp_path: Path) -> None:
    expected: list[int] = []
    expected += [await run_server.bus.publish(group_failed(number)) for number in range(1, 301)]  # more than a batch
    async with program(*python_program(1, tmp_path), run_server.credential(BOB), cwd=tmp_path) as viewer:
        assert viewer.stdout is not None

        async def read(number: int) -> list[list[str]]:
            assert viewer.stdout is not None
            with anyio.fail_after(200):
                return [(await viewer.stdout.readline()).decode().split(" ", 2) for _ in range(number)]

        lines = await read(300)
        expected += [await run_server.bus.publish(group_failed(301))]
        lines += await read(1)
        await run_server.server.kill()  # live messages of an outage are lost
        await run_server.server.start()
        expected += [await run_server.bus.publish(group_failed(number)) for number in range(302, 312)]
        lines += await read(10)
        assert [int(sequence) for sequence, _, _ in lines] == expected
        assert lines[-1][1] == "phy.r.event.group.failed.311.1"
        assert '"group_failed"' in lines[-1][2]
