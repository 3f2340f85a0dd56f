"""The servers of one judge: engines of a pool, which may end and move, or one URL."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import aiohttp
import anyio
import msgspec
import structlog

from actors.reward.judging.requests import PATH
from runtime.bus.addresses import Address, engine_key
from runtime.bus.bus import Bus
from runtime.bus.servers import attend_servers, kill_server
from runtime.settings.tables.engines import EngineConfig
from runtime.util.secrets import Secret

log = structlog.get_logger()

LOOK_S: Final = 5.0  # for a sign of life of an engine that did not answer in time


class _Load(msgspec.Struct, frozen=True):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0


class _Loads(msgspec.Struct, frozen=True):
    loads: tuple[_Load, ...] = ()


@dataclass(eq=False, frozen=True)
class JudgeServer:
    """One server. A restarted engine is a new one."""

    name: str  # for people and events
    url: str  # base URL, up to "/v1"
    model: str
    key: Secret | None = None
    kill: Callable[[str], Awaitable[None]] | None = None  # None: the run cannot restart it

    def headers(self) -> dict[str, str]:
        """The headers of a request. They are secret."""
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key.reveal()}"}
        return {"Content-Type": "application/json", **key}


class JudgeServers:
    """The servers of a judge, in turn."""

    def __init__(self, label: str, *, is_pool: bool) -> None:
        """Start without servers.

        Args:
            label: the setting that names them, for people.
            is_pool: whether they are engines of a pool, which come back when they end.
        """
        self.label = label
        self.is_pool = is_pool
        self._servers: dict[str, JudgeServer] = {}
        self._changed = anyio.Event()
        self._num_sent = 0  # for round-robin

    def add(self, server: JudgeServer) -> None:
        """Add a server, or replace the one of its name."""
        self._servers[server.name] = server
        self._changed.set()
        self._changed = anyio.Event()

    async def next(self, failed: JudgeServer | None = None) -> JudgeServer:
        """Wait until a server is known; if there are several, not the one that failed."""
        while not self._servers:
            await self._changed.wait()
        known = list(self._servers.values())
        others = [server for server in known if server is not failed] or known
        self._num_sent += 1
        return others[self._num_sent % len(others)]

    def add_external(self, pool: str, engine: EngineConfig, model: str) -> None:
        """Add the engines of a pool that already run."""
        for index, url in enumerate(engine.urls):
            base = f"{url.rstrip('/')}/v1"
            self.add(JudgeServer(f"engines.{pool}.urls[{index}]", base, model))  # external engines never get the key

    async def follow(self, bus: Bus, pool: str, model: str) -> None:
        """Follow the engines of a pool that the run starts. Never returns."""
        key = await engine_key(bus.kv)

        async def attend(name: str, address: Address) -> None:
            kill = partial(kill_server, bus, name, address)
            self.add(JudgeServer(name, f"{address.url}/v1", model, key, kill))

        await attend_servers(bus, "engine", pool, attend)


async def shows_life(session: aiohttp.ClientSession, server: JudgeServer) -> bool:
    """Return whether an engine answers a request for one token in time, or at least reports a changed load."""
    before = await _loads(session, server)
    body = {"model": server.model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
    try:
        async with session.post(
            f"{server.url}{PATH}", json=body, headers=server.headers(), timeout=aiohttp.ClientTimeout(total=LOOK_S)
        ) as response:
            await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        log.debug("no_sign_of_life", url=server.url, error=str(error) or type(error).__name__)
    else:
        return True
    after = await _loads(session, server)
    return before is not None and after is not None and before != after


async def _loads(session: aiohttp.ClientSession, server: JudgeServer) -> _Loads | None:
    timeout = aiohttp.ClientTimeout(total=LOOK_S)
    try:
        async with session.get(f"{server.url}/loads", headers=server.headers(), timeout=timeout) as response:
            return msgspec.json.decode(await response.read(), type=_Loads)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
        return None
