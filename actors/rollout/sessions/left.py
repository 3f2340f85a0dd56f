"""Sessions that an earlier process of this rollout actor left: their programs go on, and wait for their groups."""

from collections.abc import Iterable, Sequence
from typing import Final

import anyio
import structlog

from actors.rollout.samples.conversation import Conversation
from actors.rollout.sessions.notes import LeftSession
from actors.rollout.sessions.opened import OpenSessions
from messages import SampleSummary
from runtime.ledger.groups import closed_by
from runtime.sessions.programs import CONNECT_S, Programs

log = structlog.get_logger()

ENDED: Final = "its rollout actor ended, and its program too"


class LeftSessions:
    """Sessions of a dead predecessor, by sample, until their samples are delivered again.

    Args:
        programs: names and stops their programs.
        sessions: of this actor, which hold their requests meanwhile.
        limit_s: time that they wait, in seconds; then they end.
    """

    def __init__(self, programs: Programs, sessions: OpenSessions, *, limit_s: float) -> None:
        self._programs, self._sessions, self._limit_s = programs, sessions, limit_s
        self._left: dict[tuple[int, int], LeftSession] = {}
        self._found = anyio.Event()
        self._closed: set[int] = set()  # groups; before the sessions are found, all of them
        self._changed = anyio.Event()

    async def find(self) -> None:
        """Get the sessions, once there is a process of programs. Those of evaluations end: they begin again."""
        for held in await self._programs.found():
            left = LeftSession.of(held)
            if left.about.group_id is None:
                await self._programs.stop(held.session)
                continue
            self._left[left.about.group_id, left.about.index] = left
            self._sessions.expect(left.about.keys)
            log.info("session_left", group_id=left.about.group_id, index=left.about.index, turns=len(left.turns))
        self._closed &= {group_id for group_id, _ in self._left}
        self._found.set()

    async def run(self) -> None:
        """End sessions whose groups were closed, and after the limit all that are left. Never returns."""
        await self._found.wait()
        with anyio.move_on_after(self._limit_s):
            while True:
                self._changed = anyio.Event()
                closed, self._closed = self._closed, set()
                await self._end([key for key in self._left if key[0] in closed])
                await self._changed.wait()
        await self._end([*self._left])
        await anyio.sleep_forever()

    def note(self, event: object) -> None:
        """Note an event of the log: sessions of groups that were closed end."""
        group_ids, _ = closed_by(event)
        if not self._found.is_set():
            self._closed.update(group_ids)
        elif closed := {group_id for group_id, _ in self._left}.intersection(group_ids):
            self._closed |= closed
            self._changed.set()

    async def continued(self, group_id: int, carried: Sequence[SampleSummary]) -> tuple[SampleSummary, ...]:
        """Return what a group that is delivered carries: of the samples of left sessions, what these noted."""
        with anyio.move_on_after(CONNECT_S):
            await self._found.wait()
        left = {index: one for (group, index), one in self._left.items() if group == group_id}
        others = [one for one in carried if one.index not in left]
        own = [summary for one in left.values() for summary in one.stored(carried)]
        return tuple(sorted((*others, *own), key=lambda one: (one.index, one.part)))

    async def take(self, conversation: Conversation) -> LeftSession | str:
        """Return the session of a sample that is generated now, or why none goes on; empty: it begins."""
        left = None
        if conversation.group_id is not None:
            left = self._left.pop((conversation.group_id, conversation.index), None)
        if left is None:
            return ENDED if conversation.has_recorded_turns else ""
        if not (problem := _problem(left, conversation)):
            return left
        await self._stop(left)
        return problem

    async def _end(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in keys:
            if (left := self._left.pop(key, None)) is not None:
                log.info("left_session_ended", group_id=key[0], index=key[1])
                await self._stop(left)

    async def _stop(self, left: LeftSession) -> None:
        await self._sessions.revoke(left.about.keys.session)
        await self._programs.stop(left.about.keys.session)


def _problem(left: LeftSession, conversation: Conversation) -> str:
    """Return why a sample cannot go on with a session; empty: it can."""
    if left.notes is None:
        return "its rollout actor ended, and the notes of its session were too large to hold"
    recorded = conversation.recorded_turns
    for part in {turn.part for turn in left.turns}:
        noted = sum(turn.part == part for turn in left.turns)
        if noted > recorded.get(part, 0):
            return f"its rollout actor ended, and {recorded.get(part, 0)} of {noted} turns are stored"
    return ""
