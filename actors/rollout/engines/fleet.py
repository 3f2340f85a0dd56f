"""The engines of a rollout actor: their state, their weights, and their registration at the router."""

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import structlog

from actors.rollout.engines.checks import ServerRequirements
from actors.rollout.engines.dispatch import Dispatch
from actors.rollout.engines.engine import Engine
from actors.rollout.engines.failures import AfterRefusal, RecentCrashes, RefusalCounter, RequestOutcomes
from actors.rollout.engines.memory import MemoryShare
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.router import ThroughRouter, wait_until
from actors.rollout.engines.status import MemoryLevel
from actors.rollout.engines.target import FleetTarget, RollingUpdate
from actors.rollout.engines.weights.files import UNCHECKED, CopyRefused, FileSource, WeightsDamaged
from actors.rollout.engines.weights.sync import WeightSyncs
from actors.rollout.engines.weights.updater import progress_text
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, is_away
from messages import EngineState, EngineUpdate, WeightsAnnounced
from runtime.util.retrying import Backoff

log = structlog.get_logger()

RETRY = Backoff(max_s=1.0)  # between attempts to mark an engine ready; unlimited, as it or other weights may still come
Kill = Callable[[str], Awaitable[None]]
RELOOK_S = 60.0  # retry interval for damaged weight files: their disk may recover


