"""The engines of a rollout actor: their state, their weights, and their registration at the router."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import anyio
import anyio.lowlevel
import structlog

from actors.rollout.engines.checks import ServerRequirements
from actors.rollout.engines.dispatch import Dispatch
from actors.rollout.engines.engine import Engine
from actors.rollout.engines.failures import AfterRefusal, RecentCrashes, RefusalCounter
from actors.rollout.engines.memory import MemoryShare
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.router import ThroughRouter, wait_until
from actors.rollout.engines.serving import Serving, no_others
from actors.rollout.engines.status import MemoryLevel
from actors.rollout.engines.target import FleetTarget, RollingUpdate
from actors.rollout.engines.weights.adapters import EngineAdapters
from actors.rollout.engines.weights.files import UNCHECKED, CopyRefused, FileSource, WeightsDamaged
from actors.rollout.engines.weights.sync import WeightSyncs
from actors.rollout.engines.weights.updater import progress_text
from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, is_away
from messages import EngineChecksum, EngineState, EngineUpdate, WeightsAnnounced
from runtime.bus.background import in_background
from runtime.process.actor import InputError
from runtime.settings.topology import POLICY
from runtime.util.retrying import Backoff

log = structlog.get_logger()

RETRY = Backoff(max_s=1.0)  # between attempts to mark an engine ready; unlimited, as it or other weights may still come
RELOOK_S = 60.0  # retry interval for damaged weight files: their disk may recover


class Kill(Protocol):
    """Has an engine of the run killed, and restarted unless `gives_up`."""

    async def __call__(self, reason: str, *, gives_up: bool = False) -> None: ...


class WeightsNotTaken(InputError):
    """No engine takes the weights, also after restarts; another start of the rollout actor would not help."""


class Fleet:
    """Keeps engines updated and registered. Requests are sent to those that `serving` names.

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
        max_adapters: int = 0,
    ) -> None:
        self._client = client
        self._max_adapters = max_adapters
        self._dispatch = dispatch or ThroughRouter(client, verifier.updates.engine_of)
        self._verifier = verifier
        self.events = events or RateLimitedEvents()
        self.crashes = RecentCrashes()
        self._engines: dict[str, Engine] = {}
        self._target = FleetTarget()
        self._target.router = self._dispatch.first_url
        self.serving = Serving(self._engines, self._target, self._dispatch, verifier.updates, self.events, self.crashes)
        self._rolling = RollingUpdate(update_groups, lambda: self._engines)
        self.syncs = WeightSyncs(self._target, self._lacking, self._rolling.group_of, self.doing)
        self._refusals: dict[str, RefusalCounter] = {}  # by engine
        self._give_up_lost: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint
        self._others_hold: Callable[[int], Awaitable[bool]] = no_others

    @property
    def target_version(self) -> int:
        """The target weight version; 0: none was announced yet."""
        return self._target.version

    def waits_for(self) -> str:
        """Describe for people what blocks requests; empty if nothing does."""
        if self.serving.is_held:
            return "a colocation phase: the trainer holds the GPU memory, or engines release or resume it"
        if self._target.router is None:
            return self._dispatch.waits_for
        if self._target.weights is None:
            return "the first weights"
        behind = [engine.name for engine in self._engines.values() if engine.is_behind]
        if not self.serving.admitted():
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
            while self.serving.version <= after:
                await self._target.changed.wait()
            return self.serving.version

    def updates(self, version: int, since: float) -> tuple[EngineUpdate, ...]:
        """Return timings of the update to a version, per ready engine that holds it. Called once for each version.

        Args:
            version: of the weights.
            since: when the version became the target, on the event loop's clock.
        """
        return tuple(
            EngineUpdate(
                engine=engine.name,
                pause_s=engine.status.pause_s,
                took_s=max(0.0, engine.status.updated_at - since),
                num_moved_on=0 if engine.adapters is None else engine.adapters.take_moved_on(),
            )
            for engine in self.serving.admitted()
            if engine.version == version
        )

    def take_not_compared(self) -> dict[str, tuple[str, ...]]:
        """Return the engines whose tensors are not compared with the trainer's sums, by reason; each pair once."""
        return self._verifier.take_not_compared()

    def take_checksums(self) -> tuple[EngineChecksum, ...]:
        """Return the newest checksums of verified engines, by layout; each once."""
        return self._verifier.take_checksums()

    def learn(self, checksums: Iterable[EngineChecksum]) -> None:
        """Compare engines from now on with those that other rollout actors verified."""
        self._verifier.learn(checksums)

    @property
    def engines(self) -> list[Engine]:
        """All known engines."""
        return list(self._engines.values())

    @property
    def allowed(self) -> MemoryLevel:
        """The allowed level of the memory shared with the trainer."""
        return self._target.allowed

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

    def ask_others_by(self, hold: Callable[[int], Awaitable[bool]], answer: Callable[[], Awaitable[bool]]) -> None:
        """Set how to find out whether engines of other rollout actors hold a version, and whether they answer."""
        self._others_hold = hold
        self.serving.others_answer = answer

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
            WeightsNotTaken: it refuses the weights for too long, even after a restart, and no other engine holds them.
        """
        engine = await self._replace(
            name, url, ours=ours, pid=pid, wanted=wanted, memory_share=memory_share, files=files
        )
        try:
            async with in_background(engine.tidy):
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
                others_hold = await self._others_hold(self.target_version)
                match self._after(refusals, error, may_restart=kill is not None, others_hold=others_hold):
                    case AfterRefusal.GIVE_UP:
                        raise self._not_taken(error) from error
                    case AfterRefusal.WAIT:
                        await self._wait_for_others_than(engine.status.failed_version)
                    case AfterRefusal.RESTART:
                        assert kill is not None, "only engines of this run are restarted"
                        await kill(f"it kept refusing weights {self.target_version}: {error}")
                    case AfterRefusal.DROP:
                        assert kill is not None, "only engines of this run are given up"
                        why = f"3 of its processes refused weights {self.target_version}, which other engines hold"
                        await kill(f"{why}: {error}", gives_up=True)
                    case AfterRefusal.AGAIN:
                        pass
                failures += 1
                await anyio.sleep(RETRY.pause_s(failures))
            else:
                if engine.accepts_requests:
                    failures = 0
                    refusals.took()

    def _after(
        self, refusals: RefusalCounter, error: EngineError, *, may_restart: bool, others_hold: bool
    ) -> AfterRefusal:
        """Choose what follows a failed step of an engine; `others_hold`: an engine of another actor has the target."""
        if is_away(error):
            refusals.away()
            return AfterRefusal.AGAIN
        return refusals.refused(
            anyio.current_time(),
            damaged=isinstance(error, WeightsDamaged),
            mismatch=isinstance(error, WeightsMismatch),
            # a restart does not help: its node has to provide the copy
            may_restart=may_restart and not isinstance(error, CopyRefused),
            others_hold=others_hold or any(engine.version == self.target_version for engine in self.serving.admitted()),
        )

    def _not_taken(self, error: EngineError) -> WeightsNotTaken:
        """Say for people that no engine takes the target weights."""
        reason = f"no engine takes weights v{self.target_version}: {error}"
        if isinstance(error, WeightsMismatch) and not isinstance(error, WeightsDamaged):
            where = "docs/run/troubleshooting.md#weights-that-no-engine-takes"
            reason += f". What is compared: engines.{POLICY}.verify ({where})"
        return WeightsNotTaken(reason)

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
        self.serving.outcomes.forget(name)
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
            adapters=EngineAdapters(self._max_adapters) if self._max_adapters else None,
        )
        if old is not None:
            old.replaced()
            await old.registration.forget()
        return engine
