"""Loads weights into engines, and handles their running requests meanwhile."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Final, Literal, NamedTuple

import anyio
import structlog

from actors.rollout.engines.weights.receiving import Receiver
from actors.rollout.engines.weights.sync import SyncMember
from actors.rollout.sglang.client import ADMIN_TIMEOUT_S, SglangClient
from actors.rollout.sglang.control_answers import Load
from actors.rollout.sglang.errors import EngineError, EngineSilent, EngineUnavailable
from messages import EngineSums, WeightsAnnounced
from runtime.bus.background import in_background
from runtime.bus.errors import BusError
from runtime.bus.kv import KeyValues
from runtime.settings.placement import UpdateLimits
from runtime.util.formatting import count_of, duration

log = structlog.get_logger()

Mode = Literal["drain", "abort", "retract", "in_place"]
Interrupt = Callable[[str, str | None], Awaitable[None]]
Hold = Callable[[], AbstractAsyncContextManager[None]]

CONTINUE_TRIES: Final = 3
CLEAR_S: Final = 2.5  # time to interrupt requests on wrong weights; repeats once a second

IDLE_POLL_S: Final = 0.05
SERVING_POLL_S: Final = 1.0  # while an engine may finish its requests before it loads


class Progress(NamedTuple):
    """What an engine does in its weight update."""

    what: str  # changes whenever something moves
    since: float  # when the update began, on the event loop's clock
    limit_s: float = 0.0  # of a step that shows no progress; 0: it has none


class Pauses:
    """URLs of engines that the run paused and has not continued since.

    An engine does not report which client paused it. So a pause of an external engine is noted on the bus before it
    begins, and until it ends. The next rollout actor of the run ends exactly those pauses. A stale note, e.g. after a
    crash before the pause, is dropped as soon as the engine generates.

    Args:
        kv: the run's bucket; None: nothing is stored.
        pool: of the engines.
        others: URLs of the external engines, each with a key of its own: several rollout actors write at once.
    """

    def __init__(self, kv: KeyValues | None = None, pool: str = "", others: Collection[str] = ()) -> None:
        self._kv = kv
        self._keys = {url: f"paused.{pool}.{hashlib.sha256(url.encode()).hexdigest()[:16]}" for url in others}
        self._urls: set[str] = set()
        self._noting = anyio.Lock()

    def __contains__(self, url: str) -> bool:
        return url in self._urls

    async def inherit(self) -> None:
        """Take over the pauses that an earlier rollout actor left.

        Raises:
            BusError: the bucket is unreadable.
        """
        for url, key in self._keys.items():
            entry = None if self._kv is None else await self._kv.get(key, bool)
            if entry is not None and entry.value:
                self._urls.add(url)

    async def begin(self, url: str) -> None:
        """Note that an engine is about to be paused.

        Raises:
            EngineUnavailable: the note cannot be written, so the engine must not be paused.
        """
        async with self._noting:
            try:
                await self._note(url, is_paused=True)
            except BusError as error:
                raise EngineUnavailable(
                    f"{url}: not paused, because the pause could not be recorded: {error}"
                ) from error
            self._urls.add(url)

    async def end(self, url: str) -> None:
        """Remove the note: the engine generates, whatever ended its pause."""
        if url not in self._urls:
            return
        self._urls.discard(url)
        async with self._noting:
            try:
                await self._note(url, is_paused=False)
            except BusError as error:  # the next write omits it; a new actor before that finds the engine generating
                log.warning("pause_still_noted", url=url, error=str(error))

    async def _note(self, url: str, *, is_paused: bool) -> None:
        if self._kv is not None and (key := self._keys.get(url)) is not None:
            await self._kv.put(key, is_paused)


class SentWeights(NamedTuple):
    """What an engine was told to load."""

    checksum: str  # of the files, or of the tensors of a weight sync
    sums: EngineSums | None  # of the tensors that the engine holds then; None: `no_sums` says why
    no_sums: str


class Updater:
    """Updates engines according to the recipe's `on_weight_update`.

    - drain: the engine finishes its running requests first.
    - abort: training requests are aborted and continue from their tokens under the new weights.
    - retract: requests are paused and recomputed from their tokens under the new weights.
    - in_place: requests are paused and continue with the KV cache of the old weights.

    Args:
        client: for the engines.
        mode: one of these.
        pauses: stores which engines are paused; None: in memory.
        limits: of the steps of an update.
        requests_s: the longest time that requests may run. An update waits for them no longer.
    """

    def __init__(
        self,
        client: SglangClient,
        mode: Mode,
        pauses: Pauses | None = None,
        *,
        limits: UpdateLimits | None = None,
        requests_s: float = 14_400.0,
    ) -> None:
        self._client = client
        self._mode: Mode = mode
        self.limits = limits or UpdateLimits()
        self._requests_s = requests_s
        self._progress: dict[str, Progress] = {}  # by the URL of an engine that is being updated
        self._interrupt: Interrupt | None = None
        self._hold: Hold = nullcontext
        self._pauses = Pauses() if pauses is None else pauses
        self._receiver = Receiver(client, self.limits.stall_s, self.note)

    def interrupt_by(self, interrupt: Interrupt) -> None:
        """Set the callback that aborts training requests until it is cancelled, by the engine's URL and an adapter."""
        self._interrupt = interrupt

    async def interrupt(self, url: str, adapter: str) -> None:
        """Abort the training requests that name an adapter, until cancelled."""
        assert self._interrupt is not None, "the generator sets it at the start"
        await self._interrupt(url, adapter)

    def hold_by(self, hold: Hold) -> None:
        """Set the context manager that blocks new requests."""
        self._hold = hold

    def note(self, url: str, what: str, limit_s: float = 0.0) -> None:
        """Note what an engine does in its update; `limit_s` is the limit of a step that shows no progress."""
        before = self._progress.get(url)
        self._progress[url] = Progress(what, anyio.current_time() if before is None else before.since, limit_s)

    def end_note(self, url: str) -> None:
        """Note that an engine's update has ended."""
        self._progress.pop(url, None)

    def progress(self, url: str) -> Progress | None:
        """Return what an engine does in its update; None: it is not being updated."""
        return self._progress.get(url)

    @asynccontextmanager
    async def loaded(
        self, url: str, announced: WeightsAnnounced, label: str, member: SyncMember | None, *, is_compared: bool
    ) -> AsyncGenerator[SentWeights]:
        """Load weights, and let the engine go on after the block.

        Yields:
            What was sent. If it is compared, the engine generates nothing in the block.

        Args:
            url: of the engine.
            announced: the weights.
            label: the engine's new weight label.
            member: its membership in the weight sync; None: the weights are in files.
            is_compared: whether the engine's own checksum is to be compared.

        Raises:
            EngineError: the weights were not loaded, or the engine cannot be continued after its pause.
        """
        in_files = SentWeights(announced.checksum, announced.engine_sums, announced.no_sums)
        if member is not None:
            async with self._stopped(url):
                with _reporting_to(member):
                    decided = await self._receiver.receive(url, member, label)
                    if self._mode != "in_place":
                        await self._client.flush_cache(url, 0.0)
                    yield SentWeights(decided.checksum, decided.engine_sums, decided.no_sums)
        elif self._mode == "retract" or self._mode == "in_place":
            async with self._paused(url, self._mode):
                # the KV cache of paused requests is in use and cannot be flushed
                await self._load(url, announced, label, flush_cache=self._mode == "retract")
                yield in_files
        else:
            await self._load_unpaused(url, announced, label)
            async with self._paused(url, "in_place") if is_compared else nullcontext():
                yield in_files
        if self.is_paused(url):
            raise EngineUnavailable(f"{url}: still paused, because continuing it after the weight update failed")

    @asynccontextmanager
    async def _stopped(self, url: str) -> AsyncGenerator[None]:
        """Stop generation inside the block. Requests that still arrive are recomputed afterwards."""
        if self._mode == "retract" or self._mode == "in_place":
            async with self._paused(url, self._mode):
                yield
            return
        async with self._hold():
            if self._mode == "drain":
                await self._until_idle(url)
            else:
                async with in_background(lambda: self._keep_interrupting(url)):
                    await self._until_idle(url)
            async with self._paused(url, "retract"):
                yield

    async def _until_idle(self, url: str) -> None:
        """Wait until an engine has no requests, while new ones are blocked.

        Raises:
            EngineSilent: it has some that do not move, or does not report its load.
        """
        seen: Sequence[Load] | None = None
        with anyio.move_on_after(self._requests_s), anyio.move_on_after(self.limits.stall_s) as moving:
            while not is_idle(loads := await self._client.loads(url)):
                if loads is not None and loads != seen:
                    seen, moving.deadline = loads, anyio.current_time() + self.limits.stall_s
                    self.note(url, f"waits for {_shown(loads)}")
                await anyio.sleep(IDLE_POLL_S)
            return
        stalled = f"none of them moved for {self.limits.stall_s:g} s (update_stall_s)"
        late = f"the limit is {self._requests_s:g} s (rollout.generate_timeout_s)"
        raise EngineSilent(f"{url}: its requests did not end: {stalled if moving.cancelled_caught else late}")

    def is_paused(self, url: str) -> bool:
        """Whether this or an earlier rollout actor paused an engine and has not been able to continue it."""
        return url in self._pauses

    async def proceed(self, url: str) -> None:
        """End an engine's pause, if there is one.

        Raises:
            EngineError: the call failed.
        """
        await self._client.proceed(url)
        await self._pauses.end(url)

    async def forget_pause(self, url: str) -> None:
        """Drop the note of a pause: the engine generates, whatever ended its pause."""
        await self._pauses.end(url)

    async def clear(self, url: str) -> None:
        """Interrupt the training requests of an engine."""
        with anyio.move_on_after(CLEAR_S):
            await self._keep_interrupting(url)

    async def _load_unpaused(self, url: str, announced: WeightsAnnounced, label: str) -> None:
        if self._mode == "drain":
            await self._load(url, announced, label)
            return
        async with in_background(lambda: self._keep_interrupting(url)):
            await self._load(url, announced, label)

    async def _load(self, url: str, announced: WeightsAnnounced, label: str, *, flush_cache: bool = True) -> None:
        """Make an engine load files. It finishes its running requests first, unless it is paused.

        The call shows no progress, so its limit follows from the size. It begins anew while requests still move.

        Raises:
            EngineSilent: it did not load them within the limit.
        """
        limit_s = self.limits.load_s(announced.size_bytes)
        what = f"loads {announced.size_bytes / 1e9:,.1f} GB"
        self.note(url, what, limit_s)
        with anyio.move_on_after(limit_s) as loading:
            async with in_background(lambda: self._extend_while_serving(url, loading, what, limit_s)):
                await self._client.update_weights(
                    url, announced.path, label, flush_cache=flush_cache, timeout_s=limit_s + self._requests_s
                )
            return
        raise EngineSilent(
            f"{url}: did not load {announced.size_bytes} bytes within {limit_s:g} s (update_stall_s, min_load_mb_per_s)"
        )

    async def _extend_while_serving(self, url: str, loading: anyio.CancelScope, what: str, limit_s: float) -> None:
        """Give a load more time while the engine's requests move. Its load report stands still while it loads."""
        seen = await self._client.loads(url)
        while True:
            await anyio.sleep(SERVING_POLL_S)
            loads = await self._client.loads(url)
            if loads is None or loads == seen:
                self.note(url, what, limit_s)
                continue
            seen, loading.deadline = loads, anyio.current_time() + limit_s
            if not is_idle(loads):
                self.note(url, f"waits for {_shown(loads)} before it loads")

    async def _keep_interrupting(self, url: str) -> None:
        assert self._interrupt is not None, "the generator sets it at the start"
        await self._interrupt(url, None)

    @asynccontextmanager
    async def _paused(self, url: str, mode: str) -> AsyncGenerator[None]:
        await self._pauses.begin(url)  # before the call: its response may be lost
        tries = CONTINUE_TRIES
        try:
            await self._client.pause(url, mode)
            yield
        except EngineSilent:
            tries = 1  # its health is checked next, and others wait for that meanwhile
            raise
        finally:
            with anyio.move_on_after(tries * ADMIN_TIMEOUT_S, shield=True):
                await self._proceed_surely(url, tries)

    async def _proceed_surely(self, url: str, tries: int) -> None:
        """End a pause, with retries. If all fail, the pause is ended before the engine is marked ready again."""
        for _ in range(tries):
            try:
                await self.proceed(url)
            except EngineError as error:
                log.warning("engine_still_paused", url=url, error=str(error))
            else:
                return


@contextmanager
def _reporting_to(member: SyncMember) -> Generator[None]:
    """Report a failure at once: the trainer waits for it, and ending the pause of a hung engine takes long."""
    try:
        yield
    except EngineError as error:
        member.fail(str(error))
        raise


def progress_text(progress: Progress, now: float) -> str:
    """Describe an engine's update for people; `now` is on the event loop's clock."""
    limit = f", limit {duration(progress.limit_s)}" if progress.limit_s else ""
    return f"{progress.what} ({duration(now - progress.since)}{limit})"


def _shown(loads: Sequence[Load]) -> str:
    number = sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)
    return f"{count_of(number, 'request')} with {sum(load.num_used_tokens for load in loads):,} tokens"


def is_idle(loads: Sequence[Load] | None) -> bool:
    """Whether an engine reports no running and no waiting requests."""
    return loads is not None and not any(load.num_running_reqs or load.num_waiting_reqs for load in loads)