class Fleet:
    """Keeps engines updated and registered. Requests wait here until their engines are verified.

    Each engine has its own task, so a hung engine blocks no other. The state is not persistent: it is rebuilt from the
    addresses on the bus and the newest announcement in the log.
    """

    def __init__(
        self,
        client: SglangClient,
        verifier: WeightVerifier,
        events: RateLimitedEvents | None = None,
        *,
        update_groups: int = 1,
        dispatch: Dispatch | None = None,
    ) -> None:
        self._client = client
        self._dispatch = dispatch or ThroughRouter(client, verifier.updates.engine_of)
        self._verifier = verifier
        self.events = events or RateLimitedEvents()
        self.crashes = RecentCrashes()
        self.request_outcomes = RequestOutcomes()
        self._engines: dict[str, Engine] = {}
        self._target = FleetTarget()
        self._target.router = self._dispatch.first_url
        self.is_held = False  # requests wait although engines are up
        self._rolling = RollingUpdate(update_groups, lambda: self._engines)
        self.syncs = WeightSyncs(self._target, self._lacking, self._rolling.group_of, self.doing)
        self._check: anyio.Event | None = None  # a running health check of all engines that accept requests
        self._refusals: dict[str, RefusalCounter] = {}  # by engine
        self._give_up_lost: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint

    @property
    def router(self) -> str:
        """URL of the router; only valid after wait_ready."""
        assert self._target.router is not None
        return self._target.router

    @property
    def update_tracker(self) -> UpdateTracker:
        """The weight updates and their verification status."""
        return self._verifier.updates

    @property
    def engine_urls(self) -> list[str]:
        """URLs of all known engines."""
        return [engine.url for engine in self._engines.values()]

    def is_ours(self, url: str) -> bool:
        """Whether the run started the engine at a URL. An external engine also serves other clients."""
        return all(engine.ours for engine in self._engines.values() if engine.url == url)

    @property
    def version(self) -> int:
        """Oldest verified version among the engines that the router may use; 0 while no engine is ready."""
        if not self._admitted():
            return 0
        return min(engine.version for engine in self._asked_or_known())

    @property
    def target_version(self) -> int:
        """The target weight version; 0: none was announced yet."""
        return self._target.version

    def num_admitted(self) -> int:
        """Number of engines that accept requests."""
        return len(self._admitted())

    def waits_for(self) -> str:
        """Describe for people what blocks requests; empty if nothing does."""
        if self.is_held:
            return "a colocation phase: the trainer holds the GPU memory, or engines release or resume it"
        if self._target.router is None:
            return self._dispatch.waits_for
        if self._target.weights is None:
            return "the first weights"
        behind = [engine.name for engine in self._engines.values() if engine.is_behind]
        if not self._admitted():
            states = Counter(engine.state.value for engine in self._engines.values())
            known = ", ".join(f"{number} {state}" for state, number in states.items()) or "none has started"
            return f"an engine ({known})"
        at_work = (f"{name}, {doing}" if (doing := self.doing(name)) else name for name in behind)
        return f"weights {self.target_version} at {'; '.join(at_work)}" if behind else ""

    def doing(self, engine: str) -> str:
        """Describe what an engine does in its weight update; empty if it is not being updated."""
        known = self._engines.get(engine)
        progress = None if known is None else self._verifier.progress(known.url)
        return "" if progress is None else progress_text(progress, anyio.current_time())

    def slow_updates(self, after_s: float) -> dict[str, str]:
        """Describe by engine the weight updates that have taken longer than this."""
        begun_by = anyio.current_time() - after_s
        found = ((engine.name, self._verifier.progress(engine.url)) for engine in self._engines.values())
        return {name: self.doing(name) for name, progress in found if progress and progress.since <= begun_by}

    def is_held_by_any(self, version: int) -> bool:
        """Whether an engine that accepts requests holds this version or a newer one."""
        return any(engine.accepts_requests and engine.version >= version for engine in self._engines.values())

    async def wait_ready(self, min_version: int, *, unless: Callable[[], bool]) -> bool:
        """Wait until a request that needs a weight version may be sent.

        Returns:
            False if `unless` became true first; it is checked on every `notify`.
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
        versions = [engine.version for engine in self._admitted()]
        return self._dispatch.may_send(versions, self.version, max(min_version, 1))

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Block new requests inside the context."""
        self._target.num_holds += 1
        try:
            yield
        finally:
            self._target.num_holds -= 1
            with anyio.CancelScope(shield=True):
                await self.notify()

    @property
    def weights(self) -> WeightsAnnounced | None:
        """The target weights; None: none were announced yet."""
        return self._target.weights

    def _lacking(self) -> list[str]:
        """Names of the engines that are ready for a weight update and behind the target."""
        return [engine.name for engine in self._engines.values() if engine.is_behind and engine.may_load]

    async def next_version(self, after: int) -> int:
        """Wait until all ready engines have verified a version above `after`; return it."""
        async with self._target.changed:
            while self.version <= after:
                await self._target.changed.wait()
            return self.version

    def updates(self, version: int, since: float) -> tuple[EngineUpdate, ...]:
        """Return timings of the update to a version, per ready engine that holds it.

        Args:
            version: of the weights.
            since: when the version became the target, on the event loop's clock.
        """
        return tuple(
            EngineUpdate(
                engine=engine.name, pause_s=engine.status.pause_s, took_s=max(0.0, engine.status.updated_at - since)
            )
            for engine in self._admitted()
            if engine.version == version
        )

    @property
    def engines(self) -> list[Engine]:
        """All known engines."""
        return list(self._engines.values())

    @property
    def allowed(self) -> MemoryLevel:
        """The allowed level of the memory shared with the trainer."""
        return self._target.allowed

    async def hold(self, held: bool) -> None:
        """Block new and repeated requests, or unblock them."""
        self.is_held = held
        await self.notify()

    async def allow(self, memory_level: MemoryLevel) -> None:
        """Set the allowed memory level; NOTHING only while no request is running. Does not wait for the engines."""
        self._target.allowed = memory_level
        if memory_level is MemoryLevel.NOTHING:  # a trainer that died during a weight sync will not continue it
            self.syncs.end("the trainer took the GPU memory back")
        await self.notify()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked on every `notify`."""
        await self._target.until(true)

    async def notify(self) -> None:
        """Make waiters check their conditions again."""
        await self._target.notify()

    async def set_target(self, announced: WeightsAnnounced) -> None:
        """Set the weights that all engines update to as soon as they can; does not wait. The last call wins."""
        self._target.weights = announced
        await self.notify()

    def give_up_by(self, give_up: Callable[[], Awaitable[object]]) -> None:
        """Set the callback that gives up unreadable weights in favour of newer ones, if there are any."""
        self._give_up_lost = give_up

    async def run_router(self, url: str) -> None:
        """Use a router: remove the engines that it lists, then send requests to it. Never returns.

        A router that outlived an earlier rollout actor still lists that actor's engines, whatever weights they hold.
        Starts over when the router is lost. Runs in a task that is cancelled when the router's address changes.
        """
        while True:
            self._target.router = None
            for engine in self._engines.values():
                engine.reroute()
            await wait_until(lambda: self._dispatch.free_of(url, None))
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
        wanted: ServerRequirements | None = None,
        memory_share: MemoryShare | None = None,
        files: FileSource = UNCHECKED,
    ) -> None:
        """Bring one engine to its target, step by step, and keep it there (status.py). Never returns.

        Runs in a task that is cancelled when the engine's address changes.

        Args:
            name: of the engine.
            url: where it listens.
            ours: the run started it.
            pid: of its process, as reported by its node daemon; 0: unknown.
            wanted: properties that an external engine must have; None: not checked.
            kill: kills and restarts it, for a reason; None: the run cannot restart it.
            memory_share: its memory, if it shares memory with the trainer (colocation); None: it has its own.
            files: makes weight files available where it reads them.

        Raises:
            WeightsMismatch, RequestRefused, CopyRefused: it refuses the weights for too long, even after restarts, and
                no other engine accepts them.
        """
        engine = await self._replace(
            name, url, ours=ours, pid=pid, wanted=wanted, memory_share=memory_share, files=files
        )
        try:
            await self._bring_to_target(engine, kill)
        finally:
            await engine.abandon_update()

    async def _bring_to_target(self, engine: Engine, kill: Kill | None) -> None:
        """Take an engine's steps. Never returns; `run_engine` says what it raises."""
        refusals, failures = self._refusals.setdefault(engine.name, RefusalCounter()), 0
        while True:
            step = await engine.next_step()
            if engine.state is EngineState.SUSPECT and kill is not None:
                await kill(engine.status.reason)
            try:
                await engine.carry_out(step)
            except EngineError as error:
                match self._after(refusals, error, may_restart=kill is not None):
                    case AfterRefusal.GIVE_UP:
                        raise
                    case AfterRefusal.WAIT:
                        await self._wait_for_others_than(engine.status.failed_version)
                    case AfterRefusal.RESTART:
                        assert kill is not None, "only engines of this run are restarted"
                        await kill(f"it kept refusing weights {self.target_version}: {error}")
                    case AfterRefusal.AGAIN:
                        pass
                failures += 1
                await anyio.sleep(RETRY.pause_s(failures))
            else:
                if engine.accepts_requests:
                    failures = 0
                    refusals.took()

    def _after(self, refusals: RefusalCounter, error: EngineError, *, may_restart: bool) -> AfterRefusal:
        """Choose what follows a failed step of an engine."""
        if is_away(error):
            refusals.away()
            return AfterRefusal.AGAIN
        return refusals.refused(
            anyio.current_time(),
            damaged=isinstance(error, WeightsDamaged),
            # a restart does not help: its node has to provide the copy
            may_restart=may_restart and not isinstance(error, CopyRefused),
            others_serve=bool(self._admitted()),
        )

    async def _wait_for_others_than(self, version: int) -> None:
        """Try to give up the target weights, then wait for another target version, at most RELOOK_S."""
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
        wanted: ServerRequirements | None,
        memory_share: MemoryShare | None,
        files: FileSource,
    ) -> Engine:
        """Create the engine, replacing an earlier one of that name, which is removed from the router."""
        self.request_outcomes.forget(name)
        old = self._engines.get(name)
        engine = self._engines[name] = Engine(
            name,
            url,
            self._client,
            self._verifier,
            self._target,
            workers=self._dispatch,
            events=self.events,
            syncs=self.syncs,
            crashes=self.crashes,
            ours=ours,
            pid=pid,
            wanted=wanted,
            memory_share=memory_share,
            files=files,
            rolling=self._rolling,
        )
        if old is not None:
            old.replaced()
            await old.registration.forget()
        return engine

    def current_engines(self) -> list[Engine]:
        """Engines that accept requests and are not being updated."""
        return [engine for engine in self._engines.values() if engine.state is EngineState.CURRENT]

    def any_engine(self) -> Engine | None:
        """Return an engine that accepts requests, or None."""
        return next(iter(self._admitted()), None)

    def choose(self, min_version: int, prompt: str, *, failed: str | None, by_name: bool) -> Engine | None:
        """Choose the engine of a request after `wait_ready`; None: the router chooses.

        Args:
            min_version: of its weights.
            prompt: identifies its prompt, or its conversation.
            failed: name of the engine that failed to answer it; empty: unknown. None: none did.
            by_name: the router cannot pass it on.
        """
        engines = [engine for engine in self._admitted() if engine.version >= min_version]
        return self._dispatch.choose(engines, prompt, failed=failed, by_name=by_name)

    def holders(self, engine: str) -> list[str]:
        """Return the URLs of the engines that may hold a request; empty: the engine that has it is unknown."""
        return [each.url for each in self._dispatch.may_hold(engine, self._engines)]

    def holder(self, named: str, label: str) -> str:
        """Return the name of the engine that has a request; empty: unknown. Dispatch describes the arguments."""
        return self._dispatch.engine_of(named, label)

    def engine_behind(self, label: str) -> Engine | None:
        """Return the engine of a weight label, or the only engine that accepts requests."""
        engine = self.engine_of(label)
        admitted = self._admitted()
        return admitted[0] if engine is None and len(admitted) == 1 else engine

    @property
    def serves(self) -> bool:
        """Whether there is a router and at least one engine accepts requests."""
        return self._target.router is not None and bool(self._admitted())

    def admitted_names(self) -> str:
        """List the engines that accept requests with their URLs, for people."""
        return " or ".join(f"{engine.name} ({engine.url})" for engine in self._admitted())

    def refused_by(self) -> str:
        """Return why no engine accepts requests, if all engines are external; empty otherwise."""
        engines = self._engines.values()
        if self._admitted() or self.is_held or not engines or any(engine.ours for engine in engines):
            return ""
        return "; ".join(
            f"{engine.name} ({engine.url}) is {engine.state}: {engine.status.reason}" for engine in engines
        )

    async def note_failure(self, engine: Engine, group: str, reason: str, *, counts: bool) -> None:
        """Record a failed request to a running engine.

        Args:
            engine: the engine.
            group: the request's prompt group.
            reason: of the failure.
            counts: the engine is to blame; False if it was only busy.
        """
        self.request_outcomes.failed(engine.name, group, reason, anyio.current_time(), counts=counts)
        await self._judge(engine)

    async def note_answer(self, label: str) -> None:
        """Record a usable answer under a weight label."""
        engine = self.engine_of(label)
        if engine is None:
            return
        self.request_outcomes.answered(engine.name, anyio.current_time())
        for other in self._admitted():
            await self._judge(other)

    async def _judge(self, engine: Engine) -> None:
        """Quarantine an engine that keeps failing while another engine answers well.

        If no other engine answers, restart it if the run started it; otherwise keep using it.
        """
        now = anyio.current_time()
        if (
            not self.request_outcomes.keeps_failing(engine.name, now)
            or not engine.accepts_requests
            or engine.registration.is_apart
        ):
            return
        others = [each.name for each in self._admitted() if each is not engine]
        reason = self.request_outcomes.reason(engine.name)
        if not engine.shares_memory and any(self.request_outcomes.answers(name) for name in others):
            self.request_outcomes.forget(engine.name)
            await engine.quarantine(reason)
        elif engine.ours and all(self.request_outcomes.keeps_failing(name, now) for name in others):
            self.request_outcomes.forget(engine.name)
            await engine.condemn(reason)
        await self.notify()

    def engine_of(self, label: str) -> Engine | None:
        """Return the engine that a weight label was given to, if it still exists."""
        return self._engines.get(self.update_tracker.engine_of(label))

    def note_token(self, label: str, sent_at: float) -> None:
        """Record a token under a weight label, of a request sent at `sent_at`: its engine is alive."""
        engine = self.engine_of(label)
        if engine is not None:
            engine.sign_at = anyio.current_time()
            engine.served_at = max(engine.served_at, sent_at)

    async def report_unavailable(self) -> None:
        """After a failed request, check the router and all engines, and stop using those that fail.

        Concurrent callers share one check.
        """
        if self._check is not None:
            await self._check.wait()
            return
        self._check = anyio.Event()
        try:
            router = self._target.router
            if router is not None and not await self._dispatch.answers(router) and self._target.router == router:
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
        return [
            engine for engine in self._engines.values() if engine.accepts_requests and not engine.registration.is_apart
        ]

    def _asked_or_known(self) -> list[Engine]:
        return [each for each in self._engines.values() if each.registration.is_known or each.accepts_requests]
