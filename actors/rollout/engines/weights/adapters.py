"""LoRA adapters on engines: each weight version is an adapter under a name of its own, so an update pauses nothing.

New requests name the newest verified adapter. Running requests keep theirs to their end, so all their tokens are of one
version. With `on_weight_update = "abort"` they are aborted and continue from their tokens under the newest one.

An adapter that no request uses is unloaded in the background. A load does not wait for that, except for room: an engine
holds at most `limit` adapters. Where they are all in use, the requests of the oldest one move on, as with "abort".
SGLang lets a load wait for an unload, and an unload for requests. So an adapter in use is never unloaded.
"""

from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import anyio
import msgspec
import structlog

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineSilent
from messages import BaseWeights, WeightsAnnounced
from runtime.bus.background import in_background
from runtime.settings.placement import UpdateLimits

log = structlog.get_logger()

UNLOAD_TIMEOUT_S: Final = 20.0  # of an adapter that no request uses
RETRY_S: Final = 5.0  # after a failed unload

Interrupt = Callable[
    [str, str], Coroutine[Any, Any, None]
]  # URL and adapter; aborts its training requests until cancelled


class ServedAdapter(NamedTuple):
    """An adapter on an engine."""

    name: str  # on the engine, never used twice
    label: str  # weight label of the tokens that it samples
    version: int


