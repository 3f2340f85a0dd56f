"""One inference engine: lifecycle and control calls. Its state machine is in states.py."""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial

import anyio
import structlog

from actors.rollout.engines.crashes import CrashCause, RecentCrashes, was_killed
from actors.rollout.engines.dispatch import Dispatch
from actors.rollout.engines.external import ServerRequirements
from actors.rollout.engines.liveness import answered, check_engine, makes_tokens
from actors.rollout.engines.memory.levels import MemoryLevel
from actors.rollout.engines.memory.share import MemoryReclaimed, MemoryShare
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.reconcile import Actual, NextStep, Wanted, next_step
from actors.rollout.engines.registration import Registration, wait_until
from actors.rollout.engines.states import Trigger, accepts_requests, is_published, may_continue, next_state
from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights.copies import UNCHECKED, FileSource
from actors.rollout.engines.weights.files import WeightsDamaged
from actors.rollout.engines.weights.rolling import RollingUpdate
from actors.rollout.engines.weights.sync import SyncMember, WeightSyncs, new_key
from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.engines.weights.verifier import WeightVerifier, nothing
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineSilent, EngineUnavailable, is_away
from messages import EngineState, WeightsAnnounced
from runtime.util.retrying import Backoff

log = structlog.get_logger()

LOST = (EngineState.GONE, EngineState.SUSPECT)
SUSPECT_LOOK_S = 5.0  # time for a hung engine to generate a token
QUARANTINE = Backoff(first_s=60.0, max_s=600.0)  # wait before a quarantined engine is retried


