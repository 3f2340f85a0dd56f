"""Weight updates of an engine, and the handling of its running requests meanwhile."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final, Literal, NamedTuple

import anyio
import structlog

from actors.rollout.engines.weights.pauses import Pauses
from actors.rollout.engines.weights.receiving import Receiver
from actors.rollout.engines.weights.sync import SyncMember
from actors.rollout.sglang.client import ADMIN_TIMEOUT_S, Load, SglangClient
from actors.rollout.sglang.errors import EngineError, EngineSilent, EngineUnavailable
from messages import WeightsAnnounced
from runtime.bus.background import in_background
from runtime.settings.placement import UpdateLimits
from runtime.util.formatting import count_of, duration

log = structlog.get_logger()

Mode = Literal["drain", "abort", "retract", "in_place"]
Interrupt = Callable[[str], Awaitable[None]]
Hold = Callable[[], AbstractAsyncContextManager[None]]

CONTINUE_TRIES: Final = 3
CLEAR_S: Final = 2.5  # time to interrupt requests on wrong weights; repeats once a second

IDLE_POLL_S: Final = 0.05
SERVING_POLL_S: Final = 1.0  # while an engine may finish its requests before it loads

Check = Callable[[str], Awaitable[None]]  # receives the checksum of the loaded weights


class Progress(NamedTuple):
    """What an engine does in its weight update."""

    what: str  # changes whenever something moves
    since: float  # when the update began, on the event loop's clock
    limit_s: float = 0.0  # of a step that shows no progress; 0: it has none


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
        """Set the callback that aborts an engine's training requests, by its URL, until it is cancelled."""
        self._interrupt = interrupt

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

    async def update(
        self,
        url: str,
        announced: WeightsAnnounced,
        label: str,
        check: Check | None = None,
        member: SyncMember | None = None,
    ) -> float:
        """Update an engine's weights.

        Args:
            url: of the engine.
            announced: the weights.
            label: the engine's new weight label.
            check: verification, called after the update while the engine generates nothing.
            member: its membership in the weight sync; None: the weights are in files.

        Returns:
            Seconds without new requests: from the pause, or from when new requests are blocked or queued, until it
                continues. With `drain`, running requests finish during that time.

        Raises:
            EngineError: the update or `check` failed, or the engine cannot be continued after its pause.
        """
        if member is not None:
            await member.next()  # WeightSyncPrepared: the engine generates until then
        begin = time.perf_counter()
        if member is None:
            await self._update_from_files(url, announced, label, check)
        else:
            await self._update_in_session(url, member, label, check)
        if self.is_paused(url):
            raise EngineUnavailable(f"{url}: still paused, because continuing it after the weight update failed")
        return time.perf_counter() - begin

    async def _update_from_files(self, url: str, announced: WeightsAnnounced, label: str, check: Check | None) -> None:
        checksum = announced.checksum
        if self._mode == "retract" or self._mode == "in_place":
            async with self._paused(url, self._mode):
                # the KV cache of paused requests is in use and cannot be flushed
                await self._load(url, announced, label, flush_cache=self._mode == "retract")
                if check is not None:
                    await check(checksum)
            return
        await self._load_unpaused(url, announced, label)
        if check is not None:
            async with self._paused(url, "in_place"):
                await check(checksum)

    async def _update_in_session(self, url: str, member: SyncMember, label: str, check: Check | None) -> None:
        async with self._stopped(url):
            try:
                finished = await self._receiver.receive(url, member, label)
                if self._mode != "in_place":
                    await self._client.flush_cache(url, 0.0)
                if check is not None:
                    await check(finished.checksum)
            except EngineError as error:
                # report at once: the trainer waits, and ending the pause of a hung engine takes long
                member.fail(str(error))
                raise

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
        await self._interrupt(url)

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
