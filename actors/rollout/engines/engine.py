"""One engine behind its address: what it is asked and told, by the state that it is in (states.py)."""

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial

import anyio
import structlog

from actors.rollout.engines.asking import answered, check_engine, makes_tokens
from actors.rollout.engines.deaths import Deaths
from actors.rollout.engines.external import Wanted
from actors.rollout.engines.notices import Notices
from actors.rollout.engines.registration import Registration
from actors.rollout.engines.router import RouterWorkers
from actors.rollout.engines.states import Happening, is_asked, is_told, may_continue, next_state
from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.turns.stages import Stage
from actors.rollout.engines.turns.tenure import Tenure, TurnLost
from actors.rollout.engines.turns.turn import Turn
from actors.rollout.engines.weights.copies import UNCHECKED, AtHand
from actors.rollout.engines.weights.files import WeightsDamaged
from actors.rollout.engines.weights.proof import WeightsMismatch
from actors.rollout.engines.weights.prover import Prover, nothing
from actors.rollout.engines.weights.rolling import Rolling
from actors.rollout.engines.weights.session import Part, WeightSessions, new_key
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineSilent, is_away
from messages import EngineState, WeightsAnnounced
from runtime.retrying import Backoff

log = structlog.get_logger()

SUSPECT_LOOK_S = 5.0  # for a sign of life of an engine that showed none
QUARANTINE = Backoff(first_s=60.0, max_s=600.0)  # before an engine in quarantine is tried again


