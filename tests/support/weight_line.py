"""Trainer side and rollout side of weight syncs with one engine, and the transport between them.

Everything but the bus is real: the trainer's sink, the update group, and the rollout actor's weight-sync handlers and
verification. A corruption may change each bucket in transit.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import anyio
import pytest
import torch
from torch import Tensor

from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights.sync import WeightSyncs, new_key
from actors.rollout.engines.weights.updater import Mode, Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import Updated, WeightVerifier
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineUnavailable
from actors.rollout.sglang.updates import WeightUpdates
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.weights.broadcast import JOIN_TIMEOUT_S, Broadcast, StageGroup
from actors.trainer.weights.calls import Ask
from actors.trainer.weights.engine_sums import Layout, SumsSink, expected_checksums, joined_sums
from actors.trainer.weights.engines import BucketTransport, EngineSink, Sent
from actors.trainer.weights.export import BucketWriter, Sink, weight_thread
from actors.trainer.weights.members import Membership
from actors.trainer.weights.shared_memory import Segments
from messages import (
    BucketSent,
    Message,
    WeightProbe,
    WeightsAnnounced,
    WeightSyncDecided,
    WeightSyncPrepared,
)
from runtime.models.checksums import engine_checksum
from runtime.settings.placement import UpdateLimits
from runtime.settings.tables.engines import Verify

ENGINE: Final = "engine-0"
LIMIT_S: Final = 60.0  # timeout of each wait for the other side
NUM_BUCKETS: Final = 4
CPU: Final = torch.device("cpu")

Transport = Literal["collective", "ipc"]


class Sending(NamedTuple):
    """A bucket in transit."""

    step: BucketSent
    flat: Tensor


Corruption = Callable[[Sending], Sequence[Sending]]  # returns what arrives instead
Tensors = dict[str, Tensor]


def as_it_is(sending: Sending) -> Sequence[Sending]:
    """Forward a bucket unchanged."""
    return [sending]


def drawn(model: Path, seed: int) -> Tensors:
    """Draw random weights for a model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.15 + float(name.endswith("norm.weight"))
        for name, shape in hf_shapes(read_hf_config(model)).items()
    }


def buckets_of(tensors: Tensors) -> list[list[tuple[str, Tensor]]]:
    """Split the weights into a few buckets."""
    named = list(tensors.items())
    size = -(-len(named) // NUM_BUCKETS)
    return [named[start : start + size] for start in range(0, len(named), size)]


class Line:
    """A transport to engines that applies a corruption."""

    def __init__(self, way: BucketTransport, corrupt: Corruption) -> None:
        self._way = way
        self._corrupt = corrupt

    def carry(
        self, step: BucketSent, flat: Tensor, ask: Ask, timeout_s: float, meanwhile: Callable[[], None]
    ) -> dict[str, str]:
        """Send a bucket after corruption."""
        meanwhile()
        failed: dict[str, str] = {}
        for told, arriving in self._corrupt(Sending(step, flat)):
            failed |= self._way.carry(told, arriving, ask, timeout_s, lambda: None)
        return failed


@contextmanager
def stuck_before(bucket: int) -> Iterator[Corruption]:
    """Have the trainer announce a bucket and then not broadcast it, in the block."""
    index, broadcast = -1, StageGroup.broadcast

    def send(group: StageGroup, flat: Tensor) -> "Future[None]":
        return Future[None]() if index == bucket else broadcast(group, flat)

    def note(sending: Sending) -> Sequence[Sending]:
        nonlocal index
        index = sending.step.index
        return [sending]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageGroup, "broadcast", send)
        yield note


