"""The contract: servers and routers that die, hang or run out of time in the middle of a request."""

import signal
from typing import Any

import anyio
import pytest

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineFailed, EngineUnavailable
from tests.sglang.rig import Rig, body_of, readers_of, request, until, until_read
from tests.sglang.router import Router, running_router
from tests.sglang.server import TINY, Server, Servers
from tests.support.sampled import Generated

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PROMPT = [3, 4, 5]
LONG = 300
SLOW_S = 0.1  # of a step: 30 s for an answer, unless the test ends that
LIMIT_S = 6  # of a router that is impatient


@pytest.mark.behaviour("a router that is restarted: streamed tokens are kept, whole requests are sent again")
async def test_router_restarted(make_rig: Any) -> None:
    found: dict[bool, Generated] = {}
    asked = {streamed: request(PROMPT, LONG, streamed=streamed) for streamed in (True, False)}
    with running_router() as router:
        async with make_rig(router) as rig:
            await rig.slow_down(SLOW_S)

            async def ask(streamed: bool) -> None:
                found[streamed] = await rig.generate(asked[streamed])

            async with anyio.create_task_group() as group:
                group.start_soon(ask, True)
                group.start_soon(ask, False)
                await rig.until_running(2)
                await until_read(asked[True])
                await anyio.to_thread.run_sync(router.kill)
                await rig.slow_down(0)
                await anyio.to_thread.run_sync(router.start_again)
    assert found[True].cut_short
    assert 0 < len(found[True].answers[0].output_ids) < LONG
    assert not found[False].cut_short
    assert len(found[False].answers[0].output_ids) == LONG


@pytest.mark.behaviour("an answer longer than the router's limit: streamed tokens are kept; a whole one is a failure")
async def test_longer_than_the_routers_limit(server: Server, make_rig: Any) -> None:
    with running_router(generate_timeout_s=LIMIT_S) as router:
        async with make_rig(router) as rig:
            await rig.slow_down(SLOW_S)
            asked, whole = request(PROMPT, LONG, streamed=True), request(PROMPT, LONG)

            async def ask_whole() -> None:
                with pytest.raises((EngineUnavailable, EngineFailed)):
                    await rig.client.generate(rig.fleet.serving.router, body_of(whole), readers_of(whole))

            async with anyio.create_task_group() as group:
                group.start_soon(ask_whole)
                generated = await rig.generate(asked)
            assert generated.cut_short
            assert 0 < len(generated.answers[0].output_ids) < LONG
            assert asked.readers[0].meta.id == f"{asked.rid}-0", "it was sent once"
            await rig.client.abort(server.url, None)


@pytest.mark.behaviour("a scheduler that is stopped, idle or busy: /ready says 200, nothing comes; it goes on")
async def test_scheduler_stopped(rig: Rig) -> None:
    for busy in (False, True):
        found: list[Generated] = []

        async def ask(found: list[Generated]) -> None:
            found.append(await rig.generate(request(PROMPT, LONG, streamed=True)))

        await rig.slow_down(SLOW_S)
        async with anyio.create_task_group() as group:
            if busy:
                group.start_soon(ask, found)
                await rig.until_running(1)
            await anyio.to_thread.run_sync(hold, rig.server, True)
            try:
                if not busy:
                    group.start_soon(ask, found)
                await anyio.sleep(2)
                assert await rig.client.ready(rig.server.url)
                assert not found
            finally:
                await anyio.to_thread.run_sync(hold, rig.server, False)
            await rig.slow_down(0)
        assert len(found[0].answers[0].output_ids) == LONG


def hold(server: Server, stopped: bool) -> None:
    """Stop what holds the model, or let it go on. The tiny engine's torch thread is kept in a long step instead."""
    if server.layout == TINY:
        server.slow_down(5.0 if stopped else SLOW_S)
        return
    for process in server.schedulers():
        process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)


@pytest.mark.behaviour("a server killed in mid-stream and before the headers: tokens are kept, requests are sent again")
async def test_server_killed(
    make_rig: Any, session_router: Router, servers: Servers, server: Server, client: SglangClient
) -> None:
    found: dict[bool, Generated] = {}
    asked = {streamed: request(PROMPT, LONG, streamed=streamed) for streamed in (True, False)}
    async with make_rig(session_router) as rig, anyio.create_task_group() as group:
        await rig.slow_down(SLOW_S)

        async def ask(streamed: bool) -> None:
            found[streamed] = await rig.generate(asked[streamed])

        group.start_soon(ask, True)
        group.start_soon(ask, False)
        await rig.until_running(2)
        await until_read(asked[True])
        await anyio.to_thread.run_sync(server.kill)
        await until(lambda: True in found, 60)
        assert found[True].cut_short
        assert 0 < len(found[True].answers[0].output_ids) < LONG
        assert rig.fleet.serving.num_admitted() == 0
        again = await anyio.to_thread.run_sync(servers.get, server.layout)
        group.start_soon(rig.fleet.run_engine, "engine-0", again.url)
        await until(lambda: False in found, 120)
        assert len(found[False].answers[0].output_ids) == LONG
        group.cancel_scope.cancel()
