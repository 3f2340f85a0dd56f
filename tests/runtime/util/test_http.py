"""Asking whether a server lives."""

import socket

import anyio
import pytest
from aiohttp import web

from runtime.node.supervisor.readiness import status_of

pytestmark = pytest.mark.anyio


async def test_the_status_is_that_of_the_answer_and_redirects_are_not_followed() -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/elsewhere":
            raise web.HTTPFound("/fine")
        return web.Response(status=200 if request.path == "/fine" else 503)

    application = web.Application()
    application.router.add_get("/{path}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await status_of(f"{url}/fine", timeout_s=40) == 200
        assert await status_of(f"{url}/ready", timeout_s=40) == 503
        assert await status_of(f"{url}/elsewhere", timeout_s=40) == 302
    finally:
        await runner.cleanup()


async def test_nobody_there_and_no_answer_in_time_are_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/"
        with anyio.fail_after(200):
            assert await status_of(url, timeout_s=0.2) is None
    assert await status_of(url, timeout_s=0.2) is None


async def test_what_is_no_http_is_no_answer() -> None:
    async def babble(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(b"INFO {}\r\n" * 10)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, babble)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        assert await status_of(f"http://127.0.0.1:{port}/", timeout_s=40) is None
        tasks.cancel_scope.cancel()
