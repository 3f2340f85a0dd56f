"""What is sent to engines that no scripted engine keeps."""

import asyncio
import contextlib
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import BadAnswer, EngineFailed, EngineUnavailable
from actors.rollout.sglang.reading import AnswerReader
from runtime.util.secrets import Secret
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


async def test_the_key_is_shown_to_the_runs_own_servers_alone() -> None:
    seen: dict[str, str | None] = {}
    registered: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen[request.path] = request.headers.get("Authorization")
        if request.method == "POST":
            registered.append(await request.json())
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        own, foreign = f"http://127.0.0.1:{port}", f"http://localhost:{port}/foreign"
        async with aiohttp.ClientSession() as session:
            client = SglangClient(session, Secret("k"), strangers=(foreign,))
            assert await client.ready(own)
            assert await client.ready(foreign)
            await client.add_worker(own, own)
            await client.add_worker(own, foreign)
    finally:
        await runner.cleanup()
    assert seen == {"/ready": "Bearer k", "/foreign/ready": None, "/workers": "Bearer k"}
    assert registered == [{"url": own, "api_key": "k"}, {"url": foreign}]


async def test_a_weight_update_has_as_long_as_the_pool_says() -> None:
    async with serving(ScriptedEngine()) as engine, aiohttp.ClientSession() as session:
        engine.update_at = asyncio.Event()
        client = SglangClient(session, stall_s=0.2)
        with anyio.fail_after(200), pytest.raises(EngineUnavailable, match="no answer within"):
            await client.update_weights(engine.url, "/weights/v7", 7)
        engine.update_at.set()
        await client.update_weights(engine.url, "/weights/v8", 8)


async def test_a_weight_update_names_its_version_and_drops_what_was_computed_under_older_ones() -> None:
    bodies: list[dict[str, Any]] = []

    async def update(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", update)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with aiohttp.ClientSession() as session:
            await SglangClient(session).update_weights(
                f"http://127.0.0.1:{runner.addresses[0][1]}", "/weights/v7", "7@e"
            )
    finally:
        await runner.cleanup()
    assert bodies == [
        {"model_path": "/weights/v7", "weight_version": "7@e", "flush_cache": True, "load_format": "auto"}
    ]


async def test_one_look_that_is_answered_late_does_not_make_an_engine_another_one() -> None:
    asked: list[str] = []
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if asked.count(request.path) == 1 or request.path.startswith("/hung"):
            await never.wait()
        return web.json_response({"weight_version": "7@e"})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            client = SglangClient(session, admin_timeout_s=0.3)
            assert await client.ready(url)
            assert await client.weight_version(url) == "7@e"
            assert not await client.ready(url + "/hung")
    finally:
        never.set()
        await runner.cleanup()
    assert asked == 2 * ["/ready"] + 2 * ["/model_info"] + 2 * ["/hung/ready"]


async def test_an_answer_without_end_is_the_engines_failure() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"data: " + b"x" * 5_000)
        return response

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    body = {"rid": "r", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            client = SglangClient(session, max_answer_bytes=100_000, max_event_bytes=100_000)
            with pytest.raises(EngineFailed, match="the answer is larger than 100000 bytes"):
                await client.generate(url, body, [AnswerReader(SampleBuffer())])
            with pytest.raises(BadAnswer, match="an event is larger than 100000 bytes"):
                await client.stream(url, body, AnswerReader(SampleBuffer()))
    finally:
        await runner.cleanup()
