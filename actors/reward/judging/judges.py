"""The judges of a reward actor: opened from the topology; a built-in grader on top of them."""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from actors.reward.grades import Graded, GraderSpec
from actors.reward.judging.budget import open_budgets
from actors.reward.judging.cache import Caches, key_of
from actors.reward.judging.gateway import gateway
from actors.reward.judging.judge import Judge, JudgeLimits
from actors.reward.judging.keys import KeyProblem, api_key
from actors.reward.judging.requests import CAUSES_OF_SCORES, JudgeAnswer, JudgeError, answer_in, render, request_of
from actors.reward.judging.servers import JudgeServer, JudgeServers
from actors.reward.pool import GraderPool
from actors.reward.samples import GradedSample
from messages import EngineRequestsFailed
from messages.plain import clipped
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.functions.hidden_files import run_dir_of
from runtime.process.actor import InputError
from runtime.settings.placement import num_engines
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.tables.reward import JudgeConfig
from runtime.settings.topology import Topology, judge_pools, model_of, sglang_arguments

log = structlog.get_logger()

AT_ONCE: Final = 64  # requests in flight to a URL
EVENTS_WAITING: Final = 100  # reports of failed requests; further ones are left out
CACHES: Final = "judge_cache"  # directory of the caches in the run directory
SHOWN_CHARS: Final = 1000  # of an answer, in the details of a score


class Judges:
    """The judges of a topology, by name, and the grader that samples name."""

    def __init__(
        self,
        configs: Mapping[str, JudgeConfig],
        judges: Mapping[str, Judge],
        env: Mapping[str, str],
        caches: Caches,
        models: Mapping[str, str],
    ) -> None:
        self._configs = configs
        self._models = models  # of each judge, for the keys of its cache
        self._caches = caches
        self._judges = judges
        self.env = env  # for grader processes

    def __contains__(self, name: str) -> bool:
        """Whether this is the name of a judge."""
        return name in self._judges

    def waits_for(self) -> str:
        """Describe for people whose answers are awaited; empty if none are."""
        return "; ".join(words for judge in self._judges.values() if (words := judge.waits_for()))

    def rate_limited(self, within_s: float) -> str:
        """Name the judges whose servers limited the rate in the last seconds, for an error; empty if none did."""
        names = [name for name, judge in self._judges.items() if judge.was_rate_limited(within_s)]
        return f"status 429 from the judge {', '.join(names)}" if names else ""

    def stats(self) -> dict[str, float]:
        """Count requests, and failed ones by cause, since the start."""
        counted = {name: count for judge in self._judges.values() for name, count in judge.counts.items()}
        totals = {name: sum(judge.counts[name] for judge in self._judges.values()) for name in counted}
        return {f"num_judge_{name}": float(total) for name, total in totals.items()}

    async def grade(self, name: str, samples: Sequence[GradedSample], pool: GraderPool) -> list[Graded]:
        """Grade samples by a judge's answers; return one grade or error per sample, in order.

        The parser reads the scores in grader processes, since it may be a function of the user.
        """
        answered: list[GradedSample | Graded] = [Graded()] * len(samples)

        async def ask(index: int) -> None:
            answered[index] = await self._answered(name, samples[index])

        async with anyio.create_task_group() as group:
            for index in range(len(samples)):
                group.start_soon(ask, index)
        spec = GraderSpec(name=self._configs[name].parser, parses=True)
        ready = [sample for sample in answered if isinstance(sample, GradedSample)]
        grades = await pool.grade(spec, ready)
        for sample, graded in zip(ready, grades, strict=True):
            if graded.error is not None:
                await self._forget(name, sample)
        parsed = iter(grades)
        return [one if isinstance(one, Graded) else _with_answer(next(parsed), one, name) for one in answered]

    async def _answered(self, name: str, sample: GradedSample) -> GradedSample | Graded:
        config = self._configs[name]
        if config.template is None:
            return Graded(error=f"the judge {name} has no template (reward.judges.{name}.template)", cause="refused")
        try:
            request = _request_of(config, sample)
        except ValueError as error:
            return Graded(error=f"judge {name}: {error}", cause="refused")
        try:
            answer = await self._kept_or_asked(name, request, evaluation=sample.evaluation)
        except JudgeError as error:
            return Graded(error=str(error), cause=CAUSES_OF_SCORES[error.cause])
        return msgspec.structs.replace(sample, judge_answer=answer.text, judge_truncated=answer.truncated)

    async def _kept_or_asked(self, name: str, request: Mapping[str, Any], *, evaluation: bool) -> JudgeAnswer:
        judge = self._judges[name]
        if not self._is_cached(name, evaluation=evaluation):
            return await judge.ask(request)
        key = key_of(self._models[name], request)
        kept = await self._caches.get(name, key)
        if kept is not None:
            judge.counts["kept_answers"] += 1
            return answer_in(kept)
        answer = await judge.ask(request)
        await self._caches.put(name, key, answer.body)
        return answer

    async def _forget(self, name: str, sample: GradedSample) -> None:
        """Remove the kept answer that had no score for a sample, so that the next request gets another one."""
        if self._is_cached(name, evaluation=sample.evaluation):
            request = _request_of(self._configs[name], sample)
            await self._caches.forget(name, key_of(self._models[name], request))

    def _is_cached(self, name: str, *, evaluation: bool) -> bool:
        return name in self._caches and (self._configs[name].cache_in_eval or not evaluation)


