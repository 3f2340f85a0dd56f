"""The engines of a rollout actor: who is up, who holds which weights, who is behind the router."""

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import anyio.lowlevel
import structlog

from actors.rollout.engines.conduct import Conduct
from actors.rollout.engines.deaths import Deaths, was_killed
from actors.rollout.engines.engine import Engine
from actors.rollout.engines.external import Wanted
from actors.rollout.engines.notices import Notices
from actors.rollout.engines.refusing import RefusedBy, Step
from actors.rollout.engines.registration import wait_until
from actors.rollout.engines.router import RouterWorkers
from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.turns.stages import Stage
from actors.rollout.engines.turns.tenure import Tenure
from actors.rollout.engines.weights.copies import UNCHECKED, AtHand, CopyRefused
from actors.rollout.engines.weights.files import WeightsDamaged
from actors.rollout.engines.weights.loads import Loads
from actors.rollout.engines.weights.prover import Prover
from actors.rollout.engines.weights.rolling import Rolling
from actors.rollout.engines.weights.session import WeightSessions
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, is_away
from messages import EngineState, EngineUpdate, WeightsAnnounced
from runtime.retrying import Backoff

log = structlog.get_logger()

RETRY = Backoff(max_s=1.0)  # between attempts to admit an engine, without end: it may yet come, or other weights
Kill = Callable[[str], Awaitable[None]]
RELOOK_S = 60.0  # without other weights than damaged ones: their disk may be back


class Autopsy(NamedTuple):
    """Of what an engine died."""

    killed: bool  # by somebody outside
    reason: str


