"""A run on an engine that others run."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from messages import WeightsApplied
from tests.chaos.audit import audit
from tests.chaos.harness import Run
from tests.support.tiny_engine import get, running_engine

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

MODEL = Path(__file__).parents[2] / "topologies/demo/models/reverse-digits"
FLAGS = ("--load-format", "dummy", "--max-running-requests", "64", "--incremental-streaming-output")


@asynccontextmanager
async def between(engine: str, on_request: Callable[[str], bool]) -> AsyncGenerator[str]:
    """A server that hands on what it is asked; only what `on_request` says no to, by its path, is lost."""

    async def hand_on(request: web.Request) -> web.StreamResponse:
        if not on_request(request.path):
            raise web.HTTPServiceUnavailable
        body = await request.read()
        async with session.request(request.method, engine + request.path_qs, data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", hand_on)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


async def test_an_engine_that_was_paused_when_its_rollout_actor_died_is_continued_by_the_next(tmp_path: Path) -> None:
    kill: Callable[[], None] | None = None
    killed = False

    def on_request(path: str) -> bool:
        nonlocal kill, killed
        if path != "/continue_generation" or kill is None:
            return True
        kill()
        kill, killed = None, True
        return False

    with running_engine(MODEL, *FLAGS) as engine:
        async with between(engine.url, on_request) as url:
            run = Run(tmp_path, num_steps=6, overrides=(f'engines.policy.urls=["{url}"]',))
            async with run.started() as command:
                await command.log.until(lambda event: isinstance(event, WeightsApplied) and event.version >= 3)
                kill = lambda: command.log.kill("rollout")  # noqa: E731 - of the process that runs then
                await command.log.until_restarted("rollout")
                family = command.family()
                assert await command.end() == 0
                await run.gone(family)
        assert killed
        assert get(f"{engine.url}/ready")[0] == 200
    await audit(run, killed=["rollout"])
