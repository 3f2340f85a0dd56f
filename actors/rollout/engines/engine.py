"""One inference engine: carries out its steps and control calls. What it is and does next is decided in status.py."""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import anyio
import msgspec
import structlog

from actors.rollout.engines.checks import ServerRequirements, answered, check_engine, makes_tokens
from actors.rollout.engines.dispatch import Dispatch
from actors.rollout.engines.failures import CrashCause, RecentCrashes, was_killed
from actors.rollout.engines.memory import MemoryShare
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.router import Registration, wait_until
from actors.rollout.engines.status import (
    LOST,
    EngineStatus,
    MemoryLevel,
    NextStep,
    Trigger,
    UpdateStage,
    Wanted,
    changed,
    is_published,
    may_continue,
    next_step,
)
from actors.rollout.engines.target import FleetTarget, RollingUpdate
from actors.rollout.engines.weights.adapters import EngineAdapters, ServedAdapter
from actors.rollout.engines.weights.files import UNCHECKED, FileSource, WeightsDamaged
from actors.rollout.engines.weights.sync import SyncMember, WeightSyncs, new_key
from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.engines.weights.verifier import WeightVerifier, nothing
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineSilent, EngineUnavailable, is_away
from messages import EngineLoad, EngineState, WeightsAnnounced
from runtime.util.retrying import Backoff

log = structlog.get_logger()

