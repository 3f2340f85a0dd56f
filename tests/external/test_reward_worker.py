"""bin/reward-worker against a real server with accounts."""

import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGTERM

import anyio
import anyio.abc
import msgspec
import pytest

from messages import Plane, Prompt, Score, ScoreItem, ScoresGiven
from messages.arrays import Int32Array
from messages.samples import SampleStatus
from runtime.data.stored_prompts import fetch_prompt, store_prompt
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_OK
from tests.fixtures.nats import eventually
from tests.support.external import ALICE, BOB, RunServer, score_request

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", str(ROOT / "bin/physarum.py"), "reward-worker")
GRADERS = """
import time

def match(sample):
    return float(sample.response == sample.label)

def fails(sample):
    raise ValueError(f"no grade for {sample.response}")

def num_samples(samples):
    return [len(samples)] * len(samples)

def sleeps(sample):
    time.sleep(float(sample.response))
    return 1.0

def reads(sample):
    return float("password" in open(sample.response).read())
"""

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Worker:
    """A running reward-worker."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self.shown = ""

    async def read(self) -> None:
        """Collect what it prints."""
        assert self.process.stderr is not None
        async for chunk in self.process.stderr:
            self.shown += chunk.decode()

    async def until(self, text: str) -> None:
        """Wait until it has printed a text."""

        async def is_shown() -> bool:
            return text in self.shown

        try:
            await eventually(is_shown)
        except TimeoutError:
            raise AssertionError(f"no {text!r} in:\n{self.shown}") from None

    async def stop(self) -> int:
        """Stop it with SIGTERM; return its exit code."""
        self.process.send_signal(SIGTERM)
        return await self.end()

    async def end(self) -> int:
        """Wait for its end; return its exit code."""
        with anyio.fail_after(200):
            return await self.process.wait()


@asynccontextmanager
async def worker(run: RunServer, grader: str, *options: str, credential: Path | None = None) -> AsyncGenerator[Worker]:
    (run.directory / "graders.py").write_text(GRADERS)
    command = [*COMMAND, str(credential or run.credential(ALICE)), f"graders.py:{grader}", *options]
    async with (
        await anyio.open_process(command, cwd=run.directory, stdout=None) as process,
        anyio.create_task_group() as tasks,
    ):
        shown = Worker(process)
        tasks.start_soon(shown.read)
        try:
            yield shown
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.wait()
            tasks.cancel_scope.cancel()


def items(*responses: str, label: str = "yes") -> Sequence[ScoreItem]:
    return [
        ScoreItem(index=index, prompt="p", response=response, label=label, status=SampleStatus.COMPLETED)
        for index, response in enumerate(responses)
    ]


async def test_it_grades_and_stops_in_order(run_server: RunServer) -> None:
    prompt = Prompt(
        data="d", row=0, text="long", prompt_ids=Int32Array([1, 2]), label="yes", metadata={"k": "v" * 2000}
    )
    keys = (await fetch_prompt(run_server.bus, await store_prompt(run_server.bus, prompt))).keys
    consumers = await run_server.consumers()
    async with worker(run_server, "match") as alice:
        await alice.until("connected to")
        await run_server.put(score_request("inline", items("yes", "no")))
        given = await run_server.answer()
        assert given == ScoresGiven(
            request_id="inline", scores=(Score(index=0, reward=1.0), Score(index=1, reward=0.0))
        )
        await run_server.put(score_request("stored", items("yes", label=""), keys))
        assert await run_server.answer() == ScoresGiven(request_id="stored", scores=(Score(index=0, reward=1.0),))
        await eventually(run_server.is_done)
        assert await alice.stop() == EXIT_OK
        assert "stopped; 3 samples of 2 requests graded" in alice.shown
    assert await run_server.consumers() == consumers
    assert (await run_server.bus.state(Plane.DEAD)).messages == 0


async def test_it_grades_samples_of_many_requests_in_one_call(run_server: RunServer) -> None:
    async with worker(run_server, "num_samples", "--batch", "3", "--wait-s", "20") as alice:
        await alice.until("connected to")
        for name in ("first", "second"):
            await run_server.put(score_request(name, items("a")))
        await run_server.put(score_request("third", items("b")))
        answers = [await run_server.answer() for _ in range(3)]
    assert [score.reward for answer in answers for score in answer.scores] == [3.0] * 3


async def test_a_grader_that_raises_is_shown_once_with_its_traceback(run_server: RunServer) -> None:
    async with worker(run_server, "fails") as alice:
        for name in ("first", "second"):
            await run_server.put(score_request(name, items("a", "b", "c")))
            errors = [score.error for score in (await run_server.answer()).scores]
            assert errors == [f"raised ValueError('no grade for {each}')" for each in "abc"]
        await eventually(run_server.is_done)
        assert await alice.stop() == EXIT_OK
        assert alice.shown.count("Traceback") == 1
        assert re.search(r'graders\.py", line \d+, in fails', alice.shown)
        assert "6 failed" in alice.shown


async def test_a_request_that_takes_longer_than_the_ack_wait_is_delivered_once(run_server: RunServer) -> None:
    async with worker(run_server, "sleeps", "--processes", "1") as alice:
        await run_server.put(score_request("slow", items("7")))
        assert (await run_server.answer()).scores == (Score(index=0, reward=1.0),)
        await eventually(run_server.is_done)
        assert await alice.stop() == EXIT_OK
        assert "1 sample of 1 request graded" in alice.shown


async def test_a_stopped_worker_gives_back_what_it_does_not_finish(run_server: RunServer) -> None:
    async with worker(run_server, "sleeps", "--processes", "1") as alice:
        await run_server.put(score_request("long", items("60")))
        await eventually(run_server.is_held)
        assert await alice.stop() == EXIT_OK
        assert "1 given back" in alice.shown
    async with worker(run_server, "match") as other:
        assert (await run_server.answer()).request_id == "long"
        await eventually(run_server.is_done)
        assert await other.stop() == EXIT_OK


async def test_another_worker_gets_the_requests_of_a_killed_one(run_server: RunServer) -> None:
    async with worker(run_server, "sleeps", "--processes", "1") as alice:
        await run_server.put(score_request("long", items("60")))
        await eventually(run_server.is_held)
        async with worker(run_server, "match") as other:
            await other.until("connected to")
            alice.process.kill()
            assert (await run_server.answer()).request_id == "long"
            await eventually(run_server.is_done)
            assert await other.stop() == EXIT_OK


@pytest.mark.parametrize(("sandbox", "reads"), [("none", True), ("isolated", False)])
async def test_only_an_isolated_grader_cannot_read_the_credential(
    run_server: RunServer, sandbox: str, reads: bool
) -> None:
    async with worker(run_server, "reads", "--sandbox", sandbox) as alice:
        await run_server.put(score_request("first", items(str(run_server.credential(ALICE)))))
        (score,) = (await run_server.answer()).scores
        assert (score.reward == 1.0) is reads, alice.shown
        assert await alice.stop() == EXIT_OK


async def test_it_outlives_an_outage_of_the_server(run_server: RunServer) -> None:
    async with worker(run_server, "match") as alice:
        await run_server.put(score_request("before", items("yes")))
        await run_server.answer()
        await run_server.server.kill()
        await anyio.sleep(2)  # longer than the pause between attempts to connect
        await run_server.server.start()
        await run_server.put(score_request("after", items("yes")))
        assert (await run_server.answer()).request_id == "after"
        assert await alice.stop() == EXIT_OK


async def test_a_worker_ends_when_its_credential_is_revoked(run_server: RunServer) -> None:
    async with worker(run_server, "match") as alice:
        await run_server.put(score_request("before", items("yes")))
        await run_server.answer()
        run_server.revoke(ALICE)
        assert await alice.end() == EXIT_INPUT_ERROR
        await alice.until("refuses the credential of alice: it was revoked, or is unknown")


async def test_a_refused_credential_is_named_with_the_reason(run_server: RunServer) -> None:
    unknown = msgspec.structs.replace(ALICE, name="carol")
    async with worker(run_server, "match", credential=run_server.credential(unknown)) as carol:
        assert await carol.end() == EXIT_INPUT_ERROR
        await carol.until("refuses the credential of carol: it was revoked, or is unknown")
    expired = msgspec.structs.replace(unknown, expires=datetime(2020, 1, 2, 3, 4, tzinfo=UTC))
    async with worker(run_server, "match", credential=run_server.credential(expired)) as carol:
        assert await carol.end() == EXIT_INPUT_ERROR
        await carol.until("the credential of carol expired at 2020-01-02 03:04 UTC")


@pytest.mark.parametrize(
    ("grader", "client", "shown"),
    [
        ("missing", ALICE, "'graders.py:missing': there is no 'missing' in it"),
        ("match", BOB, "the credential of a viewer"),
    ],
)
async def test_wrong_input_is_refused_at_once(run_server: RunServer, grader: str, client: object, shown: str) -> None:
    credential = run_server.credential(BOB if client is BOB else ALICE)
    async with worker(run_server, grader, credential=credential) as alice:
        assert await alice.end() == EXIT_INPUT_ERROR
        await alice.until(shown)
