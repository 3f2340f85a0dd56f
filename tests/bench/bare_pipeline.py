"""The least that a durable pipeline of tasks, scores, payloads and events costs with nats-py: no types, no recovery.

A task is pulled from a work queue, scores are asked for through another one and answered to an inbox, the samples of
the group are stored, an event says so, and a batch of such groups is read by sequence. Everything is durable and acked;
payloads are msgpack, events JSON. Each role has a process: rollout, reward and trainer here, the buffer in the
benchmark itself (`Buffer`), which counts the CPU time of all of them.

Run: python -m tests.bench.bare_pipeline {rollout,reward,trainer} URL --samples 8 [--score-each]
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import nats
import numpy as np
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NothingYet
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

NUM_TOKENS = 4  # of a response, as those of the zero engine
TEXT = "74"
BATCH = 64  # messages of one pull request
PULL_S = 5.0
STREAMS = {
    "BARE_TASKS": ("bare.work.rollout", RetentionPolicy.WORK_QUEUE),
    "BARE_SCORES": ("bare.work.score", RetentionPolicy.WORK_QUEUE),
    "BARE_EVENTS": ("bare.event.>", RetentionPolicy.LIMITS),
    "BARE_DATA": ("bare.data.>", RetentionPolicy.LIMITS),
}
ROLES = ("rollout", "reward", "trainer")

_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
_to_json, _from_json = msgspec.json.encode, msgspec.json.decode


async def connect(url: str) -> Client:
    return await nats.connect(url, pending_size=64 << 20)


async def make_streams(js: JetStreamContext) -> None:
    for name, (subject, retention) in STREAMS.items():
        storage = StorageType.FILE
        config = StreamConfig(name=name, subjects=[subject], retention=retention, storage=storage, allow_direct=True)
        await js.add_stream(config)


async def pull(
    js: JetStreamContext, subject: str, stream: str, handle: Callable[[Msg], Awaitable[None]], *, at_once: bool = True
) -> None:
    """Handle the messages of a durable consumer for ever, those of one pull at once or one by one."""
    subscription = await js.pull_subscribe(
        subject, stream.lower() + subject.rpartition(".")[2].strip(">"), stream=stream
    )
    running = set[asyncio.Task[None]]()
    while True:
        try:
            messages = await subscription.fetch(BATCH, timeout=PULL_S)
        except NothingYet:
            continue
        for message in messages:
            if not at_once:
                await handle(message)
                continue
            task = asyncio.ensure_future(handle(message))
            running.add(task)
            task.add_done_callback(running.discard)


class Rollout:
    """Makes up the samples of a group, asks for their scores, stores them."""

    def __init__(self, client: Client, num_samples: int, *, scores_each: bool) -> None:
        self._js = client.jetstream()
        self._client = client
        self._num_samples = num_samples
        self._scores_each = scores_each
        self._inbox = client.new_inbox()
        self._waiting: dict[str, asyncio.Future[list[float]]] = {}

    async def run(self) -> None:
        await self._client.subscribe(self._inbox, cb=self._take_scores)
        await pull(self._js, "bare.work.rollout", "BARE_TASKS", self._generate)

    async def _take_scores(self, message: Msg) -> None:
        key, scores = _unpack(message.data)
        self._waiting.pop(key).set_result(scores)

    async def _score(self, key: str, texts: Sequence[str]) -> list[float]:
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        await self._js.publish("bare.work.score", _pack({"key": key, "reply": self._inbox, "texts": texts}))
        return await answer

    async def _generate(self, message: Msg) -> None:
        group = _unpack(message.data)["group"]
        samples = [
            {
                "group": group,
                "index": index,
                "ids": np.arange(NUM_TOKENS, dtype=np.int32).tobytes(),
                "log_probs": np.ones(NUM_TOKENS, dtype=np.float32).tobytes(),
                "text": TEXT,
            }
            for index in range(self._num_samples)
        ]
        if self._scores_each:
            asked = (self._score(f"{group}.{index}", [TEXT]) for index in range(self._num_samples))
            rewards = [score for scores in await asyncio.gather(*asked) for score in scores]
        else:
            rewards = await self._score(str(group), [TEXT] * self._num_samples)
        stored = await self._js.publish(f"bare.data.{group}", _pack(samples))
        event = {
            "group": group,
            "attempt": 1,
            "seq": stored.seq,
            "rewards": rewards,
            "lengths": [NUM_TOKENS] * len(samples),
        }
        await self._js.publish("bare.event.completed", _to_json(event))
        await message.ack()


async def reward(client: Client) -> None:
    """Answer score requests."""

    async def grade(message: Msg) -> None:
        request = _unpack(message.data)
        scores = [float(text == TEXT) for text in request["texts"]]
        await client.publish(request["reply"], _pack((request["key"], scores)))
        await message.ack()

    await pull(client.jetstream(), "bare.work.score", "BARE_SCORES", grade, at_once=False)


async def trainer(client: Client) -> None:
    """Read the samples of each batch."""
    js = client.jetstream()

    async def train(message: Msg) -> None:
        seqs = _from_json(message.data)["seqs"]
        stored = await asyncio.gather(*(js.get_msg("BARE_DATA", seq, direct=True) for seq in seqs))
        num_samples = sum(len(_unpack(each.data or b"")) for each in stored)
        await js.publish("bare.event.trained", _to_json({"num_samples": num_samples}))
        await message.ack()

    await pull(js, "bare.event.batch", "BARE_EVENTS", train, at_once=False)


class Buffer:
    """Issues the tasks of a step, and makes a batch of the groups once all are complete."""

    def __init__(self, client: Client, num_groups: int) -> None:
        self._js = client.jetstream()
        self._num_groups = num_groups
        self._issued = 0
        self._events: Any = None

    async def open(self) -> None:
        self._events = await self._js.pull_subscribe("bare.event.>", "buffer", stream="BARE_EVENTS")

    async def step(self, timeout_s: float) -> int:
        """One train step; returns its number of samples."""
        groups = range(self._issued, self._issued + self._num_groups)
        self._issued += self._num_groups
        tasks = (
            self._js.publish("bare.work.rollout", _pack({"group": group, "prompt": "47", "label": TEXT}))
            for group in groups
        )
        await asyncio.gather(*tasks)
        seqs = list[int]()
        while True:
            for message in await self._events.fetch(2 * BATCH, timeout=timeout_s):
                event = _from_json(message.data)
                await message.ack()
                match message.subject.rpartition(".")[2]:
                    case "completed":
                        seqs.append(event["seq"])
                        if len(seqs) == self._num_groups:
                            await self._js.publish("bare.event.batch", _to_json({"seqs": seqs}))
                    case "trained":
                        return event["num_samples"]
                    case _:
                        pass


async def run(args: argparse.Namespace) -> None:
    client = await connect(args.url)
    match args.role:
        case "rollout":
            await Rollout(client, args.samples, scores_each=args.score_each).run()
        case "reward":
            await reward(client)
        case _:
            await trainer(client)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("url")
    parser.add_argument("--samples", type=int, required=True, help="per group")
    parser.add_argument("--score-each", action="store_true", help="a score request per sample, not per group")
    uvloop.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