UPDATES = (NextStep.LOAD, NextStep.RESUME, NextStep.VERIFY)  # steps of a weight update
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
        adapters: its LoRA adapters, if weight versions are adapters; None: each version replaces its weights.
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
        adapters: EngineAdapters | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self.status = EngineStatus()  # only `_change` replaces it
        self.num_open = 0  # samples of requests that were sent to it by name
        self.room = 1.0  # share of the most samples that it may have now
        self.reported = EngineLoad()  # what it reported last of its load
        self.served_at = -math.inf  # send time of the newest request that got a token
        self.sign_at = 0.0  # time of its last sign of life: a token, or the start of accepting requests
        self.ours = ours
        self.adapters = adapters
        self.pid = pid
        self.registration = Registration(url, workers, target, lambda: self.accepts_requests)
        self.shares_memory = memory_share is not None
        self.memory_share = memory_share or MemoryShare(client, name, url)
        self._files = files
        self._syncs = syncs
        self._key = new_key(name)
        self._crashes = crashes or RecentCrashes()
        self._rolling = rolling or RollingUpdate(1, tuple)
        self._wanted = wanted
        self._update: AsyncGenerator[None] | None = None  # the weight update in progress, at the end of a step
        self._client = client
        self._verifier = verifier
        self._target = target
        self._events = events

    @property
    def accepts_requests(self) -> bool:
        """Whether it accepts requests: it is current and registered at the router."""
        return self.status.accepts_requests

    @property
    def state(self) -> EngineState:
        """Its state."""
        return self.status.state

    @property
    def version(self) -> int:
        """The version of its verified weights; 0: none yet."""
        return self.status.version

    @property
    def load(self) -> EngineLoad:
        """Its samples in flight, and what it reported last of its requests and its KV cache."""
        return msgspec.structs.replace(self.reported, samples=self.num_open)

    @contextmanager
    def carrying(self, num_samples: int) -> Generator[ServedAdapter | None]:
        """Count samples in flight inside the block.

        Yields:
            The LoRA adapter that their requests name, which stays loaded inside the block. None: they name none.
        """
        self.num_open += num_samples
        try:
            with nullcontext() if self.adapters is None else self.adapters.used() as adapter:
                yield adapter
        finally:
            self.num_open -= num_samples

    @property
    def may_load(self) -> bool:
        """Whether it is ready for a weight update: it accepts requests, or was allowed memory for weights."""
        starts = self.state is EngineState.STARTING and self.status.answers
        return self.accepts_requests or (starts and self._target.allowed in (MemoryLevel.WEIGHTS, MemoryLevel.LOADED))

    @property
    def is_behind(self) -> bool:
        """Whether its weights are older than the target."""
        return self.version < self._target.version

    @property
    def has_to_release(self) -> bool:
        """Whether it has to release its memory."""
        return self._target.allowed is MemoryLevel.NOTHING and self.status.room is not MemoryLevel.NOTHING

    def _next_step(self) -> NextStep:
        wanted = Wanted(self._target.version, self._target.allowed, self.registration.is_apart)
        return next_step(wanted, self.status)

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
            self._change(is_found=False)
            await self.abandon_update()
            await self._note_failure(error)
            if served or self.registration.is_known:  # otherwise requests would wait for its version
                await self.registration.leave_unless_accepting()
            if served and step in UPDATES:
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
            case NextStep.LOAD | NextStep.RESUME | NextStep.VERIFY:
                await self._carry_on_update()
            case NextStep.TAKE_REST:
                await self._moved(self.memory_share.take_rest)
            case NextStep.REGISTER:
                await self._register()
            case NextStep.WAIT:
                pass

    async def _find(self) -> None:
        """Wait until it is ready for a weight update; compare it with the recipe, and learn its memory level.

        Abandons an update: it may have been restarted.

        Raises:
            EngineError: it does not fit, or its memory is unknown.
        """
        await self.abandon_update()
        await wait_until(self._is_up)
        self._change(version=0)
        if self._wanted is not None:
            await check_engine(self._client, self.url, self._wanted)
        await self.memory_share.inherit()
        self._change(room=self.memory_share.room)
        if not self.memory_share.is_sure:
            reason = "its memory level is unknown: a call to release or resume memory was not answered"
            self._change(Trigger.STALLED, reason)
            raise EngineUnavailable(f"{self.url}: {reason}")
        if self.status.room is MemoryLevel.NOTHING and self.state is EngineState.STARTING:
            self._change(Trigger.RELEASED, "its memory was released to the trainer")
        self._change(is_found=self.status.answers)  # it may have been lost meanwhile

    async def _is_up(self) -> bool:
        """Whether it is ready for a weight update. Ends a pause left by this or an earlier rollout actor."""
        if self.state is EngineState.SUSPECT:
            return self.memory_share.is_sure and await self._recovered()
        if self.state is EngineState.QUARANTINED:
            if anyio.current_time() < self.status.retried_at:
                return False
            self._change(Trigger.TRIED_AGAIN, "its quarantine has ended")
        if await self._client.ready(self.url):
            await self._verifier.forget_pause(self.url)
        elif not await self._continued():
            return False
        if self.state is EngineState.PAUSED:
            self._change(Trigger.CONTINUED, "its pause has ended")
        elif self.state is EngineState.GONE:
            self._change(Trigger.FOUND, "it is reachable")
        self._change(answers=True)
        return True

    async def _give_back(self) -> None:
        """Release all memory that it shares with the trainer, after abandoning an update."""
        await self.abandon_update()
        await self._moved(self.memory_share.give_back)
        self._change(Trigger.RELEASED, "its memory was released to the trainer", version=0)

    async def _take_weights(self) -> None:
        """Resume memory for weights."""
        await self._moved(self.memory_share.take_weights)
        self._change(Trigger.RESUMED, "it has memory for weights")

    async def _register(self) -> None:
        """Have the router list it, and accept requests if its weights still are the target then."""
        async with self.registration.moving:
            await self.registration.enter(unless=lambda: self.is_behind)
            is_wanted = not self.is_behind and self._target.allowed is MemoryLevel.EVERYTHING
            if is_wanted and self.state is EngineState.STARTING:
                self._change(Trigger.ADMITTED, f"verified weights {self.version}")
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
                self._change(
                    Trigger.LOST if known else Trigger.STALLED, f"its memory was not released or resumed: {error}"
                )
            raise
        finally:
            self._change(room=self.memory_share.room)
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
        self._change(Trigger.STALLED, reason)
        await self.registration.leave_unless_accepting()

    async def quarantine(self, reason: str) -> None:
        """Send it no requests for a while: its answers are unusable, and other engines give usable ones."""
        number = self.status.num_quarantines + 1
        pause_s = QUARANTINE.pause_s(number)
        reason = f"{self.url}: {reason}; quarantined for {pause_s:.0f} s"
        log.warning("engine_quarantined", engine=self.name, url=self.url, reason=reason)
        retried_at = anyio.current_time() + pause_s
        self._change(Trigger.QUARANTINED, reason, num_quarantines=number, retried_at=retried_at)
        await self.registration.leave_unless_accepting()

    async def condemn(self, reason: str) -> None:
        """Mark it for a restart and send it no requests: its answers are unusable."""
        log.warning("engine_suspect", engine=self.name, url=self.url, reason=reason)
        self._change(Trigger.CONDEMNED, reason)
        await self.registration.leave_unless_accepting()

    def replaced(self) -> None:
        """Mark this Engine as lost: its server was restarted, and a new Engine replaces it."""
        self._change(Trigger.LOST, "its process was restarted")

    def reroute(self) -> None:
        """Switch to a new router: accept requests again once it lists this engine."""
        self.registration.is_known = False
        self._change(Trigger.REROUTED, "the router was replaced")

    async def crash_cause(self) -> CrashCause | None:
        """Return the cause of its crash, after it lost a request; None if it is alive.

        A kill is undetectable for an external engine, and without a report of the node daemon.
        """
        await self.check_or_expel()
        if self.accepts_requests:
            return None
        exit = await self._crashes.exit_of(self.name, self.pid) if self.pid else None
        if exit is None:
            return CrashCause(killed=False, reason=self.status.reason)
        return CrashCause(killed=was_killed(exit), reason=exit.reason)

    async def check_or_expel(self) -> None:
        """Check its health, and stop sending it requests if the check fails."""
        loss = await self._loss()
        if loss is None:
            return
        trigger, reason = loss
        log.warning("engine_lost", engine=self.name, url=self.url, reason=reason)
        self._change(trigger, reason)
        await self.registration.leave_unless_accepting()

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
        self._change(Trigger.MOVED, "it generates tokens again")
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
        if label != self.status.label and not updating and self.state is not EngineState.UPDATING:
            return Trigger.LOST, f"reports weights {label!r}, expected the verified {self.status.label!r}"
        if await self.registration.is_missing():
            return Trigger.REROUTED, "the router no longer lists it"
        return None

    async def _note_failure(self, error: EngineError) -> None:
        """Record why it does not serve the newest weights."""
        if self.state in (*LOST, EngineState.QUARANTINED):
            return  # reported by its state change
        # without all its memory it cannot generate a token as a sign of life
        may_generate = self.status.room is MemoryLevel.EVERYTHING
        if isinstance(error, EngineSilent) and not (
            may_generate and await makes_tokens(self._client, self.url, SUSPECT_LOOK_S)
        ):
            self._change(Trigger.STALLED, str(error))
        elif self._verifier.is_paused(self.url):
            self._change(Trigger.LEFT_PAUSED, str(error))
        elif is_away(error):
            log.warning("engine_not_admitted", engine=self.name, error=str(error))
            self._change(answers=False)
            if self.accepts_requests:  # otherwise it is still starting
                self._change(Trigger.LOST, str(error))
        else:
            log.warning("weights_refused", engine=self.name, weight_version=self._target.version, reason=str(error))
            unusable = isinstance(error, WeightsDamaged)
            self._events.refused(self.name, self._target.version, str(error), unusable=unusable)
            self._change(Trigger.REFUSED, f"refused weights {self._target.version}: {error}")

    def _change(self, trigger: Trigger | None = None, reason: str = "", **news: Any) -> None:
        """Replace its status, as `changed` says, and report what others have to know."""
        old, self.status = self.status, changed(self.status, trigger, reason, **news)
        died = self.state in LOST and trigger is not Trigger.CONDEMNED
        if old.accepts_requests and died:
            self._crashes.note(self.name)
        if trigger is not None and self.state is EngineState.CURRENT:
            self.sign_at = anyio.current_time()
        if is_published(old.state, self.state):
            log.info("engine_state_changed", engine=self.name, old=old.state, new=self.state, reason=reason)
            self._events.changed(self.name, old.state, self.state, reason, self.version)

    async def _adopt_first_weights(self, announced: WeightsAnnounced) -> None:
        """Keep the weights that a peer gave it at its start, if they verify as the target."""
        label = await self._verifier.adopt(self.name, self.url, announced) if self.version == 0 else None
        if label is not None:
            self._change(version=announced.version, label=label, pause_s=0.0, updated_at=anyio.current_time())

    async def _carry_on_update(self) -> None:
        """Take the next step of its weight update: `_updated` up to its next `yield`."""
        update, self._update = self._update or self._updated(), None
        async for _ in update:
            self._update = update  # it is not at its end
            return
        self._change(stage=UpdateStage.NONE)

    async def tidy(self) -> None:
        """Unload LoRA adapters that no request uses. Never returns; at once if the engine serves none."""
        if self.adapters is not None:
            await self._verifier.tidy(self.url, self.adapters)

    async def abandon_update(self) -> None:
        """Abandon its weight update, if there is one: it generates again, and counts for nothing."""
        update, self._update = self._update, None
        self._change(stage=UpdateStage.NONE)
        if update is not None:
            await update.aclose()

    async def _updated(self) -> AsyncGenerator[None]:
        """Load and verify the target weights, unless it holds them, or its state changes while it waits for its turn.

        Yields after each step; closing it abandons the update.
        """
        announced = self._target.weights
        assert announced is not None, "there is a target"
        try:
            if not self.accepts_requests:
                await self._adopt_first_weights(announced)
                if not self.is_behind:
                    return
            state, first = self.state, self.version == 0
            if self._target.is_in_files:
                doubted = announced.version == self.status.failed_version
                announced = await self._files.provide(announced, doubted=doubted)
            async with self._update_slot(), self._joining_sync(announced, first=first) as member:
                if self.state is not state or (member is not None and not await self._is_member(member)):
                    return
                if state is EngineState.CURRENT:
                    self._change(Trigger.UPDATE_BEGAN)
                others_serve = self._rolling.is_on and self.accepts_requests and self.adapters is None
                check_read = nothing if member is not None else partial(self._files.check_read, announced)
                if self.adapters is not None and announced.base is not None:
                    update = self._verifier.update_adapter(
                        self.name, self.url, announced, self.adapters, self._files, first=first
                    )
                else:
                    update = self._verifier.update(
                        self.name, self.url, announced, first=first, check_read=check_read, member=member
                    )
                async with self.registration.apart() if others_serve else nullcontext(), aclosing(update) as steps:
                    label, pause_s = "", 0.0
                    async for done in steps:
                        label, pause_s = done.label, done.pause_s
                        self._change(stage=done.stage)
                        yield
                    self._change(label=label, pause_s=pause_s, updated_at=anyio.current_time())
                # it is registered again: now all engines count as serving this version
                self._change(Trigger.UPDATED, version=announced.version)
                if member is not None:
                    member.finish()
        except EngineError:
            self._change(failed_version=announced.version)
            self._key = new_key(self.name)  # it may be a new process, outside of its earlier torch process groups
            raise

    @asynccontextmanager
    async def _update_slot(self) -> AsyncGenerator[None]:
        """Wait until its update group may be updated, or until it is lost.

        No wait where updates are not rolling, the weights are not in files, or an update pauses nothing.
        """
        rolls = self._rolling.is_on and self.accepts_requests and self._target.is_in_files
        if not rolls or self.adapters is not None:
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
    async def _joining_sync(self, announced: WeightsAnnounced, *, first: bool) -> AsyncGenerator[SyncMember | None]:
        """Its membership in a weight sync; None for weights in files."""
        if self._target.is_in_files:
            yield None
            return
        shape = await self._verifier.shape(self.url, announced, first=first)
        async with self._syncs.member(self.name, self._key, shape, announced.version) as member:
            yield member

    async def _is_member(self, member: SyncMember) -> bool:
        """Wait until a weight sync includes it; False if its state or the target changed first, or its memory is due.

        The memory may be due because the trainer died before the weight sync.
        """
        state = self.state

        def is_out() -> bool:
            return self.state is not state or self._target.version != member.version

        await self._target.until(lambda: bool(member.session) or self.has_to_release or is_out())
        return bool(member.session) and not self.has_to_release
