"""A trainer's half and a rollout actor's half of weight sessions with one engine, and the line between them.

All of it is real but the bus: the sink of the trainer, its group, the parts of the rollout actor, its prover. What
comes out of the line is what a corruption makes of a bucket that goes in.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import torch
from torch import Tensor

from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights.loads import Loads
from actors.rollout.engines.weights.prover import Prover
from actors.rollout.engines.weights.session import WeightSessions, new_key
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.updates import WeightUpdates
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.sending.collective import Broadcast
from actors.trainer.sending.group import StageGroup
from actors.trainer.sending.reckoning import Reckoning
from actors.trainer.sending.session import Membership
from actors.trainer.sending.sink import BucketSink, Sent
from messages import (
    BucketSent,
    GroupsOffered,
    Message,
    SessionClosed,
    SessionFinished,
    SessionOffered,
    SessionPrepared,
    WeightsAnnounced,
)

ENGINE: Final = "engine-0"
LIMIT_S: Final = 60.0  # of what may wait for others
NUM_BUCKETS: Final = 4
CPU: Final = torch.device("cpu")


class Sending(NamedTuple):
    """A bucket on the line."""

    step: BucketSent
    flat: Tensor


Corruption = Callable[[Sending], Sequence[Sending]]  # what arrives in place of it
Tensors = dict[str, Tensor]


def as_it_is(sending: Sending) -> Sequence[Sending]:
    """No corruption."""
    return [sending]


def drawn(model: Path, seed: int) -> Tensors:
    """Weights of a model, all of them random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.1 for name, shape in hf_shapes(read_hf_config(model)).items()
    }


def buckets_of(tensors: Tensors) -> list[list[tuple[str, Tensor]]]:
    """The weights in a few parts."""
    named = list(tensors.items())
    size = -(-len(named) // NUM_BUCKETS)
    return [named[start : start + size] for start in range(0, len(named), size)]


class Line:
    """Stands for the group, and for asking, on the trainer's side."""

    def __init__(
        self, group: StageGroup, ask: Callable[[Message], "Future[dict[str, str]]"], corrupt: Corruption
    ) -> None:
        self.spec = group.spec
        self._group = group
        self._ask = ask
        self._corrupt = corrupt
        self._told: BucketSent | None = None
        self._answer: Future[dict[str, str]] = Future()

    def ask(self, step: Message, timeout_s: float) -> "Future[dict[str, str]]":
        """Keep it back until its bytes come."""
        assert isinstance(step, BucketSent)
        assert timeout_s
        self._told, self._answer = step, Future()
        return self._answer

    def broadcast(self, flat: Tensor) -> None:
        """Send what becomes of a bucket."""
        assert self._told is not None
        failed: dict[str, str] = {}
        for step, arriving in self._corrupt(Sending(self._told, flat)):
            taken = self._ask(step)
            self._group.broadcast(arriving)
            failed |= taken.result(LIMIT_S)
        self._answer.set_result(failed)


class Halves:
    """Both halves of sessions with one engine. An engine that failed is another process to them, as it is in a run."""

    def __init__(self, client: SglangClient, url: str, model: Path) -> None:
        updater = Updater(client, "retract")
        self._prover = Prover(client, updater, Loads(), verify="always", trainer_dtype="float32")
        self._updates = WeightUpdates(client)
        self._url = url
        self._model = read_hf_config(model)
        self._target = FleetTarget()
        self._sessions = WeightSessions(self._target, lambda: (ENGINE,))
        self._version = 0
        self.refused: EngineError | None = None  # what the rollout actor raised in the last session

    async def bring(self, tensors: Tensors, corrupt: Corruption = as_it_is) -> dict[str, str]:
        """Bring a new version in a session; why engines failed."""
        self._version += 1
        told = WeightsAnnounced(version=self._version, step=0, incarnation=1, path="", checksum="", size_bytes=1)
        self._target.weights = told
        self.refused = None
        failed: dict[str, str] = {}
        with anyio.fail_after(2 * LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._take, told)
                failed |= await self._lead(tensors, corrupt)
        return failed

    async def _take(self, told: WeightsAnnounced) -> None:
        num_ranks, wants = await self._prover.place(self._url, told, first=False)
        try:
            async with self._sessions.part(ENGINE, new_key(ENGINE), num_ranks, told.version, wants) as part:
                while not part.session:  # noqa: ASYNC110 - as the engine's target tells it
                    await anyio.sleep(0.001)
                await self._prover.bring(ENGINE, self._url, told, first=False, part=part)
        except EngineError as error:
            self.refused = error

    async def _lead(self, tensors: Tensors, corrupt: Corruption) -> dict[str, str]:
        session = f"1.{self._version}"
        offer = SessionOffered(session=session, incarnation=1, version=self._version, deadline_s=LIMIT_S)
        membership = Membership.of({"rollout.0": await self._sessions.offered(offer)})
        assert membership.engines == (ENGINE,)
        assert await self._ask(SessionPrepared(session=session)) == {}
        group = StageGroup(uuid.uuid4().hex, "127.0.0.1", membership.world_size, CPU, timeout_s=LIMIT_S)
        try:
            await self._meet(session, group, membership)
            loop = asyncio.get_running_loop()
            line: Any = Line(group, lambda step: asyncio.run_coroutine_threadsafe(self._ask(step), loop), corrupt)
            reckoning = Reckoning(self._model, membership.layouts)
            sink = BucketSink(session, 0, Broadcast(line), line.ask, reckoning, timeout_s=LIMIT_S)
            sent = await anyio.to_thread.run_sync(_send, sink, tensors)
            return await self._end(session, sent)
        finally:
            group.leave()
            await self._updates.destroy_group(self._url, group.spec.name, timeout_s=LIMIT_S)

    async def _end(self, session: str, sent: Sent) -> dict[str, str]:
        if sent.failed:
            await self._sessions.closed(SessionClosed(session=session, reason="; ".join(sent.failed.values())))
            return sent.failed
        finish = SessionFinished(
            session=session, checksum=str(sent.fingerprints), num_buckets=sent.num_buckets, expected=sent.expected
        )
        return await self._ask(finish)

    async def _meet(self, session: str, group: StageGroup, membership: Membership) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, group.join)
            offer = GroupsOffered(session=session, groups=(group.spec,), offsets=membership.offsets)
            assert await self._ask(offer) == {}

    async def _ask(self, step: Any) -> dict[str, str]:
        return (await self._sessions.step(step)).failed


def _send(sink: BucketSink, tensors: Tensors) -> Sent:
    for bucket in buckets_of(tensors):
        sink.hand_over(bucket)
    return sink.close()


# corruptions


def bytes_in(sending: Sending, name: str) -> tuple[Tensor, Tensor]:
    """A copy of a bucket's bytes, and in it those of a tensor."""
    flat, start = sending.flat.clone(), 0
    for each, dtype, shape in zip(sending.step.names, sending.step.dtypes, sending.step.shapes, strict=True):
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        if each == name:
            return flat, flat[start : start + size]
        start += size
    raise KeyError(name)


def changed(name: str, change: Callable[[Tensor], object]) -> Corruption:
    """The bytes of a tensor are changed in place."""

    def corrupt(sending: Sending) -> Sequence[Sending]:
        if name not in sending.step.names:
            return [sending]
        flat, own = bytes_in(sending, name)
        change(own)
        return [sending._replace(flat=flat)]

    return corrupt


def flipped(name: str, byte: int, bits: int) -> Corruption:
    """Bits of one byte of a tensor are flipped; byte 0 is the lowest of its first number."""
    return changed(name, lambda own: own[byte].bitwise_xor_(bits))