def _request_of(config: JudgeConfig, sample: GradedSample) -> dict[str, Any]:
    """Build the request of a judge for a sample.

    Raises:
        ValueError: the sample has no value for a placeholder of the template.
    """
    prompt = render(config.template or "", sample)
    return request_of(prompt, config.temperature, config.max_tokens, config.extra_body)


def _with_answer(graded: Graded, sample: GradedSample, name: str) -> Graded:
    details = {"judge_answer": clipped(sample.judge_answer, SHOWN_CHARS), **(graded.details or {})}
    if graded.error is None:
        return msgspec.structs.replace(graded, details=details)
    error = f"bad_answer: judge {name}: {graded.error}"
    return msgspec.structs.replace(graded, details=details, error=error, cause="bad_answer")


@asynccontextmanager
async def open_judges(topology: Topology, bus: Bus | None) -> AsyncGenerator[Judges]:
    """Open the judges of a topology, and the endpoint through which users' graders call them.

    Without a bus there is no run: only engines with URLs answer, nothing is cached, and budgets begin anew.

    Raises:
        InputError: an API key cannot be read.
    """
    configs = topology.reward.judges
    if not configs:
        yield Judges({}, {}, {}, Caches({}), {})
        return
    send, failures = anyio.create_memory_object_stream[EngineRequestsFailed](EVENTS_WAITING)

    def report(server: str, reason: str, number: int) -> None:
        if bus is None:
            return
        event = EngineRequestsFailed(instance=bus.name, engine=server, reason=reason, num_failures=number)
        try:
            send.send_nowait(event)
        except anyio.WouldBlock:
            log.warning("judge_event_left_out", engine=server)

    async def publish(bus: Bus) -> None:
        async for event in failures:
            try:
                await bus.publish(event)
            except BusError as error:
                log.warning("judge_event_not_published", engine=event.engine, error=str(error))

    connector = aiohttp.TCPConnector(limit=0)  # each judge has a limit of its own
    async with (
        open_budgets(configs, bus, max(1, len(topology.reward.nodes))) as budgets,
        aiohttp.ClientSession(connector=connector) as session,
        send,
        failures,  # closed after the tasks that read it have ended
        anyio.create_task_group() as group,
    ):
        if bus is not None:
            group.start_soon(publish, bus)
        judges = {
            name: Judge(
                name,
                _servers(topology, name, bus, group),
                _limits(topology, name, waits=bus is not None or answers_without_a_run(topology, name)),
                session,
                report,
                budgets[name],
            )
            for name in configs
        }
        with closing(Caches({} if bus is None else _cache_files(topology, bus), report)) as caches:
            async with gateway(judges) as env:
                models = {name: _model(topology, name) for name in configs}
                yield Judges(configs, judges, env if topology.reward.sandbox != "isolated" else {}, caches, models)
            group.cancel_scope.cancel()


def _cache_files(topology: Topology, bus: Bus) -> dict[str, tuple[Path, int]]:
    """Return file and bytes of the caches of the judges that have one. Each reward actor has files of its own."""
    folder, judges = run_dir_of(topology) / CACHES, topology.reward.judges.items()
    return {
        name: (folder / f"{name}-{bus.name}.sqlite", judge.cache_bytes) for name, judge in judges if judge.cache_bytes
    }


def answers_without_a_run(topology: Topology, name: str) -> bool:
    """Return whether a judge has servers that no run starts."""
    pool = judge_pools(topology).get(name)
    return pool is None or bool(topology.engines[pool].urls)


def _servers(topology: Topology, name: str, bus: Bus | None, group: TaskGroup) -> JudgeServers:
    config, pool = topology.reward.judges[name], judge_pools(topology).get(name)
    if pool is None:
        url, model = config.url or "", config.model or ""
        try:
            key = api_key(config)
        except KeyProblem as error:
            raise InputError(f"reward.judges.{name}.{error.setting} = {error.value!r}: {error}") from error
        servers = JudgeServers(f"reward.judges.{name}", is_pool=False)
        servers.add(JudgeServer(url, url.rstrip("/"), model, key))
        return servers
    engine = topology.engines[pool]
    servers = JudgeServers(f"engines.{pool}", is_pool=True)
    servers.add_external(pool, engine, _served_name(topology, engine))
    if bus is not None:
        group.start_soon(servers.follow, bus, pool, _served_name(topology, engine))
    return servers


def _served_name(topology: Topology, engine: EngineConfig) -> str:
    named = (argument.value for argument in sglang_arguments(engine) if argument.name == "served_model_name")
    return str(next(named, model_of(topology, engine)))


def _model(topology: Topology, name: str) -> str:
    """Return the model of a judge: its name at a URL, or the checkpoint of its pool."""
    pool = judge_pools(topology).get(name)
    return topology.reward.judges[name].model or "" if pool is None else model_of(topology, topology.engines[pool])


def _limits(topology: Topology, name: str, *, waits: bool) -> JudgeLimits:
    config = topology.reward.judges[name]
    wait_s = config.wait_s if waits else 0.0
    return JudgeLimits(config.timeout_s, config.max_tries, requests_at_once(topology, name), wait_s)


def requests_at_once(topology: Topology, name: str) -> int:
    """Return how many requests a reward actor has in flight to a judge."""
    config, pool = topology.reward.judges[name], judge_pools(topology).get(name)
    if config.concurrency is not None or pool is None:
        return config.concurrency or AT_ONCE
    engine, actors = topology.engines[pool], max(1, len(topology.reward.nodes))
    return max(1, math.ceil(engine.concurrency * max(num_engines(engine), len(engine.urls)) / actors))