class Engine:
    """One engine at its address; a restarted engine is a new Engine.

    Args:
        workers: registers engines where requests go; one for all engines of a fleet.
        ours: the run started it. Pauses of an external engine are ended only if a rollout actor of the run began them.
        pid: of its process, as reported by its node daemon; 0: unknown.
        syncs: weight syncs, for weights that are not in files.
        crashes: records a crash of the engine while it accepted requests.
        wanted: properties that an external engine must have; None: not checked.
        memory_share: its memory, if it shares memory with the trainer (colocation); None: it has its own.
        files: makes weight files available where the engine reads them, while it serves.
        rolling: schedules updates of engines that serve; None: updates at any time.
    """

    def __init__(
        self,
        name: str,
        url: str,
        client: SglangClient,
        verifier: WeightVerifier,
        target: FleetTarget,
        *,
        workers: Dispatch,
        events: RateLimitedEvents,
        syncs: WeightSyncs,
        ours: bool = True,
        pid: int = 0,
        crashes: RecentCrashes | None = None,
        wanted: ServerRequirements | None = None,
        memory_share: MemoryShare | None = None,
        files: FileSource = UNCHECKED,
        rolling: RollingUpdate | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self.state = EngineState.STARTING
        self.version = 0  # verified weight version; 0: none yet
        self.pause_s = self.updated_at = 0.0  # seconds it was paused for that version, and time of its verification
        self.reason = ""  # why it is in its state
        self.num_open = 0  # samples of requests that were sent to it by name
        self.room = 1.0  # share of the most samples that it may have now
        self.served_at = -math.inf  # send time of the newest request that got a token
        self._quarantines = 0  # so far, for the backoff
        self._tried_again_at = 0.0  # when a quarantined engine is retried
        self.sign_at = 0.0  # time of its last sign of life: a token, or the start of accepting requests
        self.ours = ours
        self.pid = pid
        self.registration = Registration(url, workers, target, lambda: self.accepts_requests)
        self.shares_memory = memory_share is not None
        self.memory_share = memory_share or MemoryShare(client, name, url)
        self.answers = False  # it has responded since it was last down
        self._is_found = False  # as in reconcile.Actual
        self._is_loaded = False  # it holds the target weights, possibly unverified
        self._files = files
        self.failed_version = 0  # the last version that it failed to load, or that could not be supplied
        self._syncs = syncs
        self._key = new_key(name)
        self._crashes = crashes or RecentCrashes()
        self._rolling = rolling or RollingUpdate(1, tuple)
        self._wanted = wanted
        self._label = ""  # of the verified weights
        self._client = client
        self._verifier = verifier
        self._target = target
        self._events = events

    @property
    def accepts_requests(self) -> bool:
        """Whether it accepts requests: it is current and registered at the router."""
        return accepts_requests(self.state)

    @contextmanager
    def carrying(self, num_samples: int) -> Generator[None]:
        """Count samples in flight inside the block."""
        self.num_open += num_samples
        try:
            yield
        finally:
            self.num_open -= num_samples

    @property
    def memory_level(self) -> MemoryLevel:
        """The level of its memory, which it shares with the trainer."""
        room = self.memory_share.room
        if room is MemoryLevel.NOTHING or (self.accepts_requests and room is MemoryLevel.EVERYTHING):
            return room
        return MemoryLevel.LOADED if self._is_loaded else MemoryLevel.WEIGHTS

    @property
    def may_load(self) -> bool:
        """Whether it is ready for a weight update: it accepts requests, or was allowed memory for weights."""
        starts = self.state is EngineState.STARTING and self.answers
        return self.accepts_requests or (starts and self._target.allowed in (MemoryLevel.WEIGHTS, MemoryLevel.LOADED))

    @property
    def is_behind(self) -> bool:
        """Whether its weights are older than the target."""
        return self.version < self._target.version

    @property
    def has_to_release(self) -> bool:
        """Whether it has to release its memory."""
        return self._target.allowed is MemoryLevel.NOTHING and self.memory_share.room is not MemoryLevel.NOTHING

    def _next_step(self) -> NextStep:
        wanted = Wanted(self._target.version, self._target.allowed)
        room, is_apart = self.memory_share.room, self.registration.is_apart
        return next_step(wanted, Actual(self.state, self._is_found, self.version, room, is_apart))

    async def next_step(self) -> NextStep:
        """Wait until it has a step to take, and return it."""
        await self._target.until(lambda: self._next_step() is not NextStep.WAIT)
        return self._next_step()

    async def carry_out(self, step: NextStep) -> None:
        """Take a step.

        Raises:
            EngineError: the step failed. It accepts no requests, and is to be found again.
        """
        served = self.accepts_requests
        try:
            await self._take(step)
        except EngineError as error:
            self._is_found = False
            await self._note_failure(error)
            if served or self.registration.is_known:  # otherwise requests would wait for its version
                await self.registration.leave_unless_accepting()
            if served and step is NextStep.UPDATE:
                if isinstance(error, WeightsMismatch) or not self._target.is_in_files:  # it may hold part of them
                    await self._verifier.clear(self.url)
            raise
        finally:
            await self._target.notify()

    async def _take(self, step: NextStep) -> None:
        match step:
            case NextStep.FIND:
                await self._find()
            case NextStep.GIVE_BACK:
                await self._give_back()
            case NextStep.TAKE_WEIGHTS:
                await self._take_weights()
            case NextStep.UPDATE:
                await self._update_weights()
            case NextStep.TAKE_REST:
                await self._moved(self.memory_share.take_rest)
            case NextStep.REGISTER:
                await self._register()
            case NextStep.WAIT:
                pass

    async def _find(self) -> None:
        """Wait until it is ready for a weight update; compare it with the recipe, and learn its memory level.

        Raises:
            EngineError: it does not fit, or its memory is unknown.
        """
        await wait_until(self._is_up)
        self.version = 0  # it may have been restarted
        if self._wanted is not None:
            await check_engine(self._client, self.url, self._wanted)
        await self.memory_share.inherit()
        if not self.memory_share.is_sure:
            reason = "its memory level is unknown: a call to release or resume memory was not answered"
            self._apply(Trigger.STALLED, reason)
            raise EngineUnavailable(f"{self.url}: {reason}")
        if self.memory_share.room is MemoryLevel.NOTHING and self.state is EngineState.STARTING:
            self._apply(Trigger.RELEASED, "its memory was released to the trainer")
        self._is_found = self.answers  # it may have been lost meanwhile

    async def _is_up(self) -> bool:
        """Whether it is ready for a weight update. Ends a pause left by this or an earlier rollout actor."""
        if self.state is EngineState.SUSPECT:
            return self.memory_share.is_sure and await self._recovered()
        if self.state is EngineState.QUARANTINED:
            if anyio.current_time() < self._tried_again_at:
                return False
            self._apply(Trigger.TRIED_AGAIN, "its quarantine has ended")
        if await self._client.ready(self.url):
            await self._verifier.forget_pause(self.url)
        elif not await self._continued():
            return False
        if self.state is EngineState.PAUSED:
            self._apply(Trigger.CONTINUED, "its pause has ended")
        elif self.state is EngineState.GONE:
            self._apply(Trigger.FOUND, "it is reachable")
        self.answers = True
        return True

    async def _give_back(self) -> None:
        """Release all memory that it shares with the trainer."""
        await self._moved(self.memory_share.give_back)
        self.version, self._is_loaded = 0, False
        self._apply(Trigger.RELEASED, "its memory was released to the trainer")

    async def _take_weights(self) -> None:
        """Resume memory for weights."""
        await self._moved(self.memory_share.take_weights)
        self._apply(Trigger.RESUMED, "it has memory for weights")

    async def _register(self) -> None:
        """Have the router list it, and accept requests if its weights still are the target then."""
        async with self.registration.moving:
            await self.registration.enter(unless=lambda: self.is_behind)
            is_wanted = not self.is_behind and self._target.allowed is MemoryLevel.EVERYTHING
            if is_wanted and self.state is EngineState.STARTING:
                self._apply(Trigger.ADMITTED, f"verified weights {self.version}")
                log.info("engine_admitted", engine=self.name, url=self.url, weight_version=self.version)

    async def _moved(self, move: Callable[[], Awaitable[None]]) -> None:
        """Release or resume memory. If the outcome is unknown, mark the engine for a kill.

        Raises:
            EngineError: the call failed, or the engine was lost meanwhile (noticed by its requests).
        """
        try:
            await move()
        except EngineError as error:
            if self.state not in LOST:
                known = self.memory_share.is_sure
                self._apply(
                    Trigger.LOST if known else Trigger.STALLED, f"its memory was not released or resumed: {error}"
                )
            raise
        if self.state in LOST:
            raise EngineUnavailable(f"{self.url}: lost while its memory was released or resumed")

    async def doubt(self, reason: str, within_s: float) -> None:
        """Check whether it generates tokens. If not, mark it suspect, to be killed.

        Args:
            reason: for the check.
            within_s: timeout in seconds of a small request of our own, which no other request may delay for long.
        """
        # an external pause: the run itself pauses only during updates
        if await answered(within_s, lambda: self._client.is_paused(self.url)):
            await self.check_or_expel()
            return
        if await makes_tokens(self._client, self.url, within_s):
            self.sign_at = anyio.current_time()
            return
        if self.state is not EngineState.CURRENT:
            return
        log.warning("engine_suspect", engine=self.name, url=self.url, reason=reason)
        self._apply(Trigger.STALLED, reason)
        await self.registration.leave_unless_accepting()

    async def quarantine(self, reason: str) -> None:
        """Send it no requests for a while: its answers are unusable, and other engines give usable ones."""
        self._quarantines += 1
        pause_s = QUARANTINE.pause_s(self._quarantines)
        self._tried_again_at = anyio.current_time() + pause_s
        reason = f"{self.url}: {reason}; quarantined for {pause_s:.0f} s"
        log.warning("engine_quarantined", engine=self.name, url=self.url, reason=reason)
        self._apply(Trigger.QUARANTINED, reason)
        await self.registration.leave_unless_accepting()

    async def condemn(self, reason: str) -> None:
        """Mark it for a restart and send it no requests: its answers are unusable."""
        log.warning("engine_suspect", engine=self.name, url=self.url, reason=reason)
        self._apply(Trigger.CONDEMNED, reason)
        await self.registration.leave_unless_accepting()

    def replaced(self) -> None:
        """Mark this Engine as lost: its server was restarted, and a new Engine replaces it."""
        self._apply(Trigger.LOST, "its process was restarted")

    def reroute(self) -> None:
        """Switch to a new router: accept requests again once it lists this engine."""
        self.registration.is_known = False
        self._apply(Trigger.REROUTED, "the router was replaced")

    async def crash_cause(self) -> CrashCause | None:
        """Return the cause of its crash, after it lost a request; None if it is alive.

        A kill is undetectable for an external engine, and without a report of the node daemon.
        """
        await self.check_or_expel()
        if self.accepts_requests:
            return None
        exit = await self._crashes.exit_of(self.name, self.pid) if self.pid else None
        if exit is None:
            return CrashCause(killed=False, reason=self.reason)
        return CrashCause(killed=was_killed(exit), reason=exit.reason)

    async def check_or_expel(self) -> None:
        """Check its health, and stop sending it requests if the check fails."""
        loss = await self._loss()
        if loss is None:
            return
        trigger, reason = loss
        log.warning("engine_lost", engine=self.name, url=self.url, reason=reason)
        self._apply(trigger, reason)
        await self.registration.leave_unless_accepting()

    async def _loaded(self) -> None:
        """Within a weight update, wait until it may resume all memory, then resume it.

        Raises:
            MemoryReclaimed: the trainer reclaims the memory that it already holds.
        """
        self._is_loaded = True
        await self._target.notify()
        if self.state is EngineState.UPDATING:  # it holds all memory already
            return
        await self._target.until(lambda: self._target.is_settled)
        if self._target.allowed is MemoryLevel.NOTHING:
            raise MemoryReclaimed
        await self._moved(self.memory_share.take_rest)

    async def _continued(self) -> bool:
        """End a pause that the run began, and return whether the engine is ready now."""
        if not may_continue(self.state, ours=self.ours, paused_by_us=self._verifier.is_paused(self.url)):
            return False
        try:
            await self._verifier.proceed(self.url)
        except EngineError:
            return False
        return await self._client.ready(self.url)

    async def _recovered(self) -> bool:
        if not await makes_tokens(self._client, self.url, SUSPECT_LOOK_S):
            return False
        self._apply(Trigger.MOVED, "it generates tokens again")
        return True

    async def _loss(self) -> tuple[Trigger, str] | None:
        """Return the trigger and reason of a failed health check.

        None if it responds, holds the weights that it verified, and is registered at the router.
        """
        updating = self.state is EngineState.UPDATING
        if not updating and not await self._client.ready(self.url):
            return Trigger.LOST, "it is not ready"
        try:
            label = await self._client.weight_version(self.url)
        except EngineError as error:
            return Trigger.LOST, str(error)
        if label != self._label and not updating and self.state is not EngineState.UPDATING:
            return Trigger.LOST, f"reports weights {label!r}, expected the verified {self._label!r}"
        if await self.registration.is_missing():
            return Trigger.REROUTED, "the router no longer lists it"
        return None

    async def _note_failure(self, error: EngineError) -> None:
        """Record why it does not serve the newest weights."""
        if self.state in (*LOST, EngineState.QUARANTINED):
            return  # reported by its state change
        # without all its memory it cannot generate a token as a sign of life
        if isinstance(error, EngineSilent) and self.memory_share.room is not MemoryLevel.EVERYTHING:
            self._apply(Trigger.STALLED, str(error))
        elif isinstance(error, EngineSilent) and not await makes_tokens(self._client, self.url, SUSPECT_LOOK_S):
            self._apply(Trigger.STALLED, str(error))
        elif self._verifier.is_paused(self.url):
            self._apply(Trigger.LEFT_PAUSED, str(error))
        elif is_away(error):
            log.warning("engine_not_admitted", engine=self.name, error=str(error))
            self.answers = False
            if self.accepts_requests:  # otherwise it is still starting
                self._apply(Trigger.LOST, str(error))
        else:
            log.warning("weights_refused", engine=self.name, weight_version=self._target.version, reason=str(error))
            unusable = isinstance(error, WeightsDamaged)
            self._events.refused(self.name, self._target.version, str(error), unusable=unusable)
            self._apply(Trigger.REFUSED, f"refused weights {self._target.version}: {error}")

    def _apply(self, trigger: Trigger, reason: str) -> None:
        old, self.state = self.state, next_state(self.state, trigger)
        if old is not self.state:
            self.reason = reason
        if self.state in LOST:
            self.answers = False
        if self.state in (*LOST, EngineState.PAUSED) or (accepts_requests(old) and not self.accepts_requests):
            self._is_found = False
        died = self.state in LOST and trigger is not Trigger.CONDEMNED
        if accepts_requests(old) and died:
            self._crashes.note(self.name)
        if self.state is EngineState.CURRENT:
            self.sign_at = anyio.current_time()
        if is_published(old, self.state):
            log.info("engine_state_changed", engine=self.name, old=old, new=self.state, reason=reason)
            self._events.changed(self.name, old, self.state, reason, self.version)

    async def _adopt_first_weights(self) -> None:
        """Keep the weights that a peer gave it at its start, if they verify as the target."""
        announced = self._target.weights
        if announced is None or self.version > 0:
            return
        label = await self._verifier.adopt(self.name, self.url, announced)
        if label is not None:
            self._label, self.pause_s, self.updated_at = label, 0.0, anyio.current_time()
            self.version = announced.version

    async def _update_weights(self) -> None:
        """Load and verify the target weights, or find that it holds them, unless its state changes meanwhile."""
        state, announced = self.state, self._target.weights
        assert announced is not None, "there is a target"
        if not self.accepts_requests:
            await self._adopt_first_weights()
            if not self.is_behind:
                return
        if self._target.is_in_files:
            announced = await self._provide_files(announced)
        with suppress(MemoryReclaimed):
            async with self._update_slot():
                if self.state is not state:
                    return
                async with self._joining_sync(announced) as member:
                    if member is None or await self._is_member(member):
                        await self._update_once(announced, member)
        self._apply(Trigger.UPDATED, "")

    async def _provide_files(self, announced: WeightsAnnounced) -> WeightsAnnounced:
        """Make the target weights available where it reads them; return them with that path."""
        try:
            return await self._files.provide(announced, doubted=announced.version == self.failed_version)
        except EngineError:
            self.failed_version = announced.version
            raise

    async def _update_once(self, announced: WeightsAnnounced, member: SyncMember | None) -> None:
        if self.state is EngineState.CURRENT:
            self._apply(Trigger.UPDATE_BEGAN, "")
        self._is_loaded = False
        first, others_serve = self.version == 0, self._rolling.is_on and self.accepts_requests
        try:
            async with self.registration.apart() if others_serve else nullcontext():
                check_read = nothing if member is not None else partial(self._files.check_read, announced)
                result = await self._verifier.update(
                    self.name,
                    self.url,
                    announced,
                    first=first,
                    loaded=self._loaded,
                    check_read=check_read,
                    member=member,
                )
                self._label = result.label
                self.pause_s, self.updated_at = result.pause_s, anyio.current_time()
        except EngineError:
            self.failed_version = announced.version
            self._key = new_key(self.name)  # it may be a new process, outside of its earlier torch process groups
            raise
        self.version = announced.version  # set once it is registered again: then all engines count as serving it

    @asynccontextmanager
    async def _update_slot(self) -> AsyncGenerator[None]:
        """Wait until its update group may be updated, or until it is lost.

        No wait where updates are not rolling, or the weights are not in files.
        """
        if not (self._rolling.is_on and self.accepts_requests and self._target.is_in_files):
            yield
            return
        self._rolling.wait(self.name)
        try:
            await self._target.until(lambda: not self.accepts_requests or self._rolling.take(self.name))
            yield
        finally:
            self._rolling.leave(self.name)
            with anyio.CancelScope(shield=True):
                await self._target.notify()

    @asynccontextmanager
    async def _joining_sync(self, announced: WeightsAnnounced) -> AsyncGenerator[SyncMember | None]:
        """Its membership in a weight sync; None for weights in files."""
        if self._target.is_in_files:
            yield None
            return
        shape = await self._verifier.shape(self.url, announced, first=self.version == 0)
        async with self._syncs.member(self.name, self._key, shape, announced.version) as member:
            yield member

    async def _is_member(self, member: SyncMember) -> bool:
        """Wait until a weight sync includes it; False if its state or the target changed first.

        Raises:
            MemoryReclaimed: it has to release its memory, e.g. the trainer died before the weight sync.
        """
        state = self.state
        await self._target.until(
            lambda: (
                bool(member.session)
                or self.state is not state
                or self._target.version != member.version
                or self.has_to_release
            )
        )
        if self.has_to_release:
            raise MemoryReclaimed
        return bool(member.session)
