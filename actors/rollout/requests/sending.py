"""Requests to the engines: sent to confirmed ones, sent again when lost, aborted on halt or for new weights."""

import time
from collections import abc
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import structlog

from actors.rollout.engines.fleet import Fleet
from actors.rollout.sglang.answers import NOTHING, Answer, is_aborted, oldest_version
from actors.rollout.sglang.client import EngineError, EngineFailed, EngineUnavailable, Http, RequestRefused
from actors.rollout.sglang.streams import Stream
from messages import SamplingParams
from runtime.wording import count_of

log = structlog.get_logger()

RESEND_S = 0.5  # before a lost request is sent again; doubled for each time that an engine failed on it
MAX_RESEND_S = 8.0
MAX_FAILURES = 10  # of engines on one request, before it is taken for the cause
STREAM_ABOVE = 256  # tokens that a request may get: a shorter one costs less to repeat than to stream
ABORT_AGAIN_S = 1.0  # a request that arrives during a pause is not abortable: repeat until it is gone


@dataclass(frozen=True)
class Request:
    """What is asked of an engine: one response for each list of token ids."""

    rid: str
    input_ids: list[list[int]]
    params: SamplingParams
    max_new_tokens: int
    min_version: int
    round: int | None  # None: an evaluation, which no halt touches


class Generated(NamedTuple):
    """What came of a request."""

    answers: list[Answer]  # one per list of input_ids
    cut_short: bool  # the request was lost, or gave way to new weights: it may go on from these tokens


class HaltListener(NamedTuple):
    """Who wants to be told of a halt."""

    round: int | None
    then: Callable[[], None]


