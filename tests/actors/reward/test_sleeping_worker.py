"""A reward worker that sleeps while it holds score requests, as a process of its own with nats-py alone."""

import signal
import sys
import time

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from actors.reward.actor import RewardActor
from actors.rollout.samples.scoring import Scorer
from actors.rollout.samples.tasks import training_task
from messages import Plane, SampleStatus, Score, ScoreItem, ScoreRequestsLost
from messages.subjects import score_durable, stream_of
from runtime.bus.bus import Bus
from runtime.bus.scoring import ACK_WAIT_S
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import task

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUM_REQUESTS = 40
HOARDER = """
import asyncio, sys, nats

async def main(url, stream, durable):
    client = await nats.connect(url)
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    pull = b'{"batch":80,"expires":30000000000}'  # each request twice
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}", pull, reply=inbox)
    await subscription.next_msg(30)
    print("holds", flush=True)
    await asyncio.sleep(300)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_worker_that_sleeps_costs_redeliveries_and_nothing_else(bus: Bus, url: str) -> None:
    scorer = Scorer(bus, timeout_s=10.0, max_tries=1, graders=["exact_match"])
    scores: list[Score] = []

    async def ask(number: int) -> None:
        item = ScoreItem(index=0, prompt="p", response="1", status=SampleStatus.COMPLETED, response_len=1, label="1")
        scores.extend(await scorer.score(training_task(task(number), "lease", group_rm=False), [item]))

    await bus.ensure_score_queues(["exact_match"])
    command = [sys.executable, "-c", HOARDER, url, stream_of(bus.run, Plane.WORK), score_durable("exact_match")]
    async with anyio.create_task_group() as group:
        await group.start(scorer.run)
        async with await anyio.open_process(command, stdin=None, stderr=None) as worker:
            try:
                async with anyio.create_task_group() as asking:
                    for number in range(NUM_REQUESTS):
                        asking.start_soon(ask, number)
                    assert worker.stdout is not None
                    said = BufferedByteReceiveStream(worker.stdout)
                    assert await said.receive_until(b"\n", 100) == b"holds"
                    worker.send_signal(signal.SIGSTOP)
                    began = time.monotonic()
                    await group.start(RewardActor(topology_with(reward={"processes": 1}), bus).run)
                took_s = time.monotonic() - began
            finally:
                worker.kill()
        group.cancel_scope.cancel()
    assert [score.reward for score in scores] == [1.0] * NUM_REQUESTS
    assert took_s > ACK_WAIT_S / 2  # the worker held them

    async def all_done() -> bool:
        return (await bus.state(Plane.WORK)).messages == 0

    await eventually(all_done)
    async with bus.read(ScoreRequestsLost) as events:
        assert [received async for received in events.so_far()] == []