class EngineAdapters:
    """The adapters that one engine has loaded, and which of them requests use."""

    def __init__(self, limit: int) -> None:
        """Start without adapters; `limit` is the largest number of them on the engine."""
        self.limit = limit
        self.base_label = ""  # weight label of the verified base model; empty: it is not verified
        self.base_checksum = ""
        self.newest: ServedAdapter | None = None  # the one for new requests, which is verified
        self.waits_for_room = False  # a load waits until fewer are loaded
        self._verifying = ""  # name of the one that is being verified
        self._loaded: dict[str, ServedAdapter] = {}  # oldest first
        self._num_requests: Counter[str] = Counter()
        self._num_moved_on = 0  # since the last `take_moved_on`
        self._changed = anyio.Event()  # replaced at every change

    @property
    def loaded(self) -> list[ServedAdapter]:
        """All that the engine has loaded, oldest first."""
        return list(self._loaded.values())

    @property
    def older(self) -> list[ServedAdapter]:
        """Those that no new request gets, oldest first."""
        kept = {self._verifying, self.newest.name if self.newest else ""}
        return [each for each in self.loaded if each.name not in kept]

    @property
    def is_full(self) -> bool:
        """Whether the engine has no room for another adapter."""
        return len(self._loaded) >= self.limit

    def is_used(self, name: str) -> bool:
        """Whether a request that is in flight names an adapter."""
        return self._num_requests[name] > 0

    def note_moving_on(self, name: str) -> None:
        """Count the requests of an adapter that go on under a newer one, so that another one has room."""
        self._num_moved_on += self._num_requests[name]

    def take_moved_on(self) -> int:
        """Return how many requests moved on for room, since the last call."""
        number, self._num_moved_on = self._num_moved_on, 0
        return number

    @contextmanager
    def used(self) -> Generator[ServedAdapter | None]:
        """Yield the newest adapter, which stays loaded inside the block. None: there is none."""
        adapter = self.newest
        if adapter is None:
            yield None
            return
        self._num_requests[adapter.name] += 1
        try:
            yield adapter
        finally:
            self._num_requests[adapter.name] -= 1
            self._notify()

    async def room(self) -> None:
        """Wait until fewer adapters than `limit` are loaded."""
        self.waits_for_room = self.is_full
        self._notify()
        try:
            await self.until(lambda: not self.is_full)
        finally:
            self.waits_for_room = False

    def begin(self, adapter: ServedAdapter) -> None:
        """Note that an adapter is being loaded. It counts from now on: the answer to the call may be lost."""
        self._loaded[adapter.name] = adapter
        self._verifying = adapter.name
        self._notify()

    def end(self, adapter: ServedAdapter, *, is_verified: bool) -> None:
        """Note that a load is over. New requests get the adapter if it is verified, else it is unloaded."""
        self._verifying = ""
        if is_verified:
            self.newest = adapter
        self._notify()

    def remove(self, name: str) -> None:
        """Note that an adapter is not loaded any more."""
        self._loaded.pop(name, None)
        self._notify()

    def find_more(self, names: Iterable[str]) -> None:
        """Note adapters that an engine reports and this does not know: an earlier caller's load ended late."""
        for name in names:
            self._loaded.setdefault(name, ServedAdapter(name, "", 0))
        self._notify()

    def found(self, names: list[str]) -> None:
        """Take what an engine reports for what it has loaded: others left it behind."""
        self.newest = None
        self._loaded = {name: self._loaded.get(name, ServedAdapter(name, "", 0)) for name in names}
        self._notify()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked at every change."""
        while not true():
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class AdapterUpdates:
    """Loads adapters into the engines of a rollout actor, and unloads those that no request uses."""

    def __init__(
        self, client: SglangClient, run: str, *, moves_on: bool, limits: UpdateLimits, interrupt: Interrupt
    ) -> None:
        """Set up without any IO.

        Args:
            client: for the engines.
            run: name of the run, with which the adapters' names begin.
            moves_on: running requests move on to a newer adapter at once.
            limits: of the steps of an update.
            interrupt: aborts the requests of an adapter; they continue under the newest one.
        """
        self._client = client
        self._prefix = f"{run}-"
        self._moves_on = moves_on
        self._limits = limits
        self._interrupt = interrupt

    async def inherit(self, url: str, adapters: EngineAdapters) -> None:
        """Find what an engine has loaded: an earlier rollout actor may have left adapters of this run.

        Raises:
            EngineError: it does not answer.
        """
        adapters.found(self._own(await self._client.adapters(url)))

    def _own(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.startswith(self._prefix)]

    def named(self, label: str, version: int) -> ServedAdapter:
        """Return the adapter of a weight update. Its name has the run, the version, the engine and the session."""
        return ServedAdapter(f"{self._prefix}{label}", label, version)

    async def load(
        self, url: str, adapters: EngineAdapters, announced: WeightsAnnounced, adapter: ServedAdapter
    ) -> None:
        """Load the adapter of a version, and compare what the engine says of it.

        The caller ends the load with `EngineAdapters.end`, also after an error.

        Raises:
            WeightsMismatch: the engine has loaded something else.
            EngineError: it did not load it.
        """
        with anyio.move_on_after(self._limits.stall_s) as waiting:
            await adapters.room()
        if waiting.cancelled_caught:
            raise EngineSilent(f"{url}: no room for adapter {adapter.name} within {self._limits.stall_s:g} s")
        adapters.begin(adapter)
        answer = await self._client.load_adapter(
            url, adapter.name, announced.path, self._limits.load_s(announced.size_bytes)
        )
        adapters.find_more(self._own(answer.loaded_adapters))
        if (path := answer.loaded_adapters.get(adapter.name)) != announced.path:
            raise WeightsMismatch(f"{url}: adapter {adapter.name} is of {path!r}, expected {announced.path!r}")
        found = answer.checksums.get(adapter.name)
        if found is not None and found != announced.checksum:
            raise WeightsMismatch(
                f"{url}: the tensors of adapter {adapter.name} have checksum {found[:12]}, "
                f"{announced.checksum[:12]} was announced"
            )
        log.info("adapter_loaded", url=url, adapter=adapter.name, num_loaded=len(adapters.loaded))

    async def tidy(self, url: str, adapters: EngineAdapters) -> None:
        """Unload adapters that no request uses, and move requests on where they have to. Never returns."""
        while True:
            await adapters.until(lambda: self._next(adapters) is not None)
            adapter = self._next(adapters)
            if adapter is None:
                continue
            if adapters.is_used(adapter.name):
                if not self._moves_on:  # otherwise each update moves them on, with room or without
                    adapters.note_moving_on(adapter.name)
                await self._move_on(url, adapters, adapter)
            elif not await self._unloaded(url, adapter.name):
                await anyio.sleep(RETRY_S)  # nothing reports that the engine can unload again
            else:
                adapters.remove(adapter.name)

    def _next(self, adapters: EngineAdapters) -> ServedAdapter | None:
        """Return the adapter to unload next, or whose requests have to move on; None: there is none."""
        older = adapters.older
        unused = next((each for each in older if not adapters.is_used(each.name)), None)
        if unused is not None or not older or adapters.newest is None:
            return unused
        return older[0] if self._moves_on or adapters.waits_for_room else None

    async def _move_on(self, url: str, adapters: EngineAdapters, adapter: ServedAdapter) -> None:
        log.info("requests_move_on", url=url, adapter=adapter.name, num_loaded=len(adapters.loaded))
        with anyio.move_on_after(self._limits.stall_s):
            async with in_background(partial(self._interrupt, url, adapter.name)):
                await adapters.until(lambda: not adapters.is_used(adapter.name))

    async def _unloaded(self, url: str, name: str) -> bool:
        """Unload an adapter. Returns whether the engine is without it now."""
        try:
            await self._client.unload_adapter(url, name, UNLOAD_TIMEOUT_S)
        except EngineError as error:
            log.warning("adapter_not_unloaded", url=url, adapter=name, error=str(error))
            try:
                return name not in await self._client.adapters(url)
            except EngineError:
                return False
        log.info("adapter_unloaded", url=url, adapter=name)
        return True


def base_announcement(announced: WeightsAnnounced, base: BaseWeights) -> WeightsAnnounced:
    """Announce the base model of an adapter version in its place, as version 0, whose tokens are never used."""
    return msgspec.structs.replace(
        announced,
        version=0,
        kind="full",
        path=base.path,
        checksum=base.checksum,
        size_bytes=base.size_bytes,
        files=base.files,
        engine_sums=base.engine_sums,
        no_sums=base.no_sums,
        manifest=base.manifest,
        probe=None,
        base=None,
    )
