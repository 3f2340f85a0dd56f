"""Tracks the running requests, and aborts them for a halt or a weight update."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import anyio
import structlog

from actors.rollout.engines.serving import Serving
from actors.rollout.requests.request import GenerateRequest, OpenRequest
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.reading import AnswerReader
from runtime.util.formatting import count_of

log = structlog.get_logger()

ABORT_AGAIN_S = 1.0  # a request that arrives during a pause cannot be aborted: repeat until it is gone


class HaltListener(NamedTuple):
    """A callback for the halt of a round."""

    round: int | None
    then: Callable[[], None]


class Abort(NamedTuple):
    """Requests to abort at one engine."""

    url: str
    rids: list[str]  # as the engine knows them
    everything: bool  # all our requests there


class RunningRequests:
    """The running requests, so that a halt can abort them."""

    def __init__(self, client: SglangClient, serving: Serving) -> None:
        self._client = client
        self._serving = serving
        self._halted_round = -1
        self._halt = anyio.Event()  # replaced after each wait
        self._running: dict[str, GenerateRequest] = {}
        self.open: dict[str, OpenRequest] = {}  # the same requests, oldest first
        self._request_ended = anyio.Event()  # replaced before each wait
        self._halt_listeners: dict[HaltListener, None] = {}  # in their order
        self._sweep: anyio.Event | None = None  # a running abort of all requests; no request may be sent meanwhile
        self._num_interruptions = 0  # total number of interruptions
        self._num_interrupting = 0

    async def any_ended(self, within_s: float) -> None:
        """Wait until a request has ended, or for the timeout."""
        self._request_ended = anyio.Event() if self._request_ended.is_set() else self._request_ended
        with anyio.move_on_after(within_s):
            await self._request_ended.wait()

    def waits_for(self) -> str:
        """Describe the running requests for people; empty if there are none."""
        if not self._running:
            return ""
        oldest_s = anyio.current_time() - next(iter(self.open.values())).sent_at
        return f"{count_of(len(self._running), 'request')}, the oldest sent {oldest_s:.0f} s ago"

    @contextmanager
    def entered(self, rid: str, request: GenerateRequest, reader: AnswerReader | None) -> Generator[OpenRequest]:
        """Track a request inside the block, which is cancelled when the request is given up."""
        self._running[rid] = request
        self.open[rid] = sent = OpenRequest(anyio.current_time(), reader)
        try:
            with anyio.CancelScope() as scope:
                sent.give_up = scope.cancel
                yield sent
            sent.given_up = scope.cancelled_caught
        finally:
            del self._running[rid], self.open[rid]
            self._request_ended.set()

    async def wait_for_sweep(self) -> bool:
        """Wait for the end of an abort of all requests; return whether there was one."""
        if self._sweep is None:
            return False
        await self._sweep.wait()
        return True

    def interruption_mark(self) -> int | None:
        """Return a mark for `interrupted_since`."""
        return None if self._num_interrupting else self._num_interruptions

    def interrupted_since(self, mark: int | None) -> bool:
        """Whether requests were interrupted for a weight update at or after the mark."""
        return mark != self._num_interruptions

    def halted(self, round: int | None) -> bool:
        """Whether a round was halted."""
        return round is not None and round <= self._halted_round

    @contextmanager
    def on_halt(self, round: int | None, then: Callable[[], None]) -> Generator[None]:
        """Call `then` once the round is halted; never for an evaluation."""
        listener = HaltListener(round, then)
        if self.halted(round):
            then()
        self._halt_listeners[listener] = None
        try:
            yield
        finally:
            self._halt_listeners.pop(listener, None)

    async def interrupt(self, url: str, adapter: str | None = None) -> None:
        """Abort the training requests of an engine until cancelled; they continue from their tokens later.

        Args:
            url: of the engine.
            adapter: those that name this LoRA adapter; None: all.
        """
        self._num_interruptions += 1
        self._num_interrupting += 1
        try:
            while True:
                here = self._by_url(self._running).get(url, [])
                rids = [rid for rid in here if self._running[rid].round is not None and self._names(rid, adapter)]
                await self._abort_at(url, _engine_rids(rids, self._running), everything=len(rids) == len(here))
                await anyio.sleep(ABORT_AGAIN_S)
        finally:
            self._num_interrupting -= 1

    def _names(self, rid: str, adapter: str | None) -> bool:
        return adapter is None or self.open[rid].adapter == adapter

    async def drop(self, rids: Sequence[str], reason: str) -> None:
        """Give up lost requests, so that they are resent, and abort their remains on the engines."""
        still = [rid for rid in rids if rid in self.open]
        aborts = self._aborts(still, at_once=False)
        for rid in still:
            self.open[rid].lost = reason
            self.open[rid].give_up()
        await self._send(aborts)

    def halt(self, round: int) -> None:
        """Halt this round and older ones; `run` aborts their requests."""
        self._halted_round = max(self._halted_round, round)
        for listener in [listener for listener in self._halt_listeners if self.halted(listener.round)]:
            listener.then()
        self._halt.set()
        self._request_ended.set()

    async def run(self) -> None:
        """Abort halted requests on the engines. Never returns."""
        while True:
            await self._halt.wait()
            self._halt = anyio.Event()
            await self._serving.notify()
            while doomed := [rid for rid, request in self._running.items() if self.halted(request.round)]:
                await self._abort(doomed)
                with anyio.move_on_after(ABORT_AGAIN_S):
                    while any(rid in self._running for rid in doomed) and not self._halt.is_set():
                        self._request_ended = anyio.Event()
                        await self._request_ended.wait()
                if self._halt.is_set():
                    break

    async def _abort(self, rids: list[str]) -> None:
        """Abort requests where they may be; no other request is sent while an engine aborts all."""
        aborts = self._aborts(rids, at_once=True)
        if not any(abort.everything for abort in aborts):
            await self._send(aborts)
            return
        self._sweep = anyio.Event()
        try:
            await self._send(aborts)
        finally:
            self._sweep.set()
            self._sweep = None

    def _by_url(self, rids: Iterable[str]) -> dict[str, list[str]]:
        """Return the requests that each engine may hold, by its URL."""
        found: dict[str, list[str]] = {}
        for rid in rids:
            for url in self._serving.holders(self.open[rid].engine):
                found.setdefault(url, []).append(rid)
        return found

    def _aborts(self, rids: Sequence[str], *, at_once: bool) -> list[Abort]:
        """Return what to abort at which engine. `at_once`: by one call, where these are all our requests."""
        running = self._by_url(self._running)
        return [
            Abort(url, _engine_rids(here, self._running), at_once and len(here) == len(running[url]))
            for url, here in self._by_url(rids).items()
        ]

    async def _send(self, aborts: Sequence[Abort]) -> None:
        async with anyio.create_task_group() as group:
            for url, rids, everything in aborts:
                group.start_soon(partial(self._abort_at, url, rids, everything=everything))

    async def _abort_at(self, url: str, rids: list[str], *, everything: bool) -> None:
        """Abort some of our requests on an engine.

        Uses a single abort-all if these are all our requests and the engine has no external ones.
        """
        at_once = bool(rids) and everything and self._serving.is_ours(url)
        try:
            for rid in [None] if at_once else rids:
                await self._client.abort(url, rid)
        except EngineError as error:
            log.warning("abort_not_sent", url=url, error=str(error))


def _engine_rids(rids: list[str], running: dict[str, GenerateRequest]) -> list[str]:
    """Return the request ids on the engine."""
    return [found for rid in rids for found in running[rid].engine_rids(rid)]
