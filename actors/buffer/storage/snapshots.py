"""Stores the ledger's snapshots, and protects their chunks from purging."""

from typing import Final

import msgspec
import structlog
from anyio import to_thread

from messages import Message, SnapshotChunk, SnapshotTaken
from runtime.bus.bus import Bus
from runtime.bus.errors import MessageRefused, StreamFull
from runtime.bus.limits import KIB
from runtime.ledger.fold import FOLD_VERSION, LedgerState
from runtime.ledger.snapshots import PackedState, pack_state, with_content

log = structlog.get_logger()

NOWHERE: Final = 2**63  # a sequence that no stream reaches
IN_EVENT_BYTES: Final = 64 * KIB  # compressed; a larger state is stored in chunks
KEPT: Final = 2  # snapshots with protected chunks: if the newest cannot be read, the one before it is used


class SnapshotStore:
    """Stores the state of a snapshot before its event, as PromptStore does with prompts."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: list[SnapshotTaken] = []
        self._stored = NOWHERE  # first chunk of a snapshot whose event is not folded yet

    async def with_state(self, event: SnapshotTaken, state: LedgerState) -> SnapshotTaken:
        """Store the state; return the event that holds or cites it. Call `settled` once the event is folded.

        The state must not change meanwhile. If the data stream takes no chunks, the state is in the event.
        """
        packed = await to_thread.run_sync(pack_state, state)
        if packed.size > IN_EVENT_BYTES:
            try:
                chunks = await self._store(event, packed)
            except (MessageRefused, StreamFull) as error:
                log.warning("snapshot_not_in_chunks", covers=event.covers, reason=str(error))
            else:
                return msgspec.structs.replace(event, chunks=chunks, digest=packed.digest)
        return with_content(event, packed)

    async def _store(self, event: SnapshotTaken, packed: PackedState) -> tuple[int, ...]:
        chunks: list[int] = []
        for part, content in enumerate(packed.chunks):
            chunk = SnapshotChunk(covers=event.covers, part=part, num_parts=len(packed.chunks), content=content)
            chunks.append(await self._bus.publish(chunk))
            self._stored = min(self._stored, *chunks)
        return tuple(chunks)

    def settled(self) -> None:
        """End the protection of chunks without an event: it is folded, or was not appended."""
        self._stored = NOWHERE

    def folded(self, event: Message) -> None:
        """Protect the chunks of a snapshot in the log instead of those of the oldest one."""
        if isinstance(event, SnapshotTaken) and event.fold_version == FOLD_VERSION:
            self._kept = [*self._kept, event][-KEPT:]

    def needed_from(self, *, short: bool) -> int:
        """The oldest data message that a protected snapshot needs.

        Args:
            short: the data stream fills up, so that only the newest snapshot is protected.
        """
        kept = self._kept[-1:] if short else self._kept
        return min([self._stored, *(seq for event in kept for seq in event.chunks)])
