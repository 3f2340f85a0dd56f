"""An engine's side of a weight sync, step by step: buckets by broadcast, or from shared memory by name.

For a broadcast, engine and trainer share torch process groups, one per pipeline stage.

An engine's scheduler blocks inside a broadcast for up to half an hour; that timeout is fixed. If the trainer leaves
before the first byte, the broadcast fails at once; if it leaves in the middle, the engine keeps waiting. So an engine
that is still in a broadcast when its weight sync or the deadline is over counts as hung, and is killed.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import anyio
import structlog

from actors.rollout.engines.weights.sync import SyncMember
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineFailed, EngineSilent, RequestRefused
from actors.rollout.sglang.updates import BucketLayout, GroupAddress, WeightUpdates
from messages import BucketSent, WeightSyncDecided, WeightSyncPrepared
from runtime.bus.background import in_background

log = structlog.get_logger()

CLOSE_S: Final = 5.0
SEGMENTS: Final = Path("/dev/shm")  # where Linux lists shared memory by name
NUM_BITS: Final = re.compile(r"\d+")  # in the name of a type
GRACE_S: Final = 5.0  # for an engine to notice that the trainer has left


class UpdateGroups:
    """The update groups (torch process groups) that engines have joined."""

    def __init__(self, updates: WeightUpdates, timeout_s: float) -> None:
        """Start without groups; `timeout_s` is the timeout of each call to an engine."""
        self._updates = updates
        self._timeout_s = timeout_s
        self._joined: dict[str, tuple[str, ...]] = {}  # by engine URL; may belong to an earlier process of the engine

    async def take(self, url: str, step: BucketSent, offset: int) -> None:
        """Make an engine receive a broadcast bucket, in its groups: before the first one it joins them.

        Args:
            url: of the engine.
            step: the bucket.
            offset: the engine's first rank in the groups.

        Raises:
            EngineError: it did not join or receive.
        """
        if self._joined.get(url) != tuple(group.name for group in step.groups):
            await self._join(url, step, offset)
        layout = BucketLayout(step.names, step.dtypes, step.shapes)
        group = step.groups[step.stage].name
        await self._updates.update_from_distributed(url, group, layout, timeout_s=self._timeout_s)

    async def _join(self, url: str, step: BucketSent, offset: int) -> None:
        """Make an engine join the groups of all stages, after leaving its earlier ones."""
        for name in self._joined.pop(url, ()):
            try:
                await self._updates.destroy_group(url, name, timeout_s=self._timeout_s)
            except RequestRefused as error:  # the process is new, or the trainer died before it joined
                log.info("update_group_not_left", url=url, group=name, error=str(error))
        self._joined[url] = tuple(group.name for group in step.groups)
        for group in step.groups:
            address = GroupAddress(group.name, group.address, group.port, group.world_size, group.backend)
            await self._updates.init_group(url, address, rank_offset=offset, timeout_s=self._timeout_s)


class Receiver:
    """Makes engines receive the tensors of a weight sync."""

    def __init__(self, client: SglangClient, timeout_s: float, note: Callable[[str, str], None]) -> None:
        """Set up without any IO.

        Args:
            client: for the engines.
            timeout_s: timeout of each step of an engine.
            note: called with an engine's URL and what it does.
        """
        self._note = note
        self._client = client
        self._updates = WeightUpdates(client)
        self._timeout_s = timeout_s
        self._groups = UpdateGroups(self._updates, timeout_s)

    async def receive(self, url: str, member: SyncMember, label: str) -> WeightSyncDecided:
        """Receive all tensors of a weight sync. The engine is paused meanwhile.

        The label is set first: from the first bucket on the engine holds neither the old nor the new weights.

        Args:
            url: of the engine.
            member: its membership, past the step WeightSyncPrepared.
            label: the engine's new weight label.

        Raises:
            EngineError: the engine did not receive the tensors, or the weight sync was closed.
        """
        await self._client.update_version(url, label)
        await self._open(url)
        try:
            received: dict[int, int] = {}  # buckets received, by pipeline stage
            while not isinstance(step := await member.next(), WeightSyncDecided):
                if isinstance(step, WeightSyncPrepared):
                    raise EngineFailed(f"{url}: weight sync {member.session} was prepared twice")
                await self._take(url, member, step)
                _count(member, received, step)  # only after success: the trainer takes part in the same broadcast
                member.received_bytes += bytes_in(step)
                num_buckets = sum(received.values())
                self._note(url, f"received {num_buckets} buckets, {member.received_bytes / 1e9:,.1f} GB")
            if sum(received.values()) != step.num_buckets:
                raise EngineFailed(
                    f"{member.engine}: received {sum(received.values())} of {step.num_buckets} buckets"
                    f" of weight sync {member.session}"
                )
        except EngineError as error:
            member.fail(str(error))  # before the cleanup: the trainer may be waiting in a broadcast
            await self._close(url)
            raise
        await self._updates.end_update(url, timeout_s=self._timeout_s)
        return step

    async def _close(self, url: str) -> None:
        """Close an unfinished update; if the engine does not respond, its health is checked afterwards."""
        try:
            await self._updates.end_update(url, timeout_s=CLOSE_S)
        except EngineError as error:
            log.warning("weight_sync_left_open", url=url, error=str(error))

    async def _open(self, url: str) -> None:
        """Open an update on the engine, closing one that a crash has left open."""
        try:
            await self._updates.begin_update(url, timeout_s=self._timeout_s)
        except RequestRefused as error:
            log.warning("weight_sync_found_open", url=url, error=str(error))
            await self._updates.end_update(url, timeout_s=self._timeout_s)
            await self._updates.begin_update(url, timeout_s=self._timeout_s)

    async def _take(self, url: str, member: SyncMember, step: BucketSent) -> None:
        """Receive a bucket, which may wait for the trainer.

        Raises:
            EngineSilent: the weight sync was closed, and the engine still waits.
        """
        with anyio.CancelScope() as scope:
            async with in_background(lambda: _cut_when_over(member, scope)):
                if step.payloads:
                    await read_segments(self._updates, url, step, step.payloads[member.engine], self._timeout_s)
                else:
                    await self._groups.take(url, step, step.offsets[member.engine])
        if scope.cancelled_caught:
            raise EngineSilent(f"{url}: is still in weight sync {member.session}, which was closed")


async def read_segments(
    updates: WeightUpdates, url: str, step: BucketSent, payloads: Sequence[str], timeout_s: float
) -> None:
    """Make an engine read a bucket from shared memory.

    On a failure, removes the bucket's segments here: the trainer normally does that, but it may have died.

    Raises:
        EngineError: the engine did not read it.
    """
    try:
        await updates.update_from_tensor(url, payloads, timeout_s=timeout_s)
    except EngineError:
        for name in step.segments:
            (SEGMENTS / name).unlink(missing_ok=True)
        raise


def _count(member: SyncMember, received: dict[int, int], step: BucketSent) -> None:
    """Count a received bucket.

    Raises:
        EngineFailed: it is not the next bucket of its stage.
    """
    due = received.get(step.stage, 0)
    if step.index != due:
        raise EngineFailed(
            f"{member.engine}: received bucket {step.index} of stage {step.stage}, expected bucket {due}"
        )
    received[step.stage] = due + 1


def bytes_in(step: BucketSent) -> int:
    """Return the size of a bucket's tensors in bytes."""
    sizes = (_item_size(dtype) * math.prod(shape) for dtype, shape in zip(step.dtypes, step.shapes, strict=True))
    return sum(sizes)


def _item_size(dtype: str) -> int:
    """Return the bytes of an element, from torch's name of its type: "bfloat16", "float8_e4m3fn"."""
    found = NUM_BITS.search(dtype)
    return max(1, int(found.group()) // 8) if found else 1


async def _cut_when_over(member: SyncMember, scope: anyio.CancelScope) -> None:
    await member.over.wait()
    await anyio.sleep(GRACE_S)
    scope.cancel()