class Halves:
    """Both sides of weight syncs with one engine. After a failure the engine counts as a new process, as in a run.

    Args:
        transport: Weight transport.
        mode: What an engine does with running requests during a sync.
        verify: How much of each weight update to verify.
        timeout_s: Timeout of each step, in seconds.
        layout: Of the engine, whose sums the trainer computes and sends. None: it sends none.
    """

    def __init__(
        self,
        client: SglangClient,
        url: str,
        model: Path,
        *,
        transport: Transport = "collective",
        mode: Mode = "retract",
        verify: Verify = "always",
        timeout_s: float = LIMIT_S,
        layout: Layout | None = None,
    ) -> None:
        self._layout = layout
        self._client = client
        self._verifier = verifier_of(client, mode, verify=verify, timeout_s=timeout_s)
        self._updates = WeightUpdates(client)
        self._url = url
        self._model = read_hf_config(model)
        self._target = FleetTarget()
        self._syncs = WeightSyncs(self._target, lambda: (ENGINE,))
        self._transport: Transport = transport
        self._timeout_s = timeout_s
        self._group: StageGroup | None = None  # reused as long as syncs succeed
        self._version = 0
        self.label = ""  # label of the engine's weights
        self.pause_s = 0.0  # seconds that the engine was paused in the last sync
        self.sent = Sent()  # what the trainer sent in the last sync
        self.refused: EngineError | None = None  # error of the rollout side in the last sync

    async def sync(
        self,
        tensors: Tensors,
        corrupt: Corruption = as_it_is,
        *,
        probe: WeightProbe | None = None,
        send: Callable[[Sink, Tensors], Sent] | None = None,
        within_s: float = LIMIT_S,
        ended: Callable[[], object] = lambda: None,
    ) -> dict[str, str]:
        """Send a new version in a weight sync. Return the reasons of failed engines.

        Args:
            tensors: Weights of the version.
            corrupt: Corruption applied to the buckets.
            probe: Weight probe of the version.
            send: Puts the weights into a sink. None: a few buckets.
            within_s: Time limit of the trainer side, in seconds.
            ended: Called after the sync if engines failed.
        """
        self._version += 1
        told = WeightsAnnounced(
            version=self._version,
            step=0,
            incarnation=1,
            path="",
            checksum="",
            size_bytes=1,
            probe=probe,
            transport=self._transport,
        )
        self._target.weights = told
        self.refused = None
        failed: dict[str, str] = {}
        with anyio.fail_after(2 * LIMIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._take, told)
                with anyio.fail_after(within_s):
                    failed |= await self._lead(tensors, corrupt, send or _send)
                if failed:
                    ended()
                    await self.leave()
        return failed

    async def holds(self, tensors: Tensors, layout: Layout) -> bool:
        """Whether the engine's checksum is the one that the oracle predicts of these weights."""
        predicted = engine_checksum(expected_checksums([list(tensors.items())], self._model, layout))
        return await self._client.checksum(self._url) == predicted

    async def leave(self) -> None:
        """Leave the update group on both sides."""
        if self._group is not None:
            group, self._group = self._group, None
            group.leave()
            with suppress(EngineUnavailable):  # the engine has ended
                await self._updates.destroy_group(self._url, group.spec.name, timeout_s=self._timeout_s)

    async def _take(self, told: WeightsAnnounced) -> None:
        shape = await self._verifier.shape(self._url, told, first=False)
        try:
            async with self._syncs.member(ENGINE, new_key(ENGINE), shape, told.version) as member:
                while not member.session:  # noqa: ASYNC110 - set by `prepared`, without an event
                    await anyio.sleep(0.001)
                update = self._verifier.update(ENGINE, self._url, told, first=False, member=member)
                _, self.label, self.pause_s = await carried_out(update)
                member.finish()
        except EngineError as error:
            self.refused = error

    async def _lead(
        self, tensors: Tensors, corrupt: Corruption, send: Callable[[Sink, Tensors], Sent]
    ) -> dict[str, str]:
        session = f"1.{self._version}"
        step = WeightSyncPrepared(session=session, incarnation=1, version=self._version, deadline_s=self._timeout_s)
        while (answer := await self._syncs.prepared(step)).pending:
            pass
        assert answer.failed == {}
        membership = Membership.of({"rollout.0": answer})
        assert membership.engines == (ENGINE,)
        loop = asyncio.get_running_loop()

        def ask(step: Message, timeout_s: float) -> "Future[dict[str, str]]":
            assert timeout_s in (self._timeout_s, self._timeout_s + JOIN_TIMEOUT_S)
            return asyncio.run_coroutine_threadsafe(self._ask(step), loop)

        line = Line(self._way(session, membership), corrupt)
        wanted = membership.is_compared
        sums = None if self._layout is None else SumsSink(self._model, self._layout)
        sink = EngineSink(session, 0, line, ask, fingerprints=wanted, timeout_s=self._timeout_s, sums=sums)
        sent = await anyio.to_thread.run_sync(send, sink, tensors)
        self.sent = sent
        return await self._end(session, sent)

    def _way(self, session: str, membership: Membership) -> BucketTransport:
        if self._transport == "ipc":
            return Segments(f"physarum-test-{uuid.uuid4().hex}-{session}", membership.readers)
        if self._group is None:
            world_size = membership.world_size
            self._group = StageGroup(uuid.uuid4().hex, "127.0.0.1", world_size, CPU, timeout_s=self._timeout_s)
        return Broadcast(self._group, (self._group.spec,), membership.offsets)

    async def _end(self, session: str, sent: Sent) -> dict[str, str]:
        if sent.failed:
            reason = "; ".join(sent.failed.values())
            await self._syncs.decided(WeightSyncDecided(session=session, is_commit=False, reason=reason))
            return sent.failed
        return await self._ask(
            WeightSyncDecided(
                session=session,
                is_commit=True,
                checksum=str(sent.fingerprints),
                num_buckets=sent.num_buckets,
                engine_sums=None if self._layout is None else joined_sums(self._layout, [sent.sums]),
            )
        )

    async def _ask(self, step: Any) -> dict[str, str]:
        while (answer := await self._syncs.step(step)).pending:
            assert not answer.failed
        return answer.failed


