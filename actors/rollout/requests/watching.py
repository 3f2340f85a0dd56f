"""Watchdog for engines: checks that they generate tokens for our open requests.

Tokens are the only sure sign of life. A server with a hung scheduler still answers its readiness check, and reports the
last recorded load. A router does not report which engine has a request, so before its first token it may be on any.
An engine that is silent for too long while such requests exist gets a liveness check first.

A live engine may also lose a request. One that gets no token for long, while later ones do, is aborted and resent.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from actors.rollout.engines.checks import makes_tokens
from actors.rollout.engines.engine import Engine
from actors.rollout.engines.serving import Serving
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.request import OpenRequest
from actors.rollout.sglang.client import SglangClient
from messages import EngineState
from runtime.util.formatting import count_of

LOOK_S = 1.0  # maximum seconds between two checks
LOOKS_PER_LIMIT = 4
IDLE_LOOKS = 2  # consecutive checks that must find the engine idle


class TokenTimeouts(NamedTuple):
    """Seconds that an engine may go without a token."""

    first_s: float  # for the first token of a request
    next_s: float  # for each further token


class Watchdog:
    """Finds engines that make no progress on our requests, and gives those requests up so that they are resent."""

    def __init__(self, client: SglangClient, serving: Serving, running: RunningRequests, limits: TokenTimeouts) -> None:
        self._client = client
        self._serving = serving
        self._running = running
        self._limits = limits
        self._doubted: set[Engine] = set()
        self._looks_for_idle = False

    async def run(self) -> None:
        """Watch the engines. Never returns."""
        async with anyio.create_task_group() as group:
            while True:
                await anyio.sleep(min(LOOK_S, min(self._limits) / LOOKS_PER_LIMIT))
                self._note_tokens()
                for engine in self._serving.current_engines():
                    reason = silence(self._requests(), engine.name, engine.sign_at, anyio.current_time(), self._limits)
                    if reason and engine not in self._doubted:
                        self._doubted.add(engine)
                        group.start_soon(self._doubt, engine, reason)
                self._drop_lost(group)

    async def _doubt(self, engine: Engine, reason: str) -> None:
        try:
            await engine.doubt(reason, self._limits.next_s)
        finally:
            self._doubted.discard(engine)
        if engine.state is not EngineState.SUSPECT:
            return
        now = anyio.current_time()
        for sent in self._requests():
            lost = not engine.ours and not sent.engine and now - sent.sent_at > self._limits.first_s
            if sent.engine == engine.name or lost:
                sent.give_up()

    def _drop_lost(self, group: TaskGroup) -> None:
        """Resend requests that live engines lost."""
        now, engines = anyio.current_time(), self._serving.current_engines()
        if len(engines) != self._serving.num_admitted():
            return  # one of them is being updated, or must first show a sign of life
        served = {engine.name: engine.served_at for engine in engines}
        begun_at = max((engine.status.updated_at for engine in engines), default=now)
        requests = self._running.open.items()
        overdue = [rid for rid, sent in requests if is_overdue(sent, begun_at, now, self._limits)]
        lost = [rid for rid in overdue if is_overtaken(self._running.open[rid], served)]
        if lost:
            group.start_soon(self._running.drop, lost, "got no token for long, while later requests got tokens")
        elif overdue and not self._looks_for_idle:
            self._looks_for_idle = True
            group.start_soon(self._drop_if_idle, engines, overdue)

    async def _drop_if_idle(self, engines: Sequence[Engine], rids: Sequence[str]) -> None:
        """Give requests up if the engines are alive and idle. Needed for unstreamed requests, which show no tokens."""
        try:
            requests = self._running.open
            before = {rid: requests[rid].num_tokens for rid in rids if rid in requests}
            for _ in range(IDLE_LOOKS):
                if not await self._are_idle(engines):
                    return
            still = [
                rid for rid, num_tokens in before.items() if rid in requests and requests[rid].num_tokens == num_tokens
            ]
            if still and set(engines) == set(self._serving.current_engines()):
                await self._running.drop(still, "got no token for long, while its engine was idle")
        finally:
            self._looks_for_idle = False

    async def _are_idle(self, engines: Sequence[Engine]) -> bool:
        """Whether all engines are alive, not paused, and without requests."""
        for engine in engines:
            loads = await self._client.loads(engine.url)
            if loads is None or any(load.num_running_reqs or load.num_waiting_reqs for load in loads):
                return False
            if await self._client.is_paused(engine.url):
                return False
            if not await makes_tokens(self._client, engine.url, self._limits.next_s):
                return False
        return True

    def _requests(self) -> list[OpenRequest]:
        return list(self._running.open.values())

    def _note_tokens(self) -> None:
        """Record which requests got tokens since the last check."""
        for sent in self._running.open.values():
            reader = sent.reader
            if reader is None or reader.num_tokens == sent.num_tokens:
                continue
            sent.num_tokens, sent.token_at = reader.num_tokens, anyio.current_time()
            sent.engine = self._serving.holder(sent.engine, reader.last_label)
            self._serving.note_token(reader.last_label, sent.sent_at)


def is_overdue(sent: OpenRequest, begun_at: float, now: float, limits: TokenTimeouts) -> bool:
    """Whether a request should have got its first or next token by now. Pure.

    Args:
        sent: the request.
        begun_at: when the last engine began to generate from its current weights.
        now: on the same clock.
        limits: on the time without a token.
    """
    limit_s = max(limits) if sent.token_at else limits.first_s
    return now - max(sent.sent_at, sent.token_at, begun_at) > limit_s


def is_overtaken(sent: OpenRequest, served: Mapping[str, float]) -> bool:
    """Whether all engines that may have a streamed request generated for later requests since its last token. Pure.

    Args:
        sent: the request.
        served: by engine: send time of the newest request that got a token.
    """
    if sent.reader is None:  # unstreamed: it shows no token before its end
        return False
    there = [served.get(sent.engine, -math.inf)] if sent.engine else list(served.values())
    return bool(there) and min(there) > max(sent.sent_at, sent.token_at)


def silence(requests: Iterable[OpenRequest], engine: str, sign_at: float, now: float, limits: TokenTimeouts) -> str:
    """Return why an engine needs a liveness check; empty if it does not. Pure.

    Args:
        requests: all open requests, on any engine.
        engine: its name.
        sign_at: time of its last token for any of our requests, or when it began to accept requests.
        now: on the same clock.
        limits: on the time without a token.
    """
    there = [sent for sent in requests if sent.engine == engine and sent.token_at]
    late = [sent for sent in there if now - max(sent.token_at, sign_at) > limits.next_s]
    if late:
        return f"no further token for {count_of(len(late), 'request')} within {limits.next_s:g} s"
    before_first = [sent for sent in requests if sent.engine in ("", engine) and not sent.token_at]
    late = [sent for sent in before_first if now - max(sent.sent_at, sign_at) > limits.first_s]
    if late:
        return f"no first token within {limits.first_s:g} s for {count_of(len(late), 'request')} that it may hold"
    return ""
