"""Rank 0 leads weight sessions: the version that was announced goes to all engines that stand ready for it.

A session ends for each member in one of two ways: it proved to hold the version, or it is out, and asks for another one
when it can. What fails for one ends the session for all that could not finish without it; it is tried again at once,
with those that stand ready then. Engines that came late ask (`SessionRequested`); they are brought the weights between
train steps. While the weights are not those of the newest version, as where steps are trained again after a crash,
nobody is brought any.
"""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from actors.trainer.sending.asking import ROLE, TRIES, ask_all
from actors.trainer.sending.session import Membership, Outcome, joined, of_all_stages
from actors.trainer.torch_thread import TorchThread
from messages import (
    GroupsOffered,
    MembersGiven,
    Message,
    SessionClosed,
    SessionEnded,
    SessionFinished,
    SessionGranted,
    SessionOffered,
    SessionPrepared,
    SessionRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.roster import Roster
from runtime.checksums import combined
from runtime.retrying import Backoff
from runtime.settings.topology import Topology

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank

log = structlog.get_logger()

POOL: Final = "policy"  # the engines that are given weights
OFFER_TIMEOUT_S: Final = 20.0  # rollout actors wait a while for their engines
CLOSE_TIMEOUT_S: Final = 5.0
MAX_TRIES: Final = 5  # of a version, one after the other; then engines ask
RETRY: Final = Backoff(first_s=0.2, max_s=2.0)


class WeightSessions:
    """The sessions of one incarnation of the trainer."""

    def __init__(
        self,
        topology: Topology,
        bus: Bus,
        torch_thread: TorchThread,
        rank: "TrainerRank",
        *,
        incarnation: int,
        wake: Callable[[], Awaitable[None]],
    ) -> None:
        """None was led yet.

        Args:
            topology: of the run.
            bus: to ask rollout actors on.
            torch_thread: where the rank's calls run.
            rank: has the weights.
            incarnation: of the trainer.
            wake: called when engines have asked for a session.
        """
        pool = topology.engines.get(POOL)
        self.transport = "disk" if pool is None else pool.weight_transport
        self._timeout_s = 0.0 if pool is None else pool.update_timeout_s
        self._bus = bus
        self._roster = Roster(bus)
        self._torch_thread = torch_thread
        self._rank = rank
        self._incarnation = incarnation
        self._wake = wake
        self._num_sessions = 0
        self._epoch: tuple[str, ...] = ()  # of the groups that there are
        self._bringing = anyio.Lock()
        self._version = 0  # that the weights are; 0: none that was announced
        self.is_requested = False

    @property
    def are_needed(self) -> bool:
        """Whether engines cannot read the weights by themselves."""
        return self.transport != "disk"

    def weights_are(self, version: int) -> None:
        """Say of which version the weights are from now on; 0: of none that was announced."""
        self._version = version

    async def requested(self, request: SessionRequested) -> SessionGranted:
        """Note that engines ask for a session."""
        granted = self.are_needed and request.version == self._version
        if granted:
            self.is_requested = True
            await self._wake()
        return SessionGranted(granted=granted)

    async def bring(self) -> None:
        """Bring the weights to all engines that stand ready for them; again, as long as one of these fails."""
        async with self._bringing:
            with anyio.CancelScope(shield=True):  # half a session is of no use to anybody
                await self._bring()

    async def _bring(self) -> None:
        self.is_requested = False
        if not self.are_needed or not self._version:
            return
        for failures in range(MAX_TRIES):
            begin = time.perf_counter()
            outcome = await self._session()
            if outcome is None:
                return
            await self._tell(outcome, time.perf_counter() - begin)
            if not outcome.out:
                return
            await anyio.sleep(RETRY.pause_s(failures + 1))

    async def _session(self) -> Outcome | None:
        """Lead one session; nothing when no engine takes part."""
        self._num_sessions += 1
        session = f"{self._incarnation}.{self._num_sessions}"
        offer = SessionOffered(
            session=session, incarnation=self._incarnation, version=self._version, deadline_s=self._timeout_s
        )
        offered = await self._roster.call_all(ROLE, offer, MembersGiven, timeout_s=OFFER_TIMEOUT_S)
        for instance, reason in offered.refused.items():
            log.warning("weight_session_not_taken", instance=instance, reason=reason)
        outcome = Outcome(Membership.of(offered.answers))
        if not outcome.membership.members:
            return None
        try:
            await self._lead(session, outcome)
        finally:
            if not outcome.is_finished:
                await self._abandon(session, outcome)
        return outcome

    async def _lead(self, session: str, outcome: Outcome) -> None:
        membership = outcome.membership
        if not await self._all_do(outcome, SessionPrepared(session=session)):
            return
        has_groups = self.transport != "collective" or membership.epoch == self._epoch
        if not has_groups and not await self._meet(session, outcome):
            return
        sent = await self._torch_thread.run(self._rank.send, session, membership, self._timeout_s)
        outcome.num_buckets = sum(each.num_buckets for each in sent)
        outcome.sent_bytes = sum(each.size_bytes for each in sent)
        outcome.failed |= joined([each.failed for each in sent])
        if outcome.failed:
            return
        identity = combined({name: each for share in sent for name, each in share.fingerprints.items()}).total
        expected = of_all_stages([share.expected for share in sent])
        finish = SessionFinished(session=session, checksum=identity, num_buckets=outcome.num_buckets, expected=expected)
        outcome.is_finished = True
        await self._all_do(outcome, finish, times=TRIES)

    async def _all_do(self, outcome: Outcome, step: Message, *, times: int = 1) -> bool:
        """Have all members do a step; whether all did."""
        outcome.failed |= await ask_all(self._bus, outcome.membership.instances, step, self._timeout_s, times=times)
        return not outcome.failed

    async def _meet(self, session: str, outcome: Outcome) -> bool:
        """Make groups with the members, in place of those that there are; whether all came."""
        membership = outcome.membership
        self._epoch = ()
        name = f"physarum-{self._bus.run}-{session}"
        groups = await self._torch_thread.run(self._rank.open_groups, name, membership.world_size, self._timeout_s)
        offer = GroupsOffered(session=session, groups=tuple(groups), offsets=membership.offsets)
        async with anyio.create_task_group() as group:
            group.start_soon(self._all_do, outcome, offer)
            failed = await self._torch_thread.run(self._rank.join_groups)
            if failed:
                outcome.failed.setdefault("", f"the groups were not joined: {'; '.join(failed)}")
                await self._torch_thread.run(self._rank.leave_groups)  # engines that wait in them fail
        if not outcome.failed:
            self._epoch = membership.epoch
        return not outcome.failed

    async def _abandon(self, session: str, outcome: Outcome) -> None:
        """End a session that cannot be finished, and the groups: some engine may wait in a broadcast."""
        self._epoch = ()
        await self._torch_thread.run(self._rank.leave_groups)
        reason = "; ".join(dict.fromkeys(outcome.failed.values())) or "the trainer leaves"
        close = SessionClosed(session=session, reason=reason)
        await ask_all(self._bus, outcome.membership.instances, close, CLOSE_TIMEOUT_S)

    async def _tell(self, outcome: Outcome, took_s: float) -> None:
        ended = SessionEnded(
            session=f"{self._incarnation}.{self._num_sessions}",
            incarnation=self._incarnation,
            version=self._version,
            transport=self.transport,
            holds=outcome.holds,
            out=outcome.out,
            num_buckets=outcome.num_buckets,
            sent_bytes=outcome.sent_bytes,
            took_s=took_s,
        )
        log.info("weight_session_ended", weight_version=self._version, holds=len(ended.holds), out=ended.out)
        await self._bus.publish(ended)