async def carried_out(update: AsyncGenerator[Updated]) -> Updated:
    """Carry out all steps of a weight update; return what its last one yielded."""
    async with aclosing(update) as steps:
        *_, last = [done async for done in steps]
    return last


def verifier_of(
    client: SglangClient,
    mode: Mode,
    *,
    verify: Verify = "always",
    timeout_s: float = LIMIT_S,
    trainer_dtype: str = "float32",
) -> WeightVerifier:
    """Make the verifier of a rollout actor without requests."""
    updater = Updater(client, mode, limits=UpdateLimits(stall_s=timeout_s))
    updater.interrupt_by(_nothing_to_interrupt)
    return WeightVerifier(client, updater, UpdateTracker(), verify=verify, trainer_dtype=trainer_dtype)


async def _nothing_to_interrupt(_url: str, _adapter: str | None) -> None:
    await anyio.sleep_forever()


def _send(sink: Sink, tensors: Tensors) -> Sent:
    with weight_thread() as thread:
        writer = BucketWriter([sink], thread)
        for bucket in buckets_of(tensors):
            writer.put(bucket)
        (sent,) = writer.close()
    return sent


# corruptions


def bytes_in(sending: Sending, name: str) -> tuple[Tensor, Tensor]:
    """Return a copy of a bucket's bytes, and the view of one tensor in it."""
    flat, start = sending.flat.clone(), 0
    for each, dtype, shape in zip(sending.step.names, sending.step.dtypes, sending.step.shapes, strict=True):
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        if each == name:
            return flat, flat[start : start + size]
        start += size
    raise KeyError(name)


def changed(name: str, change: Callable[[Tensor], object]) -> Corruption:
    """Change the bytes of a tensor in place."""

    def corrupt(sending: Sending) -> Sequence[Sending]:
        if name not in sending.step.names:
            return [sending]
        flat, own = bytes_in(sending, name)
        change(own)
        return [sending._replace(flat=flat)]

    return corrupt


def flipped(name: str, byte: int, bits: int) -> Corruption:
    """Flip bits of one byte of a tensor. Byte 0 is the lowest byte of its first element."""
    return changed(name, lambda own: own[byte].bitwise_xor_(bits))