class Generator:
    """Generates through the router and knows what is running, so that a halt can reach it."""

    def __init__(self, http: Http, fleet: Fleet) -> None:
        self._http = http
        self._fleet = fleet
        self._halted_round = -1
        self._halt = anyio.Event()  # replaced when it was seen
        self._running: dict[str, Request] = {}
        self._sent_at: dict[str, float] = {}  # seconds of the monotonic clock, oldest first
        self._request_ended = anyio.Event()  # replaced by a halt that waits for it
        self._halt_listeners: set[HaltListener] = set()
        self._sweep: anyio.Event | None = None  # an abort of everything, which must not meet a new request
        self._interruptions = 0  # ever begun
        self._num_interrupting = 0

    def waits_for(self) -> str:
        """Which requests are at the engines, for people; empty when none is."""
        if not self._running:
            return ""
        oldest_s = time.monotonic() - next(iter(self._sent_at.values()))
        return f"{count_of(len(self._running), 'request')}, the oldest sent {oldest_s:.0f} s ago"

    def halted(self, round: int | None) -> bool:
        """Whether work of this round is to be given back."""
        return round is not None and round <= self._halted_round

    @contextmanager
    def on_halt(self, round: int | None, then: Callable[[], None]) -> abc.Generator[None]:
        """Call `then` once work of this round is to be given back; for an evaluation, never."""
        listener = HaltListener(round, then)
        if self.halted(round):
            then()
        self._halt_listeners.add(listener)
        try:
            yield
        finally:
            self._halt_listeners.discard(listener)

    async def generate(self, request: Request, show: Callable[[Stream], None] | None = None) -> Generated | None:
        """Wait for an engine that may answer, ask it, and ask again if the request is lost.

        It is asked again for as long as engines or the router are away, which is their agent's to end; but not for ever
        when they answer and fail. A long request is streamed; if it is lost, what came of it is the answer.

        Args:
            request: what is asked.
            show: told of the stream, whenever one begins; none: nobody looks, nothing is streamed.

        Returns:
            None when the round was halted before an engine was asked.

        Raises:
            RequestRefused: the engine says that the request is wrong, or failed on it too often.
        """
        tries = failures = 0
        while await self._fleet.wait_ready(request.min_version, unless=lambda: self.halted(request.round)):
            if self._sweep is not None:
                await self._sweep.wait()
                continue
            rid = f"{request.rid}-{tries}"
            tries += 1
            stream = None
            if show is not None and request.max_new_tokens > STREAM_ABOVE:
                stream = Stream(self._fleet.version)
                show(stream)
            try:
                return await self._ask(rid, request, stream)
            except EngineUnavailable as error:
                failures += isinstance(error, EngineFailed)
                log.warning("request_lost", rid=rid, tries=tries, error=str(error))
                if failures >= MAX_FAILURES:
                    raise RequestRefused(f"{failures} times in vain, at last: {error}") from error
            await self._fleet.report_unavailable()
            await anyio.sleep(min(MAX_RESEND_S, RESEND_S * 2 ** max(0, failures - 1)))
            if stream is not None and (kept := _kept(stream, request.min_version)) is not None:
                return Generated([kept], cut_short=True)
        return None

    async def _ask(self, rid: str, request: Request, stream: Stream | None) -> Generated:
        before = None if self._num_interrupting else self._interruptions
        self._running[rid], self._sent_at[rid] = request, time.monotonic()
        try:
            if stream is not None:
                answers = [await self._stream(rid, request, stream)]
            else:
                answers = await self._http.generate(self._fleet.router, _body(request, rid))
        finally:
            del self._running[rid], self._sent_at[rid]
            self._request_ended.set()
        if not all(is_recent(answer, request.min_version) for answer in answers):
            raise EngineFailed(f"sampled by weights older than {request.min_version}, which it was asked of")
        interrupted = request.round is not None and before != self._interruptions and not self.halted(request.round)
        return Generated(answers, cut_short=interrupted and any(is_aborted(answer) for answer in answers))

    async def _stream(self, rid: str, request: Request, stream: Stream) -> Answer:
        try:
            await self._http.stream(self._fleet.router, _body(request, rid), stream)
        except EngineUnavailable:
            if not stream.ended:  # else nothing is missing but the end of the connection
                raise
        return stream.rest()

    async def interrupt(self, url: str) -> None:
        """Abort the training requests that an engine has, until cancelled; they go on from their tokens."""
        self._interruptions += 1
        self._num_interrupting += 1
        try:
            while True:
                rids = [rid for rid, request in self._running.items() if request.round is not None]
                if rids and len(rids) == len(self._running):
                    await self._abort_at(url, [None])
                else:
                    await self._abort_at(url, _member_rids(rids, self._running))
                await anyio.sleep(ABORT_AGAIN_S)
        finally:
            self._num_interrupting -= 1

    def halt(self, round: int) -> None:
        """Give back everything of this round and older ones; `run` aborts what is running of it."""
        self._halted_round = max(self._halted_round, round)
        for listener in [listener for listener in self._halt_listeners if self.halted(listener.round)]:
            listener.then()
        self._halt.set()
        self._request_ended.set()

    async def run(self) -> None:
        """Abort at the engines what was halted, for ever."""
        while True:
            await self._halt.wait()
            self._halt = anyio.Event()
            await self._fleet.notify()
            while doomed := [rid for rid, request in self._running.items() if self.halted(request.round)]:
                await self._abort(doomed)
                with anyio.move_on_after(ABORT_AGAIN_S):
                    while any(rid in self._running for rid in doomed) and not self._halt.is_set():
                        self._request_ended = anyio.Event()
                        await self._request_ended.wait()
                if self._halt.is_set():
                    break

    async def _abort(self, rids: list[str]) -> None:
        if len(rids) < len(self._running):
            await self._abort_everywhere(_member_rids(rids, self._running))
            return
        self._sweep = anyio.Event()
        try:
            await self._abort_everywhere([None])
        finally:
            self._sweep.set()
            self._sweep = None

    async def _abort_everywhere(self, rids: list[str | None]) -> None:
        async with anyio.create_task_group() as group:
            for url in self._fleet.engine_urls:
                group.start_soon(self._abort_at, url, rids)

    async def _abort_at(self, url: str, rids: list[str | None]) -> None:
        try:
            for rid in rids:
                await self._http.abort(url, rid)
        except EngineError as error:
            log.warning("abort_not_sent", url=url, error=str(error))


def is_recent(answer: Answer, min_version: int) -> bool:
    """Whether no token of it was sampled by weights older than that."""
    oldest = oldest_version(answer)
    return oldest is None or oldest >= min_version


def _kept(stream: Stream, min_version: int) -> Answer | None:
    """What a lost request leaves to go on from; None: nothing, so that it may be sent again as it was."""
    rest = stream.rest()
    if not is_recent(rest, min_version):
        rest = NOTHING
    return rest if rest.output_ids or stream.num_taken else None


def _member_rids(rids: list[str], running: dict[str, Request]) -> list[str | None]:
    """The ids under which engines know the requests: a batch names its members <rid>_0, <rid>_1, ..."""
    members: list[str | None] = []
    for rid in rids:
        size = len(running[rid].input_ids)
        members += [rid] if size == 1 else [f"{rid}_{index}" for index in range(size)]
    return members


def _body(request: Request, rid: str) -> dict[str, Any]:
    params = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    ids = request.input_ids
    return {
        "rid": rid,
        "input_ids": ids if len(ids) > 1 else ids[0],
        "sampling_params": sampling,
        "return_logprob": True,
    }
