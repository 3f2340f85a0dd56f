"""Watches whether engines make tokens of the requests that we have open there: the only sure sign that they live.

A server whose scheduler stands still answers its readiness probe, and says of its load what it last wrote down. The
router does not say which engine has a request, so until its first token names the engine it may be at any; an engine
that is silent for too long while there are such requests is asked for a sign of life before it is taken for dead.
"""

from collections.abc import Iterable
from typing import NamedTuple

import anyio

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.fleet import Fleet
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.request import OpenRequest
from messages import EngineState
from runtime.wording import count_of

LOOK_S = 1.0  # between two looks, at most
LOOKS_PER_LIMIT = 4


class Patience(NamedTuple):
    """How long an engine may make no token, in seconds."""

    first_s: float  # of a request that has none yet
    next_s: float  # of one that has


class Watchdog:
    """Finds engines that make nothing of our requests, and gives these up there: they are sent again."""

    def __init__(self, fleet: Fleet, running: RunningRequests, limits: Patience) -> None:
        self._fleet = fleet
        self._running = running
        self._limits = limits
        self._doubted: set[Engine] = set()

    async def run(self) -> None:
        """Watch for ever."""
        async with anyio.create_task_group() as group:
            while True:
                await anyio.sleep(min(LOOK_S, min(self._limits) / LOOKS_PER_LIMIT))
                self._note_tokens()
                for engine in self._fleet.current_engines():
                    reason = silence(self._requests(), engine.name, engine.sign_at, anyio.current_time(), self._limits)
                    if reason and engine not in self._doubted:
                        self._doubted.add(engine)
                        group.start_soon(self._doubt, engine, reason)

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

    def _requests(self) -> list[OpenRequest]:
        return list(self._running.open.values())

    def _note_tokens(self) -> None:
        """See which requests got further since the last look."""
        for sent in self._running.open.values():
            stream = sent.stream
            if stream is None or stream.num_tokens == sent.num_tokens:
                continue
            sent.num_tokens, sent.token_at = stream.num_tokens, anyio.current_time()
            sent.engine = self._fleet.loads.engine_of(stream.last_label)
            self._fleet.note_token(stream.last_label)


def silence(requests: Iterable[OpenRequest], engine: str, sign_at: float, now: float, limits: Patience) -> str:
    """Why an engine is to be asked for a sign of life; empty: it need not. Pure.

    Args:
        requests: all that are open, wherever.
        engine: its name.
        sign_at: when it last made a token of any of our requests, or was first asked.
        now: on the same clock.
        limits: how long it may make none.
    """
    there = [sent for sent in requests if sent.engine == engine]
    late = [sent for sent in there if now - max(sent.token_at, sign_at) > limits.next_s]
    if late:
        return f"no further token of {count_of(len(late), 'request')} there for {limits.next_s:g} s"
    unknown = [sent for sent in requests if not sent.engine]
    late = [sent for sent in unknown if now - max(sent.sent_at, sign_at) > limits.first_s]
    if late:
        return f"no first token for {limits.first_s:g} s, of {count_of(len(late), 'request')} that may be there"
    return ""
