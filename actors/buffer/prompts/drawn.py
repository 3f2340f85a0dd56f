"""Prompts of a data source with a state: a user's class draws rows, and gets the outcomes of prompt groups.

The rows of an issue and the state after them are stored on the data plane before the issue is appended to the ledger,
which cites them. So a restart goes on from the state of the newest issue, and finds the row of every live group. What
the class drew for an issue that was not appended is drawn again.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from actors.buffer.prompts.prompts import LoadedData, Reader
from actors.buffer.prompts.source_process import SourceProcess
from actors.buffer.prompts.source_worker import SavedState
from messages import DrawsStored, GroupsIssued, Plane, Prompt, PromptsLoaded
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost
from runtime.data.data_files import DataError, Record
from runtime.data.rows import row_of
from runtime.ledger.state import LedgerState
from runtime.settings.tables.prompts import DataConfig

CHUNK_BYTES: Final = 512 << 10
NOWHERE: Final = 2**63  # a sequence that no stream reaches


class Draws(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that the class drew for one issue, and its state after them: what the chunks of DrawsStored hold."""

    first: int  # number of the first row
    rows: tuple[bytes, ...]  # JSON objects
    state: SavedState


class PendingDraws(msgspec.Struct, frozen=True, kw_only=True):
    """Draws of an issue that is not in the ledger yet."""

    draws: Draws
    num_told: int  # outcomes that the class got before
    content: bytes  # encoded draws


class DrawnPrompts:
    """Training prompts that a class draws, by number, and the evaluation sets.

    Only prompts of live groups and of the next issue are known.
    """

    def __init__(
        self, source: SourceProcess, data: DataConfig, reader: Reader, evals: Sequence[LoadedData] = ()
    ) -> None:
        """Start the process of the class.

        Raises:
            DataError: the class cannot be used.
        """
        began = time.monotonic()
        source.start()
        self._source, self._data, self._reader = source, data, reader
        self._state: SavedState | None = None  # after the newest issue in the ledger; None: the beginning
        self._rows: dict[int, bytes] = {}  # of live groups, by number
        self._pending: PendingDraws | None = None
        self.needed_from = NOWHERE  # data messages from this sequence on must not be purged
        event = PromptsLoaded(data=data.name, num_prompts=0, num_too_long=0, took_s=time.monotonic() - began)
        self.evals: Mapping[str, tuple[Prompt, ...]] = {item.name: item.prompts for item in evals}
        self.loaded = (event, *(item.event for item in evals))

    def prompt(self, number: int) -> Prompt:
        """The prompt with this number.

        Raises:
            DataError: the row cannot be used.
        """
        return prompt_of(number, self._row(number), self._data, self._reader)

    def _row(self, number: int) -> bytes:
        pending = self._pending
        if pending is not None and 0 <= number - pending.draws.first < len(pending.draws.rows):
            return pending.draws.rows[number - pending.draws.first]
        return self._rows[number]

    async def resume(self, bus: Bus, state: LedgerState) -> None:
        """Read the state of the newest issue, and the rows of live groups.

        Raises:
            PayloadLost: they are not stored any more.
        """
        wanted = {group.prompt for group in state.groups.values()}
        stored = {group.draws for group in state.groups.values() if group.draws} | {state.draws} - {()}
        for seqs in sorted(stored):
            content = b"".join([(await bus.fetch(DrawsStored, seq)).content for seq in seqs])
            is_newest = seqs == state.draws
            if is_newest and hashlib.sha256(content).hexdigest() != state.draws_digest:
                raise PayloadLost(f"data messages {seqs} are not the draws that the ledger names")
            try:
                draws = msgspec.msgpack.decode(content, type=Draws)
            except msgspec.MsgspecError as error:
                raise PayloadLost(f"data messages {seqs} hold no draws: {error}") from error
            self._rows |= {number: row for number, row in enumerate(draws.rows, draws.first) if number in wanted}
            self._state = draws.state if is_newest else self._state

    def is_drawn(self, issue: GroupsIssued, state: LedgerState) -> bool:
        """Whether the new prompts of an issue are drawn already, because it had to wait."""
        new, pending = _new_numbers(issue, state), self._pending
        if not new:
            return True
        return pending is not None and (pending.draws.first, len(pending.draws.rows)) == (new[0], len(new))

    def draw(self, issue: GroupsIssued, state: LedgerState) -> None:
        """Tell the class all outcomes that it does not have, and draw the new prompts of an issue. For a thread.

        Raises:
            DataError: the class raises, hangs, or returns what cannot be used.
        """
        new, outcomes = _new_numbers(issue, state), state.outcomes
        drawn = self._source.draw(new[0], len(new), outcomes, state=self._state)
        assert drawn.state is not None
        draws = Draws(first=new[0], rows=drawn.rows, state=drawn.state)
        self._pending = PendingDraws(draws=draws, num_told=len(outcomes), content=msgspec.msgpack.encode(draws))

    @property
    def pending_bytes(self) -> int:
        """Bytes that `citing` will store."""
        return 0 if self._pending is None else len(self._pending.content)

    async def citing(self, bus: Bus, issue: GroupsIssued, state: LedgerState) -> GroupsIssued:
        """Store the draws of an issue, and return the issue citing them; call `settled` once it is folded.

        Raises:
            StreamFull: the data stream has no room for them.
        """
        pending = self._pending
        if pending is None or not _new_numbers(issue, state):
            return issue
        self.needed_from = min(self.needed_from, (await bus.state(Plane.DATA)).last_seq + 1)
        content, first = pending.content, pending.draws.first
        parts = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
        seqs = [
            await bus.publish(DrawsStored(first=first, part=part, num_parts=len(parts), content=piece))
            for part, piece in enumerate(parts)
        ]
        digest = hashlib.sha256(content).hexdigest()
        return msgspec.structs.replace(issue, draws=tuple(seqs), draws_digest=digest, num_told=pending.num_told)

    def folded(self, issue: GroupsIssued, state: LedgerState) -> None:
        """Go on from the draws of an issue that the ledger has now. Forgets the rows of groups that have ended."""
        pending = self._pending
        if not issue.draws or pending is None:
            return
        live = {group.prompt for group in state.groups.values()}
        self._rows |= dict(enumerate(pending.draws.rows, pending.draws.first))
        self._rows = {number: row for number, row in self._rows.items() if number in live}
        self._state, self._pending = pending.draws.state, None

    def settled(self) -> None:
        """End the protection of stored draws: the ledger protects those that it cites."""
        self.needed_from = NOWHERE

    def close(self) -> None:
        """End the process of the class."""
        self._source.kill()


def _new_numbers(issue: GroupsIssued, state: LedgerState) -> list[int]:
    return [group.prompt for group in issue.groups if group.prompt >= state.next_prompt]


def prompt_of(number: int, row: bytes, data: DataConfig, reader: Reader) -> Prompt:
    """The prompt of a row that a class drew.

    Raises:
        DataError: the row cannot be used.
    """
    place = f"{data.source_class}: draw({number})"
    columns = msgspec.json.decode(row, type=dict[str, Any])
    (prompt,) = reader.read([row_of(Record(number=number, place=place, columns=columns), data)], data)
    if (problem := reader.too_long(prompt)) is not None:
        raise DataError(f"{place}: {problem}")
    return prompt
