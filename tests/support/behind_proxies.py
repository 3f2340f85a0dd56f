"""A rollout actor's generator on engines behind proxies that corrupt answers, and checks of its results."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import numpy as np

from actors.rollout.engines.dispatch import Direct
from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.requests.request import GenerateRequest
from actors.rollout.requests.sending import Generator
from actors.rollout.requests.watching import TokenTimeouts, Watchdog
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.served_model import ServedModel
from messages import EngineRequestsFailed, EngineStateChanged, Message, SamplingParams, WeightsRefused
from tests.support.rollout import announcement
from tests.support.sampled import Sampled, generate, request_of
from tests.support.spoiling_proxy import Case, Proxy, spoiling

LONG: Final = 260  # tokens: smallest length that is streamed
SHORT: Final = 12
PATIENCE: Final = TokenTimeouts(first_s=4.0, next_s=4.0)
START_S: Final = 60.0

Choose = Callable[[dict[str, Any]], Case | None]


@dataclass
class Behind:
    """Generator, fleet and proxies of a test, and the events and kills so far."""

    generator: Generator
    fleet: Fleet
    proxies: list[Proxy]
    told: list[Message]  # engine events
    killed: list[str]  # reasons of requested engine kills

    def truths(self, rid: str) -> list[dict[tuple[int, ...], tuple[float, ...]]]:
        """Uncorrupted answers to all tries of a request: log-probs by tokens, for each member of a batch."""
        found: list[dict[tuple[int, ...], tuple[float, ...]]] = []
        for proxy in self.proxies:
            for name, truth in proxy.truths.items():
                if name.rpartition("-")[0] != rid:
                    continue
                members = [[part] for part in truth.parts] if truth.batch else [truth.parts]
                found += [joined(parts) for parts in members]
        return found


def joined(parts: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], tuple[float, ...]]:
    """Map the tokens of an answer, and every prefix at which a chunk ends, to their log-probs."""
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    beginnings = {ids: log_probs}
    for part in parts:
        if part["output_ids"]:
            triples = part["meta_info"]["output_token_logprobs"]
            whole = len(part["output_ids"]) == part["meta_info"]["completion_tokens"]
            ids = tuple(part["output_ids"]) if whole else (*ids, *part["output_ids"])
            new = tuple(triple[0] for triple in triples)
            log_probs = new if len(new) == len(ids) else (*log_probs, *new)
        beginnings[ids] = log_probs
    return beginnings


def request(
    rid: str, max_new_tokens: int, *, members: int = 1, seed: int = 1, streamed: bool = False
) -> GenerateRequest:
    """Make a request of one or several samples."""
    prompts = [[3, 4, 5 + index % 50] for index in range(members)]
    seeds = [seed + index for index in range(members)]
    return request_of(rid, prompts, SamplingParams(max_new_tokens=max_new_tokens), seeds=seeds, streamed=streamed)


def problem_of(answers: Sequence[Sampled], behind: Behind, rid: str, *, max_new_tokens: int, whole: bool) -> str:
    """Compare answers with the engine's. Empty if every token and log-prob is as an engine sampled it."""
    truths = behind.truths(rid)
    for answer in answers:
        ids = tuple(answer.output_ids)
        log_probs = np.array(answer.log_probs, np.float32)
        if not np.isfinite(log_probs).all():
            return "a log-prob is no number"
        expected = [np.array(truth[ids], np.float32) for truth in truths if ids in truth]
        if not any(np.array_equal(each, log_probs) for each in expected):
            return f"{len(ids)} tokens that no engine sampled"
        if whole and len(ids) != max_new_tokens:
            return f"{len(ids)} of {max_new_tokens} tokens"
    return ""


async def outcome(behind: Behind, asked: GenerateRequest, *, limit_s: float) -> str:
    """Send a request and return "good", "refused: ..." or the problem. A partial stream may be continued."""
    started = time.monotonic()
    try:
        with anyio.fail_after(limit_s):
            generated = await generate(behind.generator, asked)
    except TimeoutError:
        return f"nothing within {time.monotonic() - started:.0f} s"
    except RequestRefused as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - one failing case must not hide the others
        return f"raised {error!r}"
    if generated is None:
        return "halted"
    if len(generated.answers) != len(asked.inputs):
        return f"{len(generated.answers)} answers"
    aborted = [answer for answer in generated.answers if answer.finish_reason.get("type") == "abort"]
    if aborted and not generated.cut_short:
        return "an abort that nobody asked for is its answer"
    limit = asked.max_new_tokens
    wrong = problem_of(generated.answers, behind, asked.rid, max_new_tokens=limit, whole=not generated.cut_short)
    return wrong or "good"


@asynccontextmanager
async def behind_proxies(
    engines: Sequence[str],
    router: str | None,
    model: Path,
    chooses: Sequence[Choose],
    *,
    ours: bool = False,
    limits: TokenTimeouts = PATIENCE,
    give_up_after_s: float = 600.0,
    weights: Path | None = None,
) -> AsyncGenerator[Behind]:
    """Run a generator over running engines, each behind its own proxy.

    Args:
        engines: URLs of the engines.
        router: URL of a router without engines. None: the actor chooses the engines.
        model: Directory of the served model.
        chooses: For each proxy, the function that chooses which answers to corrupt.
        ours: Whether the run started the engines.
        limits: Limits of the watchdog.
        weights: Directory of the model's weights. None: the model directory.
        give_up_after_s: Longest time without an answer from running engines, in seconds.
    """
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(spoiling(url, choose)) for url, choose in zip(engines, chooses, strict=True)
        ]
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        client = SglangClient(session, stall_s=START_S)
        verifier = WeightVerifier(
            client, Updater(client, "drain"), UpdateTracker(), verify="never", trainer_dtype="float32"
        )
        told: list[Message] = []
        fleet = Fleet(client, verifier, RecordedEvents(told), dispatch=Direct() if router is None else None)
        killed: list[str] = []
        generator = Generator(client, fleet.serving, ServedModel.read(model), give_up_after_s=give_up_after_s)
        async with anyio.create_task_group() as group:
            for index, proxy in enumerate(proxies):
                group.start_soon(run_engine, fleet, f"engine.policy.{index}", proxy.url, ours, killed)
            if router is not None:
                group.start_soon(fleet.run_router, router)
            group.start_soon(generator.running.run)
            group.start_soon(Watchdog(client, fleet.serving, generator.running, limits).run)
            await fleet.set_target(announcement(1, path=str(weights or model)))
            with anyio.fail_after(START_S):
                await fleet.next_version(0)
                await fleet.until(lambda: fleet.serving.num_admitted() == len(proxies))
            try:
                yield Behind(generator, fleet, proxies, told, killed)
            finally:
                group.cancel_scope.cancel()


class RecordedEvents(RateLimitedEvents):
    """Keeps the events instead of publishing them."""

    def __init__(self, told: list[Message]) -> None:
        super().__init__("rollout")
        self._told = told

    def _put(self, event: EngineStateChanged | WeightsRefused | EngineRequestsFailed) -> None:
        self._told.append(event)


async def run_engine(fleet: Fleet, name: str, url: str, ours: bool, killed: list[str]) -> None:
    async def kill(reason: str) -> None:
        killed.append(reason)

    await fleet.run_engine(name, url, ours=ours, kill=kill if ours else None)
