"""Weight syncs, led by rank 0: the announced version goes to all engines that are ready for it.

For each member, a weight sync ends in one of two ways. Either the member is verified to hold the version, or it is out
and requests another weight sync when it can. A failure of one member ends the weight sync for all members that cannot
finish without it. The weight sync is retried at once, with the engines that are ready then.

Late engines request a weight sync (`WeightSyncRequested`) and get the weights between train steps. While steps are
trained again after a crash, the weights do not match the newest version. Then there is no weight sync.

With several update groups (`update_groups`), each has its own weight sync, one after another. A failure in one update
group does not affect the others.

With async export (trainer.weight_export = "async"), each stage's first rank keeps a gathered copy of the newest version
on its host. The next version's copy replaces it. Weight syncs send this copy. On the CPU they run concurrently with
training: the engines' process groups use gloo, with its own threads and connections. On GPUs they run between train
steps. Kernels of two NCCL communicators deadlock if they wait for each other in another order on each rank.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from actors.trainer.torch_thread import TorchThread
from actors.trainer.weights.calls import POOL, ROLE, TRIES, ask_all
from actors.trainer.weights.members import Membership, Outcome, joined
from messages import WeightSyncAnswered, WeightSyncDecided, WeightSyncEnded, WeightSyncPrepared, WeightSyncRequested
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.roster import Roster
from runtime.models.checksums import combined
from runtime.settings.topology import Topology, answers_are_recorded
from runtime.util.retrying import Backoff

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank
    from actors.trainer.weights.engines import Sent

log = structlog.get_logger()

PREPARE_TIMEOUT_S: Final = 20.0  # of one call: rollout actors wait a while for their engines
ABORT_TIMEOUT_S: Final = 5.0
MAX_TRIES: Final = 5  # weight syncs of a version in a row; then engines request one
RETRY: Final = Backoff(first_s=0.2, max_s=2.0)


class WeightSessions:
    """Weight syncs of one trainer incarnation."""

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
        """Start before the first weight sync.

        Args:
            topology: topology of the run.
            bus: bus to call rollout actors on.
            torch_thread: thread that runs the rank's calls.
            rank: rank 0, which has the weights.
            incarnation: incarnation of the trainer.
            wake: called when engines have requested a weight sync.
        """
        pool = topology.engines.get(POOL)
        transport = "disk" if pool is None else pool.weight_transport
        self.transport = "disk" if transport == "http" else transport  # of announcements: "disk" is without a sync
        self._timeout_s = 0.0 if pool is None else pool.update_stall_s
        self._bus = bus
        self._roster = Roster(bus)
        self._torch_thread = torch_thread
        self._sending = rank.sending
        copies = topology.trainer.weight_export == "async" and not answers_are_recorded(topology)
        self.keeps = copies and self.are_needed  # keeps a copy of the weights, and sends that
        self.sends_in_background = self.keeps and topology.trainer.device == "cpu"  # not known to be safe with NCCL
        self._incarnation = incarnation
        self._wake = wake
        self._num_sessions = 0
        self._num_parts = 1 if pool is None else pool.update_groups
        self._epochs: dict[int, tuple[str, ...]] = {}  # of the open process groups, by update group
        self._bringing = anyio.Lock()
        self._version = 0  # of the current weights; 0: they are not an announced version
        self.is_requested = False
        self._at_work: dict[str, str] = {}  # what engines do that have not finished the current step

    @property
    def are_needed(self) -> bool:
        """Whether engines get the weights in weight syncs, not from files."""
        return self.transport != "disk"

    def waits_for(self) -> str:
        """Describe which engines are awaited; empty: none."""
        return "; ".join(f"{engine}, {doing}" if doing else engine for engine, doing in self._at_work.items())

    def weights_are(self, version: int) -> None:
        """Set the version of the current weights; 0: they are not an announced version."""
        self._version = version

    async def requested(self, request: WeightSyncRequested) -> WeightSyncAnswered:
        """Answer a rollout actor's request for a weight sync. Without one, newer weights are announced."""
        if not self.are_needed or request.version != self._version:
            reason = f"the trainer has no weights {request.version} to send"
            return WeightSyncAnswered(failed=dict.fromkeys(request.engines, reason))
        await self.ask()
        return WeightSyncAnswered()

    async def ask(self) -> None:
        """Request a weight sync."""
        self.is_requested = True
        await self._wake()

    async def keep(self) -> None:
        """Replace the kept copy by the gathered one, once no weight sync sends the old one."""
        async with self._bringing:
            self.weights_are(0)
            await self._torch_thread.run(self._sending.finish_copy)

    async def bring(self) -> None:
        """Sync the weights to all engines that are ready. Retries while one of them fails, MAX_TRIES times at most."""
        async with self._bringing:
            with anyio.CancelScope(shield=True):  # an interrupted weight sync is useless
                await self._bring()

    async def _bring(self) -> None:
        self.is_requested = False
        if not self.are_needed or not self._version:
            return
        for part in range(self._num_parts):
            await self._bring_part(part)

    async def _bring_part(self, part: int) -> None:
        """Sync the weights to one update group, while the other engines serve."""
        for failures in range(MAX_TRIES):
            begin = time.perf_counter()
            outcome = await self._session(part)
            if outcome is None:
                return
            await self._tell(outcome, time.perf_counter() - begin)
            if not outcome.out:
                return
            await anyio.sleep(RETRY.pause_s(failures + 1))

    async def _session(self, part: int) -> Outcome | None:
        """Run one weight sync with an update group. Returns None if no engine takes part, or the bus fails."""
        self._num_sessions += 1
        session = f"{self._incarnation}.{self._num_sessions}"
        outcome = await self._prepare(session, part)
        if not outcome.membership.members:
            return None
        try:
            if not outcome.failed:
                await self._lead(session, outcome)
        finally:
            if not outcome.is_finished:
                await self._abort(session, outcome)
        return None if outcome.is_cut_off else outcome

    async def _prepare(self, session: str, part: int) -> Outcome:
        """Have all rollout actors prepare their engines, and wait for engines at work. Their last answers count.

        A rollout actor that restarts meanwhile answers with the engines that it found. Engines of one that does not
        answer take no part. If the bus fails, those that answered before must be aborted: their engines may be paused.
        """
        prepared: Mapping[str, WeightSyncAnswered] = {}
        step = WeightSyncPrepared(
            session=session,
            incarnation=self._incarnation,
            version=self._version,
            deadline_s=self._timeout_s,
            part=part,
            num_parts=self._num_parts,
        )
        while True:
            try:
                asked = await self._roster.call_all(ROLE, step, WeightSyncAnswered, timeout_s=PREPARE_TIMEOUT_S)
            except BusError as error:  # engines request a weight sync once the bus is back
                log.warning("weight_sync_not_prepared", error=str(error))
                self._note_at_work({})
                return Outcome(Membership.of(prepared, part), {"": str(error)}, is_cut_off=True)
            for instance, reason in asked.refused.items():
                log.warning("weight_sync_not_prepared", instance=instance, reason=reason)
            prepared = {**prepared, **asked.answers}
            answers = asked.answers.values()
            self._note_at_work({engine: doing for answer in answers for engine, doing in answer.pending.items()})
            if not self._at_work:
                failed = joined([answer.failed for answer in answers])
                return Outcome(Membership.of(asked.answers, part), failed)

    async def _lead(self, session: str, outcome: Outcome) -> None:
        membership = outcome.membership
        if self.transport == "collective" and membership.epoch != self._epochs.get(membership.part):
            await self._open_groups(session, membership)
        sent = await self._send(session, membership)
        outcome.num_buckets = sum(each.num_buckets for each in sent)
        outcome.sent_bytes = sum(each.size_bytes for each in sent)
        outcome.failed |= joined([each.failed for each in sent])
        if outcome.failed:
            return
        fingerprints = {name: each for share in sent for name, each in share.fingerprints.items()}
        identity = combined(fingerprints).total if membership.is_compared else ""
        engine_sums, no_sums = self._sending.sums_of(sent)
        commit = WeightSyncDecided(
            session=session,
            is_commit=True,
            checksum=identity,
            num_buckets=outcome.num_buckets,
            engine_sums=engine_sums,
            no_sums=no_sums,
        )
        outcome.is_finished = True
        outcome.failed |= await ask_all(
            self._bus, membership.instances, commit, self._timeout_s, times=TRIES, at_work=self._note_at_work
        )

    async def _send(self, session: str, membership: Membership) -> "list[Sent]":
        run, to = self._torch_thread.run, (session, membership, self._timeout_s)
        if not self.keeps:
            return await run(self._sending.send, *to)
        sending = await run(self._sending.send_copy, *to, version=self._version, in_background=self.sends_in_background)
        await asyncio.wrap_future(sending)
        return await run(self._sending.finish_send)

    def _note_at_work(self, engines: dict[str, str]) -> None:
        self._at_work = dict(engines)

    async def _open_groups(self, session: str, membership: Membership) -> None:
        """Open process groups for the members, in place of the old ones. They join with the first bucket."""
        name = f"physarum-{self._bus.run}-{session}"
        await self._torch_thread.run(
            self._sending.open_groups, name, membership.part, membership.world_size, self._timeout_s
        )
        self._epochs[membership.part] = membership.epoch

    async def _abort(self, session: str, outcome: Outcome) -> None:
        """End a weight sync that cannot finish, and its process groups: an engine may be waiting in a broadcast."""
        part = outcome.membership.part
        self._epochs.pop(part, None)
        await self._torch_thread.run(self._sending.leave_groups, part)
        reason = "; ".join(dict.fromkeys(outcome.failed.values())) or "the trainer ended it"
        abort = WeightSyncDecided(session=session, is_commit=False, reason=reason)
        await ask_all(self._bus, outcome.membership.instances, abort, ABORT_TIMEOUT_S)

    async def _tell(self, outcome: Outcome, took_s: float) -> None:
        ended = WeightSyncEnded(
            session=f"{self._incarnation}.{self._num_sessions}",
            incarnation=self._incarnation,
            version=self._version,
            transport=self.transport,
            holds=outcome.holds,
            out=outcome.out,
            num_buckets=outcome.num_buckets,
            sent_bytes=outcome.sent_bytes,
            took_s=took_s,
            part=outcome.membership.part,
        )
        log.info("weight_sync_ended", weight_version=self._version, holds=len(ended.holds), out=ended.out)
        await self._bus.publish(ended)
