"""How many samples each engine gets: as many as it reports that it can hold, within the bounds of the pool."""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import anyio
import structlog

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.fleet import Fleet
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.control_answers import Load
from actors.rollout.sglang.errors import EngineError
from messages import EngineLoad

log = structlog.get_logger()

EVERY_S: Final = 1.0  # between two reports of an engine, at least
TIMEOUT_S: Final = 1.0  # for a report
FULL: Final = 0.9  # share of the KV cache from which waiting requests count as requests that find no room
ROOMY: Final = 0.8  # share of the KV cache up to which an engine gets more samples
KEPT_UNDER_PRESSURE: Final = 7 / 8  # of the requests that run
STEPS_TO_MOST: Final = 16  # reports without pressure until an engine with no samples may have the most


class Pressure(NamedTuple):
    """What an engine reports of its load."""

    num_running: int = 0
    num_waiting: int = 0  # in its queue
    num_retracted: int = 0  # requests that lost their place in the KV cache a moment ago
    usage: float = 0.0  # share of the KV cache that its requests hold


class Bounds(NamedTuple):
    """The least and the most samples in flight per engine."""

    least: int
    most: int


def pressure_of(loads: Sequence[Load]) -> Pressure:
    """Join the loads of an engine's schedulers: the sums, and the fullest cache. Pure."""
    return Pressure(
        num_running=sum(load.num_running_reqs for load in loads),
        num_waiting=sum(load.num_waiting_reqs for load in loads),
        num_retracted=sum(load.queues.retracted for load in loads if load.queues is not None),
        usage=max((load.token_usage for load in loads), default=0.0),
    )


def next_limit(limit: int, now: Pressure, before: Pressure, bounds: Bounds) -> int:
    """Return the number of samples that an engine may have from now on. Pure.

    Its cache is full if requests were retracted, or wait while FULL of it is used: it gets fewer samples than now run.
    A queue without a full cache has other causes, such as other clients, or prefills that pass: it gets a quarter of
    the queue less, if the queue was there before. Without a queue and with room in the cache it gets a few more.
    A report equal to the last one says nothing new of a pressure: SGLang repeats its statistics until the next ones.

    Args:
        limit: the number until now.
        now: its newest report.
        before: the report before that.
        bounds: of the result.
    """
    wanted = limit
    is_empty = not now.num_running and not now.num_waiting
    if is_empty or (not now.num_waiting and not now.num_retracted and now.usage <= ROOMY):
        wanted = limit + max(1, bounds.most // STEPS_TO_MOST)
    elif now == before:
        pass
    elif now.num_retracted or (now.num_waiting and now.usage >= FULL):
        wanted = min(limit, math.floor(KEPT_UNDER_PRESSURE * now.num_running))
    elif now.num_waiting:
        wanted = limit - math.ceil(min(now.num_waiting, before.num_waiting) / 4)
    return max(bounds.least, min(bounds.most, wanted))


class EngineLimits:
    """Sets the number of samples in flight: those that the engines which accept requests may have together.

    Follows their pressure, unless all may always have the most. An engine that was not heard of yet may have the most
    samples. One that does not report keeps its number. An engine with older weights than tasks need has none: in a
    weight update all samples would crowd on the engines that are updated first. While no engine has slots there are
    none, so that other rollout actors take the tasks; without others, there are those of one engine.
    """

    def __init__(
        self,
        client: SglangClient,
        fleet: Fleet,
        resize: Callable[[int], None],
        bounds: Bounds,
        *,
        is_alone: bool = True,
    ) -> None:
        """Follow nothing yet.

        Args:
            client: for the engines.
            fleet: the engines.
            resize: sets the number of samples in flight of the whole pool.
            bounds: for each engine.
            is_alone: no other rollout actor could take tasks.
        """
        self._client = client
        self._fleet = fleet
        self._resize = resize
        self._bounds = bounds
        self._without_engines = bounds.most if is_alone else 0
        self._counted: set[str] = set()  # engines that have slots
        self._needed = 0  # highest weight version that a task needed
        self._limits: dict[str, int] = {}
        self._reports: dict[str, Pressure] = {}
        self._silent: set[str] = set()

    async def run(self) -> None:
        """Follow the engines. Never returns."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_engines)
            while True:
                await anyio.sleep(EVERY_S)
                await self.look()

    async def look(self) -> None:
        """Get a report of each engine that accepts requests, and apply the new limits."""
        engines = {engine.name: engine for engine in self._fleet.engines}
        self._limits = {name: limit for name, limit in self._limits.items() if name in engines}
        if self._bounds.least < self._bounds.most:
            async with anyio.create_task_group() as group:
                for engine in engines.values():
                    if engine.accepts_requests:  # others are paused or away, and their queue says nothing
                        group.start_soon(self._ask, engine)
        self._apply()

    def need(self, version: int) -> None:
        """Give slots only to engines with this weight version or a newer one: a task needs it."""
        if version > self._needed:
            self._needed = version
            self._apply()

    async def _follow_engines(self) -> None:
        """Give an engine its slots as soon as it accepts requests with the weights that tasks need. Never returns."""
        while True:
            await self._fleet.until(lambda: not self._serving() <= self._counted)
            self._apply()

    def _serving(self) -> set[str]:
        engines = self._fleet.engines
        return {each.name for each in engines if each.accepts_requests and each.version >= self._needed}

    def _apply(self) -> None:
        most = self._bounds.most
        for engine in self._fleet.engines:
            engine.room = self._limits.get(engine.name, most) / most
        self._counted = self._serving()
        self._resize(sum(self._limits.get(name, most) for name in self._counted) or self._without_engines)

    async def _ask(self, engine: Engine) -> None:
        loads, reason = (), f"no answer within {TIMEOUT_S:g} s"
        with anyio.move_on_after(TIMEOUT_S):
            try:
                loads = await self._client.reported_loads(engine.url)
                reason = "it has no schedulers"
            except EngineError as error:
                reason = str(error)
        if not loads:
            engine.reported = EngineLoad()
            if engine.name not in self._silent:
                self._silent.add(engine.name)
                log.warning("engine_load_not_reported", engine=engine.name, url=engine.url, reason=reason)
            return
        self._silent.discard(engine.name)
        now, name = pressure_of(loads), engine.name
        engine.reported = EngineLoad(running=now.num_running, waiting=now.num_waiting, cache_usage=round(now.usage, 3))
        limit = next_limit(
            self._limits.get(name, self._bounds.most), now, self._reports.get(name, Pressure()), self._bounds
        )
        if limit != self._limits.get(name, self._bounds.most):
            log.debug("engine_limit_changed", engine=name, limit=limit, **now._asdict())
        self._limits[name], self._reports[name] = limit, now
