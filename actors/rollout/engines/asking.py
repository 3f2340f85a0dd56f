"""Asks engines that others run what they serve, and compares it with the recipe (external.py)."""

from collections.abc import Iterator, Sequence

import aiohttp
import anyio

from actors.rollout.engines.external import Wanted, check_server
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from runtime.settings.reading.config import Problem


async def check_engine(client: SglangClient, url: str, wanted: Wanted) -> None:
    """Ask one engine.

    Raises:
        WrongEngine: it does not serve what the recipe asks for.
        EngineError: it does not answer.
    """
    says = await client.server_info(url) | await client.model_info(url)
    check_server(url, says, wanted)


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
