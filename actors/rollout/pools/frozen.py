"""A pool of engines whose model does not change: which of them answer, log-probs of given tokens, and answers."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

import anyio
import numpy as np
import structlog

from actors.rollout.engines.checks import ServerRequirements, check_engine, makes_tokens
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.router import wait_until
from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.body import generate_body
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import (
    BadAnswer,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineSilent,
    EnginesUnwilling,
    EngineUnavailable,
    RequestRefused,
)
from actors.rollout.sglang.reading import AnswerReader
from actors.rollout.sglang.served_model import ServedModel
from messages import Float32Array, Int32Array, SampleStatus, SamplingParams
from runtime.bus.addresses import Address
from runtime.bus.bus import Bus
from runtime.bus.servers import attend_servers, kill_server
from runtime.data.tokens import given_log_prob_problem, id_problem, topk_problem
from runtime.settings.derived import topk_divergence
from runtime.settings.owners import shared_among_actors
from runtime.settings.placement import num_engines
from runtime.settings.topology import Topology, model_of
from runtime.util.formatting import count_of
from runtime.util.retrying import Backoff

log = structlog.get_logger()

RESEND: Final = Backoff(first_s=0.2, max_s=5.0)
MAX_FAILURES: Final = 5  # errors and impossible answers to one request before it is given up; lost ones do not count
LOOK_S: Final = 5.0  # for a sign of life of an engine that did not answer in time
REFUSED_S: Final = 5.0  # between checks of an external engine that serves another model
TOKEN_S: Final = 1.0  # for each token of an answer, in addition to the timeout of one answer

Answered = TypeVar("Answered")


class PoolSettings(NamedTuple):
    """Settings of a pool.

    Attributes:
        name: its key in `engines`.
        vocab_size: of its model.
        topk_vocab_size: its likeliest tokens have ids below this: tokens of the trained model, too.
        at_once: requests of one rollout actor in flight at all engines together.
        answer_timeout_s: for one answer; a silent engine without a sign of life is restarted.
        give_up_after_s: without any answer to a request the run ends.
        confuses_last: the server takes the last token of the vocabulary for token 0 (SGLang 0.5.23).
    """

    name: str
    vocab_size: int
    at_once: int
    topk_vocab_size: int | None = None
    answer_timeout_s: float = 300.0
    give_up_after_s: float = 14_400.0
    confuses_last: bool = False

    @classmethod
    def of(cls, topology: Topology, name: str) -> Self:
        """Derive the settings of a pool from the topology and the directory of its model.

        Raises:
            OSError, ValueError: the directory cannot be read.
        """
        engine = topology.engines[name]
        vocab_size = ServedModel.read(Path(model_of(topology, engine))).vocab_size
        trained = (
            ServedModel.read(Path(topology.model.hf_checkpoint))
            if topk_divergence(topology.algorithm) is not None
            else None
        )
        return cls(
            name=name,
            vocab_size=vocab_size,
            at_once=shared_among_actors(topology, engine.concurrency * num_engines(engine)),
            topk_vocab_size=None if trained is None else min(vocab_size, trained.vocab_size),
            answer_timeout_s=engine.first_token_after_s,
            give_up_after_s=topology.rollout.generate_timeout_s,
            confuses_last=engine.kind == "sglang",
        )


class ColumnValues(NamedTuple):
    """What a pool computed of T tokens: their log-probs, and the K likeliest tokens at their places if it was asked."""

    values: Float32Array  # [T]
    topk_ids: Int32Array | None = None  # [T x K]
    topk_log_probs: Float32Array | None = None  # [T x K]


class PoolAnswer(NamedTuple):
    """What a pool's model answered."""

    ids: list[int]
    text: str


@dataclass(eq=False)
class FrozenEngine:
    """One engine of the pool. A restarted engine is a new one."""

    name: str
    url: str
    kill: Callable[[str], Awaitable[None]] | None  # None: the run cannot restart it
    is_up: bool = False