class Fleet:
    """Keeps engines current and registered. Generation waits here until the engines it may use are confirmed.

    A task of its own looks after each engine: one that hangs holds up no other. A lost Fleet loses nothing: it is
    rebuilt from the addresses on the bus and the newest announcement in the log.
    """

    def __init__(
        self, client: SglangClient, prover: Prover, notices: Notices | None = None, *, update_groups: int = 1
    ) -> None:
        self._client = client
        self._workers = RouterWorkers(client)
        self._prover = prover
        self.notices = notices or Notices()
        self.deaths = Deaths()
        self.conduct = Conduct()
        self._num_direct = 0  # requests that were sent to an engine directly
        self._engines: dict[str, Engine] = {}
        self._target = FleetTarget()
        self.is_held = False  # requests wait, whichever engines are up
        self._rolling = Rolling(update_groups, lambda: self._engines)
        self.sessions = WeightSessions(self._target, self._lacking, self._rolling.group_of)
        self._check: anyio.Event | None = None  # of all engines that are asked, under way
        self._refusals: dict[str, RefusedBy] = {}  # by engine
        self._give_up_lost: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint

    @property
    def router(self) -> str:
        """URL of the router; only valid after wait_ready."""
        assert self._target.router is not None
        return self._target.router

    @property
    def loads(self) -> Loads:
        """Which loads of weights are proven."""
        return self._prover.loads

    @property
    def engine_urls(self) -> list[str]:
        """All engines whose address is known."""
        return [engine.url for engine in self._engines.values()]

    def is_ours(self, url: str) -> bool:
        """Whether the run started the engine there: one of others has requests that are not ours."""
        return all(engine.ours for engine in self._engines.values() if engine.url == url)

    @property
    def version(self) -> int:
        """Newest version that all engines proved to hold that the router may ask; 0 while none is admitted."""
        if not self._admitted():
            return 0
        return min(engine.version for engine in self._asked_or_known())

    @property
    def target_version(self) -> int:
        """The version that the engines are to hold; 0: none was announced yet."""
        return self._target.version

    def num_admitted(self) -> int:
        """Engines that may get requests."""
        return len(self._admitted())

    def waits_for(self) -> str:
        """What keeps requests from being sent, for people; empty when nothing does."""
        if self.is_held:
            return "its turn: the trainer has the memory, or engines give it back or take it"
        if self._target.router is None:
            return "the router"
        if self._target.weights is None:
            return "the first weights"
        behind = [engine.name for engine in self._engines.values() if engine.is_behind]
        if not self._admitted():
            states = Counter(engine.state.value for engine in self._engines.values())
            known = ", ".join(f"{number} {state}" for state, number in states.items()) or "none is known"
            return f"an engine ({known})"
        return f"weights {self.target_version} at {', '.join(behind)}" if behind else ""

    def is_held_by_any(self, version: int) -> bool:
        """Whether an engine that may be asked holds that version, or a newer one."""
        return any(engine.is_asked and engine.version >= version for engine in self._engines.values())

    async def wait_ready(self, min_version: int, *, unless: Callable[[], bool]) -> bool:
        """Wait until the router and at least one engine are up and every admitted one is at min_version.

        Returns:
            False when `unless` came true first; it is looked at on every `notify`.
        """
        if self._holds(min_version) and not unless():
            return True
        async with self._target.changed:
            while not unless():
                if self._holds(min_version):
                    return True
                await self._target.changed.wait()
            return False

    def _holds(self, min_version: int) -> bool:
        if self.is_held or self._target.router is None or self._target.num_holds:
            return False
        return self.version >= max(min_version, 1)

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """In the block nobody may send a request."""
        self._target.num_holds += 1
        try:
            yield
        finally:
            self._target.num_holds -= 1
            with anyio.CancelScope(shield=True):
                await self.notify()

    @property
    def weights(self) -> WeightsAnnounced | None:
        """What the engines are to hold; none: none was announced yet."""
        return self._target.weights

    def _lacking(self) -> list[str]:
        """Engines that are up and are to have newer weights."""
        return [engine.name for engine in self._engines.values() if engine.is_behind and engine.may_load]

    async def next_version(self, after: int) -> int:
        """Wait until all admitted engines have confirmed a version above `after`; return it."""
        async with self._target.changed:
            while self.version <= after:
                await self._target.changed.wait()
            return self.version

    def updates(self, version: int, since: float) -> tuple[EngineUpdate, ...]:
        """How admitted engines that hold a version came to it; `since` is when they were to, of the event loop."""
        return tuple(
            EngineUpdate(engine=engine.name, pause_s=engine.pause_s, took_s=max(0.0, engine.brought_at - since))
            for engine in self._admitted()
            if engine.version == version
        )

    @property
    def engines(self) -> list[Engine]:
        """All that are known."""
        return list(self._engines.values())

    @property
    def allowed(self) -> Stage:
        """What engines may have of the memory that they share with the trainer."""
        return self._target.allowed

    async def hold(self, held: bool) -> None:
        """Let no new request go to engines, or again."""
        self.is_held = held
        await self.notify()

    async def allow(self, stage: Stage) -> None:
        """Say what engines may have; nothing only while no request is under way. Returns at once."""
        self._target.allowed = stage
        if stage is Stage.NOTHING:  # a trainer that died in a session brings no more of it
            self.sessions.end("the trainer has its memory back")
        await self.notify()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at on every `notify`."""
        await self._target.until(true)

    async def notify(self) -> None:
        """Let the waiting look again."""
        await self._target.notify()

    async def set_target(self, announced: WeightsAnnounced) -> None:
        """Have every engine take these weights as soon as it can; returns at once. The last call counts."""
        self._target.weights = announced
        await self.notify()

    def give_up_by(self, give_up: Callable[[], Awaitable[object]]) -> None:
        """Say what has engines hold newer weights, where there are any, in place of some that no engine can read."""
        self._give_up_lost = give_up

    async def run_router(self, url: str) -> None:
        """Send requests to a router: wait until it answers and knows no engine, and again when it is lost.

        One that outlived an earlier rollout actor still knows that one's engines, whatever weights they hold. Runs for
        ever, in a task that is cancelled when the router's address changes.
        """
        while True:
            self._target.router = None
            for engine in self._engines.values():
                engine.reroute()
            await wait_until(lambda: self._workers.free_of(url, None))
            self._target.router = url
            await self.notify()
            async with self._target.changed:
                while self._target.router == url:
                    await self._target.changed.wait()

    async def run_engine(
        self,
        name: str,
        url: str,
        *,
        ours: bool = True,
        pid: int = 0,
        kill: Kill | None = None,
        wanted: Wanted | None = None,
        tenure: Tenure | None = None,
        at_hand: AtHand = UNCHECKED,
    ) -> None:
        """Keep one engine admitted: wait for it, give it the current weights, register it, and again when it is lost.

        Runs for ever, in a task that is cancelled when the engine's address changes.

        Args:
            name: of the engine.
            url: where it listens.
            ours: the run started it.
            pid: of its process, as its agent says; 0: not known.
            wanted: what it is to serve; none: that is not asked.
            kill: have it killed, for a reason, and started again; none: nobody may.
            tenure: of memory that it shares with the trainer; none: it has its own.
            at_hand: brings weights in files to where it reads them.

        Raises:
            WeightsMismatch, RequestRefused, CopyRefused: it has refused the weights for long, started anew too, and no
                other engine has taken any.
        """
        engine = await self._replace(name, url, ours=ours, pid=pid, wanted=wanted, tenure=tenure, at_hand=at_hand)
        refusals, failures = self._refusals.setdefault(name, RefusedBy()), 0
        while True:
            await wait_until(engine.is_up)
            try:
                await engine.admit()
            except EngineError as error:
                match self._next_step(refusals, error, may_restart=kill is not None):
                    case Step.GIVE_UP:
                        raise
                    case Step.WAIT:
                        await self._wait_for_others_than(engine.failed_version)
                    case Step.RESTART:
                        assert kill is not None, "it may be started again"
                        await kill(f"it went on refusing weights {self.target_version}: {error}")
                    case Step.AGAIN:
                        pass
                failures += 1
                await anyio.sleep(RETRY.pause_s(failures))
            else:
                failures = 0
                refusals.took()
                log.info("engine_admitted", engine=name, url=url, weight_version=engine.version)
                await self.notify()
                await engine.keep_current()
            if engine.state is EngineState.SUSPECT and kill is not None:
                await kill(engine.reason)

    def _next_step(self, refusals: RefusedBy, error: EngineError, *, may_restart: bool) -> Step:
        """What to do about an engine that was not admitted."""
        if is_away(error):
            refusals.away()
            return Step.AGAIN
        return refusals.refused(
            anyio.current_time(),
            damaged=isinstance(error, WeightsDamaged),
            may_restart=may_restart and not isinstance(error, CopyRefused),  # which its node has to mend
            others_serve=bool(self._admitted()),
        )

    async def _wait_for_others_than(self, version: int) -> None:
        """Wait until engines are to hold another version, but not for ever."""
        await self._give_up_lost()
        with anyio.move_on_after(RELOOK_S):
            await self._target.until(lambda: self._target.version != version)

    async def _replace(
        self,
        name: str,
        url: str,
        *,
        ours: bool,
        pid: int,
        wanted: Wanted | None,
        tenure: Tenure | None,
        at_hand: AtHand,
    ) -> Engine:
        """A new engine in the place of the one of that name, which the router forgets."""
        self.conduct.forget(name)
        old = self._engines.get(name)
        engine = self._engines[name] = Engine(
            name,
            url,
            self._client,
            self._prover,
            self._target,
            workers=self._workers,
            notices=self.notices,
            sessions=self.sessions,
            deaths=self.deaths,
            ours=ours,
            pid=pid,
            wanted=wanted,
            tenure=tenure,
            at_hand=at_hand,
            rolling=self._rolling,
        )
        if old is not None:
            old.replaced()
            await old.registration.forget()
        return engine

    def current_engines(self) -> list[Engine]:
        """Those that may be asked and are to make tokens."""
        return [engine for engine in self._engines.values() if engine.state is EngineState.CURRENT]

    def any_engine(self) -> Engine | None:
        """One that may be asked, if there is one."""
        return next(iter(self._admitted()), None)

    def another_engine(self, than: str) -> Engine | None:
        """The next engine in turn that may be asked, another one than that; none: there is only one to choose from.

        A request that failed is sent there past the router, which does not say who answered.
        """
        admitted = self._admitted()
        if len(admitted) < 2:
            return None
        others = [engine for engine in admitted if engine.name != than]
        self._num_direct += 1
        return others[self._num_direct % len(others)]

    def engine_behind(self, label: str) -> Engine | None:
        """The engine that an answer under that label comes from, or the only one that may be asked."""
        engine = self.engine_of(label)
        admitted = self._admitted()
        return admitted[0] if engine is None and len(admitted) == 1 else engine

    @property
    def serves(self) -> bool:
        """Whether router and an engine are up, as far as is known."""
        return self._target.router is not None and bool(self._admitted())

    def admitted_names(self) -> str:
        """The engines that may be asked, with their URLs, for people."""
        return " or ".join(f"{engine.name} ({engine.url})" for engine in self._admitted())

    def refused_by(self) -> str:
        """Why no engine can be asked, where the run started none and can restart none; empty otherwise."""
        engines = self._engines.values()
        if self._admitted() or self.is_held or not engines or any(engine.ours for engine in engines):
            return ""
        return "; ".join(f"{engine.name} ({engine.url}) is {engine.state}: {engine.reason}" for engine in engines)

    async def note_failure(self, engine: Engine, group: str, reason: str, *, counts: bool) -> None:
        """A request failed at an engine that is up.

        Args:
            engine: the one.
            group: whose request it was.
            reason: why it failed.
            counts: the engine is to blame; not where it was only busy.
        """
        self.conduct.failed(engine.name, group, reason, anyio.current_time(), counts=counts)
        await self._judge(engine)

    async def note_answer(self, label: str) -> None:
        """An answer under that label can be used."""
        engine = self.engine_of(label)
        if engine is None:
            return
        self.conduct.answered(engine.name, anyio.current_time())
        for other in self._admitted():
            await self._judge(other)

    async def _judge(self, engine: Engine) -> None:
        """Quarantine an engine that fails again and again while another one answers well.

        Where no other one answers, it is restarted if the run started it, and asked on otherwise.
        """
        now = anyio.current_time()
        if not self.conduct.keeps_failing(engine.name, now) or not engine.is_asked or engine.registration.is_apart:
            return
        others = [each.name for each in self._admitted() if each is not engine]
        reason = self.conduct.reason(engine.name)
        if not engine.shares_memory and any(self.conduct.answers(name) for name in others):
            self.conduct.forget(engine.name)
            await engine.quarantine(reason)
        elif engine.ours and all(self.conduct.keeps_failing(name, now) for name in others):
            self.conduct.forget(engine.name)
            await engine.condemn(reason)
        await self.notify()

    async def autopsy(self, engine: Engine) -> Autopsy | None:
        """Whether an engine that lost a request is dead, and whether somebody killed it; None: it lives.

        Of one that nobody started here, or whose agent says nothing, a kill is not known of.
        """
        if not await engine.is_dead():
            return None
        exit = await self.deaths.exit_of(engine.name, engine.pid) if engine.pid else None
        if exit is None:
            return Autopsy(killed=False, reason=engine.reason)
        return Autopsy(killed=was_killed(exit), reason=exit.reason)

    def engine_of(self, label: str) -> Engine | None:
        """The engine that weights with this label were loaded into, if it is still here."""
        return self._engines.get(self.loads.engine_of(label))

    def note_token(self, label: str, sent_at: float) -> None:
        """A token of a load came, of a request that was sent then: its engine lives."""
        engine = self.engine_of(label)
        if engine is not None:
            engine.sign_at = anyio.current_time()
            engine.served_at = max(engine.served_at, sent_at)

    async def report_unavailable(self) -> None:
        """A request failed: find out who is not as it was, router or engine, and ask it no more until it is.

        Many requests fail at the same time: all wait for one look.
        """
        if self._check is not None:
            await self._check.wait()
            return
        self._check = anyio.Event()
        try:
            router = self._target.router
            if router is not None and not await self._workers.answers(router) and self._target.router == router:
                log.warning("router_lost", url=router)
                self._target.router = None
            async with anyio.create_task_group() as group:
                for engine in self._admitted():
                    group.start_soon(engine.check_or_expel)
        finally:
            self._check.set()
            self._check = None
        await self.notify()

    def _admitted(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.is_asked and not engine.registration.is_apart]

    def _asked_or_known(self) -> list[Engine]:
        return [each for each in self._engines.values() if each.registration.is_known or each.is_asked]
