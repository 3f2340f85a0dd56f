"""Requests to the engines: sent to confirmed ones, sent again when lost, aborted on halt."""

from collections import abc
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import structlog

from actors.rollout.answers import Answer
from actors.rollout.fleet import Fleet
from actors.rollout.http import EngineUnavailable, Http
from messages import SamplingParams

log = structlog.get_logger()

RESEND_S = 0.5  # before a lost request is sent again
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
        self._running: dict[str, Request] = {}
        self._request_ended = anyio.Event()  # replaced by a halt that waits for it
        self._halt_listeners: set[HaltListener] = set()

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

    async def generate(self, request: Request) -> list[Answer] | None:
        """Wait for an engine that may answer, ask it, and ask again if the request is lost.

        Returns:
            One answer per list of input_ids, or None when the round was halted before an engine was asked.

        Raises:
            RequestRefused: the engine says that the request is wrong.
        """
        tries = 0
        while await self._fleet.wait_ready(request.min_version, unless=lambda: self.halted(request.round)):
            rid = f"{request.rid}-{tries}"
            self._running[rid] = request
            try:
                return await self._http.generate(self._fleet.router, _body(request, rid))
            except EngineUnavailable as error:
                tries += 1
                log.warning("request_lost", rid=rid, tries=tries, error=str(error))
                await self._fleet.report_unavailable()
                await anyio.sleep(RESEND_S)
            finally:
                del self._running[rid]
                self._request_ended.set()
        return None

    async def halt(self, round: int) -> None:
        """Abort everything of this round and older ones; returns once none of it is running."""
        self._halted_round = max(self._halted_round, round)
        for listener in [listener for listener in self._halt_listeners if self.halted(listener.round)]:
            listener.then()
        await self._fleet.notify()
        while doomed := [rid for rid, request in self._running.items() if self.halted(request.round)]:
            await self._abort(doomed)
            with anyio.move_on_after(ABORT_AGAIN_S):
                while any(rid in self._running for rid in doomed):
                    self._request_ended = anyio.Event()
                    await self._request_ended.wait()

    async def _abort(self, rids: list[str]) -> None:
        everything = len(rids) == len(self._running)
        for url in self._fleet.engine_urls:
            try:
                for rid in [None] if everything else _member_rids(rids, self._running):
                    await self._http.abort(url, rid)
            except EngineUnavailable as error:
                log.warning("abort_not_sent", url=url, error=str(error))


def _member_rids(rids: list[str], running: dict[str, Request]) -> list[str]:
    """The ids under which engines know the requests: a batch names its members <rid>_0, <rid>_1, ..."""
    members: list[str] = []
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
