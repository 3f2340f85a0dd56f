"""Liveness checks of engines, and configuration checks of external engines (external.py)."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

import aiohttp
import anyio
import structlog

from actors.rollout.engines.external import ServerRequirements, check_server
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from runtime.settings.reading.config import Problem

log = structlog.get_logger()

T = TypeVar("T")

TINY_PROMPT: Final = (0, 0)


async def check_engine(client: SglangClient, url: str, wanted: ServerRequirements) -> None:
    """Check an engine's configuration against the recipe.

    Raises:
        WrongEngine: it does not serve what the recipe asks for.
        EngineError: it does not respond.
    """
    says = await client.server_info(url) | await client.model_info(url)
    check_server(url, says, wanted)


async def makes_tokens(client: SglangClient, url: str, within_s: float) -> bool:
    """Whether an engine scores a tiny prompt in time, or at least reports a changed load."""
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
    """Return the result of a call; None after the timeout."""
    with anyio.move_on_after(within_s):
        return await ask()
    return None


def url_problems(key: str, urls: Sequence[str], wanted: ServerRequirements) -> Iterator[Problem]:
    """Yield the external engines that do not respond or do not fit the recipe; `key` is the setting with their URLs."""
    for url, reason in anyio.run(_refusals, urls, wanted).items():
        yield Problem.of(key, url, reason)


async def _refusals(urls: Sequence[str], wanted: ServerRequirements) -> dict[str, str]:
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
