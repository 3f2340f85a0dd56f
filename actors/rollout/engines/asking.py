"""Asks engines whether they live, and those that others run what they serve (external.py)."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

import aiohttp
import anyio
import structlog

from actors.rollout.engines.external import Wanted, check_server
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from runtime.settings.reading.config import Problem

log = structlog.get_logger()

T = TypeVar("T")

TINY_PROMPT: Final = (0, 0)


async def check_engine(client: SglangClient, url: str, wanted: Wanted) -> None:
    """Ask one engine.

    Raises:
        WrongEngine: it does not serve what the recipe asks for.
        EngineError: it does not answer.
    """
    says = await client.server_info(url) | await client.model_info(url)
    check_server(url, says, wanted)


async def makes_tokens(client: SglangClient, url: str, within_s: float) -> bool:
    """Whether an engine computes the log-probs of a tiny prompt in time, or at least says that its load has changed."""
    before = await answered(within_s, lambda: client.loads(url))
    with anyio.move_on_after(within_s):
        try:
            await client.prompt_log_probs(url, TINY_PROMPT)
        except EngineError as error:
            log.debug("no_sign_of_life", url=url, error=str(error))
        else:
            return True
    after = await answered(within_s, lambda: client.loads(url))
    return before is not None and after is not None and before != after


async def answered(within_s: float, ask: Callable[[], Awaitable[T]]) -> T | None:
    """An answer; None: none in time."""
    with anyio.move_on_after(within_s):
        return await ask()
    return None


def url_problems(key: str, urls: Sequence[str], wanted: Wanted) -> Iterator[Problem]:
    """Which engines that run already do not answer or are no such as the recipe wants; `key` has their URLs."""
    for url, reason in anyio.run(_refusals, urls, wanted).items():
        yield Problem.of(key, url, reason)


async def _refusals(urls: Sequence[str], wanted: Wanted) -> dict[str, str]:
    reasons: dict[str, str] = {}

    async def ask(client: SglangClient, url: str) -> None:
        try:
            await check_engine(client, url, wanted)
        except EngineError as error:
            reasons[url] = str(error)

    async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        for url in urls:
            group.start_soon(ask, SglangClient(session), url)
    return reasons