class FrozenPool:
    """The engines of one pool, and requests to them in turn.

    A lost request is sent again, to another engine if one is up, until `give_up_after_s` have passed. The node daemon
    restarts engines that end; until then requests wait here.
    """

    def __init__(self, settings: PoolSettings, client: SglangClient, events: RateLimitedEvents) -> None:
        self.name = settings.name
        self._settings = settings
        self._client = client
        self._events = events
        self._engines: dict[str, FrozenEngine] = {}
        self._slots = anyio.CapacityLimiter(settings.at_once)
        self._changed = anyio.Condition()
        self._num_sent = 0  # for round-robin
        self._num_waiting = 0  # requests without an answer

    def waits_for(self) -> str:
        """Describe for people whose answers are awaited; empty if none are."""
        if not self._num_waiting:
            return ""
        known = ", ".join(f"{engine.name} {'is up' if engine.is_up else 'is away'}" for engine in self._known())
        return f"engines.{self.name}: {count_of(self._num_waiting, 'request')} ({known or 'no engine yet'})"

    async def run(self, bus: Bus, topology: Topology) -> None:
        """Follow the pool's engines: those that the run starts, and external ones. Never returns."""
        pool = topology.engines[self.name]
        wanted = ServerRequirements.by(topology, pool) if pool.urls else None

        async def attend(name: str, address: Address) -> None:
            await self.attend(FrozenEngine(name, address.url, partial(kill_server, bus, name, address)))

        async with anyio.create_task_group() as group:
            for index, url in enumerate(pool.urls):
                name = f"engines.{self.name}.urls[{index}]"
                group.start_soon(self.attend, FrozenEngine(name, url, None), wanted)
            await attend_servers(bus, "engine", self.name, attend)

    async def attend(self, engine: FrozenEngine, wanted: ServerRequirements | None = None) -> None:
        """Keep track of whether one engine is up. Cancelled when the engine is replaced."""
        self._engines[engine.name] = engine
        try:
            while True:
                await wait_until(partial(self._client.ready, engine.url))
                try:
                    if wanted is not None:
                        await check_engine(self._client, engine.url, wanted)
                except EngineError as error:
                    self._events.refused(engine.name, 0, str(error))
                    await anyio.sleep(REFUSED_S)
                    continue
                engine.is_up = True
                log.info("engine_up", engine=engine.name, url=engine.url)
                await self._notify()
                async with self._changed:
                    while engine.is_up:
                        await self._changed.wait()
        finally:
            engine.is_up = False

    async def log_probs(self, rid: str, token_ids: Sequence[int], first: int, topk: int = 0) -> ColumnValues:
        """Return the log-probs of tokens that another model sampled, each given all tokens before it.

        Args:
            rid: names the request; each try adds its number.
            token_ids: of the prompt and the response.
            first: number of prompt tokens.
            topk: number of the likeliest tokens to return at each place; 0: none.

        Returns:
            Nats, at temperature 1, of the tokens from `first` on.

        Raises:
            RequestRefused: the tokens are none of the model, the engine refuses them, or engines answered MAX_FAILURES
                times with errors or impossible values. It names the engine.
            EnginesUnwilling: no engine answered for `give_up_after_s`.
        """
        self._check_ids(token_ids, first)
        return await self._sent(rid, lambda engine, name: self._ask(engine, name, token_ids, first, topk))

    async def answer(
        self, rid: str, token_ids: Sequence[int], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> PoolAnswer:
        """Return what the pool's model answers to some tokens of its own.

        Args:
            rid: names the request; each try adds its number.
            token_ids: of the prompt.
            params: sampling parameters.
            max_new_tokens: most tokens of the answer.
            seed: of the sampling.

        Raises:
            RequestRefused: as by `log_probs`.
            EnginesUnwilling: as by `log_probs`.
        """
        if (problem := id_problem(list(token_ids), self._settings.vocab_size)) is not None or not token_ids:
            raise RequestRefused(f"engines.{self.name}: not sent: {problem or 'no tokens'}")

        async def ask(engine: FrozenEngine, name: str) -> PoolAnswer:
            return await self._continue(engine, name, token_ids, params, max_new_tokens, seed)

        return await self._sent(rid, ask)

    async def _sent(self, rid: str, ask: Callable[[FrozenEngine, str], Awaitable[Answered]]) -> Answered:
        """Send a request until it is answered, in one of the pool's slots."""
        self._num_waiting += 1
        try:
            async with self._slots:
                with anyio.move_on_after(self._settings.give_up_after_s):
                    return await self._answered(rid, ask)
        finally:
            self._num_waiting -= 1
        limit = f"{self._settings.give_up_after_s:g} s (rollout.generate_timeout_s)"
        raise EnginesUnwilling(f"engines.{self.name} answered no request for {limit}")

    def _check_ids(self, token_ids: Sequence[int], first: int) -> None:
        """Refuse tokens that crash a server or that it confuses."""
        where, size = f"engines.{self.name}: not sent", self._settings.vocab_size
        if not 1 <= first < len(token_ids):
            raise RequestRefused(f"{where}: {len(token_ids)} tokens, of which {first} are the prompt")
        if (problem := id_problem(list(token_ids), size)) is not None:
            raise RequestRefused(f"{where}: {problem}")
        if self._settings.confuses_last and size - 1 in token_ids[first:]:
            raise RequestRefused(f"{where}: SGLang gives the log-prob of token 0 for {size - 1}, the last token")

    async def _answered(self, rid: str, ask: Callable[[FrozenEngine, str], Awaitable[Answered]]) -> Answered:
        failures = tries = 0
        failed: FrozenEngine | None = None
        while True:
            engine, tries = await self._next(failed), tries + 1
            try:
                return await ask(engine, f"{rid}-{tries}")
            except RequestRefused as error:
                raise RequestRefused(f"{engine.name}: {error}") from error
            except EngineUnavailable as error:
                failed, failures = engine, failures + isinstance(error, EngineFailed)
                log.warning("pool_request_lost", rid=rid, engine=engine.name, tries=tries, error=str(error))
                self._events.failed(engine.name, type(error).__name__, str(error))
                if failures >= MAX_FAILURES:
                    where = f"{engine.name} ({engine.url})"
                    raise RequestRefused(f"{where}: {failures} failures, the last one: {error}") from error
                await self._doubt(engine, error)
            await anyio.sleep(RESEND.pause_s(tries))

    async def _ask(
        self, engine: FrozenEngine, rid: str, token_ids: Sequence[int], first: int, topk: int
    ) -> ColumnValues:
        """Send one request, and check all of its answer."""
        timeout_s = self._settings.answer_timeout_s
        given, likeliest = await self._client.given_log_probs(engine.url, rid, token_ids, first, timeout_s, topk)
        problem = given_log_prob_problem(given)
        if problem is None and likeliest is not None:
            problem = topk_problem(*likeliest, self._settings.topk_vocab_size or self._settings.vocab_size)
        if problem is not None:
            raise BadAnswer(f"{engine.name} ({engine.url})", problem)
        values = Float32Array([value for value in given if value is not None])
        if likeliest is None:
            return ColumnValues(values)
        return ColumnValues(values, Int32Array(likeliest.ids.ravel()), Float32Array(likeliest.log_probs.ravel()))

    async def _continue(
        self,
        engine: FrozenEngine,
        rid: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        max_new_tokens: int,
        seed: int,
    ) -> PoolAnswer:
        """Send one request for an answer, and check it."""
        where, buffer = f"{engine.name} ({engine.url})", SampleBuffer()
        reader = AnswerReader(buffer)
        prompt = np.array(token_ids, np.int32)
        body = generate_body(rid, [prompt], params, max_new_tokens=max_new_tokens, seeds=[seed])
        limit_s = self._settings.answer_timeout_s + max_new_tokens * TOKEN_S
        try:
            with anyio.fail_after(limit_s):
                await self._client.generate(engine.url, body, [reader])
        except TimeoutError as error:
            raise EngineSilent(f"{where}: no answer within {limit_s:g} s") from error
        if reader.refused is not None:
            raise RequestRefused(f"{reader.refused.code}: {reader.refused.message}")
        if reader.status is SampleStatus.ABORTED:
            raise EngineUnavailable(f"{where}: the request was aborted")
        ids: list[int] = buffer.ids.tolist()
        if (problem := id_problem(ids, self._settings.vocab_size)) is not None:
            raise BadAnswer(where, problem)
        return PoolAnswer(ids, buffer.text)

    async def _next(self, failed: FrozenEngine | None) -> FrozenEngine:
        """Wait for an engine that is up; if there are several, not the one that failed."""
        async with self._changed:
            while not (up := [engine for engine in self._known() if engine.is_up]):
                await self._changed.wait()
        others = [engine for engine in up if engine is not failed] or up
        self._num_sent += 1
        return others[self._num_sent % len(others)]

    async def _doubt(self, engine: FrozenEngine, error: EngineUnavailable) -> None:
        """After a failed request, find out whether the engine is up; restart it if it hangs."""
        if isinstance(error, EngineBusy) or not engine.is_up:
            return
        if isinstance(error, EngineSilent) and not await makes_tokens(self._client, engine.url, LOOK_S):
            engine.is_up = False
            if engine.kill is not None:
                await engine.kill(str(error))
        elif not isinstance(error, EngineFailed) and not await self._client.ready(engine.url):
            engine.is_up = False
        await self._notify()

    def _known(self) -> list[FrozenEngine]:
        return list(self._engines.values())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