class Engine:
    """One engine behind its address; a restarted one is another Engine.

    Args:
        workers: of the router; one for all engines of a fleet.
        ours: the run started it. Another's is continued only where a rollout actor of the run paused it.
        pid: of its process, as its agent says; 0: not known.
        sessions: in which it gets weights that are in no files.
        deaths: told when it is lost while it was asked.
        wanted: what it is to serve; none: that is not asked.
        tenure: of memory that it shares with the trainer; none: it has its own.
        at_hand: brings weights in files to where it reads them, while it serves.
        rolling: when it may take weights while it is asked; none: at any time.
    """

    def __init__(
        self,
        name: str,
        url: str,
        client: SglangClient,
        prover: Prover,
        target: FleetTarget,
        *,
        workers: RouterWorkers,
        notices: Notices,
        sessions: WeightSessions,
        ours: bool = True,
        pid: int = 0,
        deaths: Deaths | None = None,
        wanted: Wanted | None = None,
        tenure: Tenure | None = None,
        at_hand: AtHand = UNCHECKED,
        rolling: Rolling | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self.state = EngineState.STARTING
        self.version = 0  # proven; 0: none yet
        self.pause_s = self.brought_at = 0.0  # how long it stood still for that version, and when it had proven it
        self.reason = ""  # for its state
        self.served_at = -math.inf  # when the newest request was sent of which it made a token
        self._quarantines = 0  # so far
        self._tried_again_at = 0.0  # when that is due
        self.sign_at = 0.0  # of its last sign of life: a token, or that it is asked from now on
        self.ours = ours
        self.pid = pid
        self.registration = Registration(url, workers, target, lambda: self.is_asked)
        self.shares_memory = tenure is not None
        self.tenure = tenure or Tenure(client, name, url)
        self._turn = Turn(
            url, self.tenure, target, state=lambda: self.state, happened=self._happened, emptied=self._note_emptied
        )
        self.answers = False  # since it was last down
        self._is_loaded = False  # with the target weights, though they may be unproven yet
        self._at_hand = at_hand
        self.failed_version = 0  # the last that it did not take, or could not be given
        self._sessions = sessions
        self._key = new_key(name)
        self._deaths = deaths or Deaths()
        self._rolling = rolling or Rolling(1, tuple)
        self._wanted = wanted
        self._label = ""  # of the proven weights
        self._client = client
        self._prover = prover
        self._target = target
        self._notices = notices

    @property
    def is_asked(self) -> bool:
        """Whether requests may be sent to it: it is current, and registered at the router."""
        return is_asked(self.state)

    @property
    def stage(self) -> Stage:
        """What it has of what it shares with the trainer."""
        room = self.tenure.room
        if room is Stage.NOTHING or (self.is_asked and room is Stage.EVERYTHING):
            return room
        return Stage.LOADED if self._is_loaded else Stage.WEIGHTS

    @property
    def may_load(self) -> bool:
        """Whether it stands ready for weights soon: it is asked, or was given room for them by the trainer."""
        starts = self.state is EngineState.STARTING and self.answers
        return self.is_asked or (starts and self._target.allowed in (Stage.WEIGHTS, Stage.LOADED))

    @property
    def is_behind(self) -> bool:
        """Whether it is to have newer weights."""
        return self.version < self._target.version

    async def is_up(self) -> bool:
        """Whether it may be given weights. One that we paused, or an earlier actor before it died, goes on."""
        if self.state is EngineState.SUSPECT:
            return self.tenure.is_sure and await self._recovered()
        if self.state is EngineState.QUARANTINED:
            if anyio.current_time() < self._tried_again_at:
                return False
            self._happened(Happening.TRIED_AGAIN, "it is tried again")
        if await self._client.ready(self.url):
            await self._prover.forget_pause(self.url)
        elif not await self._continued():
            return False
        if self.state is EngineState.PAUSED:
            self._happened(Happening.CONTINUED, "it goes on")
        elif self.state is EngineState.GONE:
            self._happened(Happening.FOUND, "it answers")
        self.answers = True
        return True

    async def admit(self) -> None:
        """Bring it to the target weights, register it, and count it in while they still are the target.

        Raises:
            EngineError: it did not take the weights, or the router did not take it.
        """
        async with self._target.changed:
            while self.registration.is_apart:
                await self._target.changed.wait()
        async with self.registration.moving:
            self.version = 0  # it may have begun anew
            try:
                await self._check_server()
                await self._turn.inherit()
                while not self.is_asked:
                    await self._turn.take()
                    await self._target.announced()  # or else the router would know it, and all wait for its first
                    with suppress(TurnLost):
                        await self._adopt_first_weights()
                        await self._bring_current()
                        await self.registration.enter(unless=lambda: self.is_behind)
                    if not self.is_behind and self._target.allowed is Stage.EVERYTHING:
                        self._happened(Happening.ADMITTED, f"proved weights {self.version}")
                    else:
                        await self._target.until(lambda: self.is_behind or self._target.is_settled)
            except EngineError as error:
                await self._note_failure(error)
                if self.registration.is_known:  # else all versions would wait for its own
                    await self.registration.leave()
                await self._target.notify()
                raise

    async def keep_current(self) -> None:
        """Give it newer weights whenever such are the target, until it is no longer asked."""
        while self.is_asked:
            await self._target.until(lambda: not self.is_asked or self.is_behind or self._turn.is_over)
            if not self.is_asked:
                return
            if self._turn.is_over:
                await self._give_back_or_leave()
                return
            try:
                await self._bring_current()
            except TurnLost:
                continue
            except EngineError as error:
                await self._note_failure(error)
                await self.registration.leave_unless_asked()
                if isinstance(error, WeightsMismatch) or not self._target.is_in_files:  # a part of them may be there
                    await self._prover.clear(self.url)
            else:
                self._happened(Happening.UPDATED, "")
            await self._target.notify()

    async def doubt(self, reason: str, within_s: float) -> None:
        """Find out whether it makes tokens. One that does not is asked no more: it is to be killed.

        Args:
            reason: for the doubt.
            within_s: seconds for a small request of our own, which nobody else may hold up for ever.
        """
        if await answered(within_s, lambda: self._client.is_paused(self.url)):  # by others: we do so in updates
            await self.check_or_expel()
            return
        if await makes_tokens(self._client, self.url, within_s):
            self.sign_at = anyio.current_time()
            return
        if self.state is not EngineState.CURRENT:
            return
        log.warning("engine_suspect", engine=self.name, url=self.url, reason=reason)
        self._happened(Happening.STALLED, reason)
        await self.registration.leave_unless_asked()

    async def quarantine(self, reason: str) -> None:
        """Send it no request for a while: its answers cannot be used, those of other engines can."""
        self._quarantines += 1
        pause_s = QUARANTINE.pause_s(self._quarantines)
        self._tried_again_at = anyio.current_time() + pause_s
        reason = f"{self.url}: {reason}; it is tried again in {pause_s:.0f} s"
        log.warning("engine_quarantined", engine=self.name, url=self.url, reason=reason)
        self._happened(Happening.QUARANTINED, reason)
        await self.registration.leave_unless_asked()

    async def condemn(self, reason: str) -> None:
        """Send it no request: it is to be restarted, for its answers cannot be used."""
        log.warning("engine_suspect", engine=self.name, url=self.url, reason=reason)
        self._happened(Happening.CONDEMNED, reason)
        await self.registration.leave_unless_asked()

    def replaced(self) -> None:
        """Its server was started again: another Engine stands for that one."""
        self._happened(Happening.LOST, "it was started again")

    def reroute(self) -> None:
        """Its router is another: it is asked again once that knows it."""
        self.registration.is_known = False
        self._happened(Happening.REROUTED, "another router")

    async def is_dead(self) -> bool:
        """Look whether it is not what it was."""
        await self.check_or_expel()
        return not self.is_asked

    async def check_or_expel(self) -> None:
        """Ask an engine no more unless it is as it was."""
        loss = await self._loss()
        if loss is None:
            return
        happening, reason = loss
        log.warning("engine_lost", engine=self.name, url=self.url, reason=reason)
        self._happened(happening, reason)
        await self.registration.leave_unless_asked()

    async def _give_back_or_leave(self) -> None:
        try:
            await self._turn.give_back()
        except EngineError:  # which its state tells
            await self.registration.leave_unless_asked()

    async def _take_rest(self) -> None:
        """With its weights loaded, wait until it may have all memory, and take it.

        Raises:
            TurnLost: it may not even have what it has.
        """
        self._is_loaded = True
        await self._target.notify()
        if self.state is not EngineState.UPDATING:  # else it has everything
            await self._turn.take_rest()

    def _note_emptied(self) -> None:
        self.version, self._is_loaded = 0, False

    async def _continued(self) -> bool:
        """Whether it is ready after we ended a pause that we may end."""
        if not may_continue(self.state, ours=self.ours, paused_by_us=self._prover.is_paused(self.url)):
            return False
        try:
            await self._prover.proceed(self.url)
        except EngineError:
            return False
        return await self._client.ready(self.url)

    async def _check_server(self) -> None:
        if self._wanted is not None:
            await check_engine(self._client, self.url, self._wanted)

    async def _recovered(self) -> bool:
        if not await makes_tokens(self._client, self.url, SUSPECT_LOOK_S):
            return False
        self._happened(Happening.MOVED, "it makes tokens")
        return True

    async def _loss(self) -> tuple[Happening, str] | None:
        """Why it is not as it was; None: it answers, holds the weights that it confirmed, the router knows it."""
        updating = self.state is EngineState.UPDATING
        if not updating and not await self._client.ready(self.url):
            return Happening.LOST, "it is not ready"
        try:
            label = await self._client.weight_version(self.url)
        except EngineError as error:
            return Happening.LOST, str(error)
        if label != self._label and not updating and self.state is not EngineState.UPDATING:
            return Happening.LOST, f"calls its weights {label!r}, it proved {self._label!r}"
        if await self.registration.is_missing():
            return Happening.REROUTED, "the router does not know it any more"
        return None

    async def _note_failure(self, error: EngineError) -> None:
        """Say why it does not work under the newest weights."""
        if self.state in (EngineState.SUSPECT, EngineState.GONE, EngineState.QUARANTINED):
            return  # which is told
        if isinstance(error, EngineSilent) and self.tenure.room is not Stage.EVERYTHING:  # it could make no token
            self._happened(Happening.STALLED, str(error))
        elif isinstance(error, EngineSilent) and not await makes_tokens(self._client, self.url, SUSPECT_LOOK_S):
            self._happened(Happening.STALLED, str(error))
        elif self._prover.is_paused(self.url):
            self._happened(Happening.LEFT_PAUSED, str(error))
        elif is_away(error):
            log.warning("engine_not_admitted", engine=self.name, error=str(error))
            self.answers = False
            if self.is_asked:  # else it is only starting yet
                self._happened(Happening.LOST, str(error))
        else:
            log.warning("weights_refused", engine=self.name, weight_version=self._target.version, reason=str(error))
            unusable = isinstance(error, WeightsDamaged)
            self._notices.refused(self.name, self._target.version, str(error), unusable=unusable)
            self._happened(Happening.REFUSED, f"refused weights {self._target.version}: {error}")

    def _happened(self, happening: Happening, reason: str) -> None:
        old, self.state = self.state, next_state(self.state, happening)
        if old is not self.state:
            self.reason = reason
        if self.state in (EngineState.GONE, EngineState.SUSPECT):
            self.answers = False
        died = self.state in (EngineState.GONE, EngineState.SUSPECT) and happening is not Happening.CONDEMNED
        if is_asked(old) and died:
            self._deaths.note(self.name)
        if self.state is EngineState.CURRENT:
            self.sign_at = anyio.current_time()
        if is_told(old, self.state):
            log.info("engine_state_changed", engine=self.name, old=old, new=self.state, reason=reason)
            self._notices.changed(self.name, old, self.state, reason, self.version)

    async def _adopt_first_weights(self) -> None:
        """Count weights that a peer gave it at its start, if it proves that they are the target."""
        announced = self._target.weights
        if announced is None or self.version > 0:
            return
        label = await self._prover.adopt(self.name, self.url, announced)
        if label is not None:
            self._label, self.pause_s, self.brought_at = label, 0.0, anyio.current_time()
            self.version = announced.version

    async def _bring_current(self) -> None:
        """Give it the target weights, and again if others are the target by then."""
        state = self.state
        while self.is_behind and self.state in (state, EngineState.UPDATING):
            announced = self._target.weights
            assert announced is not None
            if self._target.is_in_files:
                announced = await self._at_hand_for(announced)
            async with self._group_turn():
                if self.state not in (state, EngineState.UPDATING):
                    return  # lost meanwhile
                async with self._taking_part(announced) as part:
                    if part is None or await self._is_member(part):
                        await self._bring(announced, part)

    async def _at_hand_for(self, announced: WeightsAnnounced) -> WeightsAnnounced:
        """Those weights where it is to read them."""
        try:
            return await self._at_hand.bring(announced, doubted=announced.version == self.failed_version)
        except EngineError:
            self.failed_version = announced.version
            raise

    async def _bring(self, announced: WeightsAnnounced, part: Part | None) -> None:
        if self.state is EngineState.CURRENT:
            self._happened(Happening.UPDATE_BEGAN, "")
        self._is_loaded = False
        first, others_serve = self.version == 0, self._rolling.is_on and self.is_asked
        try:
            async with self.registration.apart() if others_serve else nullcontext():
                check_read = nothing if part is not None else partial(self._at_hand.check_read, announced)
                brought = await self._prover.bring(
                    self.name,
                    self.url,
                    announced,
                    first=first,
                    loaded=self._take_rest,
                    check_read=check_read,
                    part=part,
                )
                self._label = brought.label
                self.pause_s, self.brought_at = brought.pause_s, anyio.current_time()
        except EngineError:
            self.failed_version = announced.version
            self._key = new_key(self.name)  # it may be another process, and is in none of the groups that it was in
            raise
        self.version = announced.version  # once requests may go there again: then all are said to serve it

    @asynccontextmanager
    async def _group_turn(self) -> AsyncGenerator[None]:
        """Where engines are updated in groups, and read the weights by themselves: its group's turn, or its loss."""
        if not (self._rolling.is_on and self.is_asked and self._target.is_in_files):
            yield
            return
        self._rolling.wait(self.name)
        try:
            await self._target.until(lambda: not self.is_asked or self._rolling.take(self.name))
            yield
        finally:
            self._rolling.leave(self.name)
            with anyio.CancelScope(shield=True):
                await self._target.notify()

    @asynccontextmanager
    async def _taking_part(self, announced: WeightsAnnounced) -> AsyncGenerator[Part | None]:
        """Its part in a session; of weights in files there is none."""
        if self._target.is_in_files:
            yield None
            return
        place = await self._prover.place(self.url, announced, first=self.version == 0)
        async with self._sessions.part(self.name, self._key, place, announced.version) as part:
            yield part

    async def _is_member(self, part: Part) -> bool:
        """Wait until a session takes it in; false: its state, or the target, is another by then.

        Raises:
            TurnLost: it has to give back its memory, as where the trainer died before a session.
        """
        state = self.state
        await self._target.until(
            lambda: (
                bool(part.session)
                or self.state is not state
                or self._target.version != part.version
                or self._turn.is_over
            )
        )
        if self._turn.is_over:
            raise TurnLost
        return bool(part.session)
