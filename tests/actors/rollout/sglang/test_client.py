"""What is sent to engines that no scripted engine keeps."""

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from actors.rollout.sglang.client import SglangClient

pytestmark = pytest.mark.anyio


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
            await SglangClient(session).update_weights(f"http://127.0.0.1:{runner.addresses[0][1]}", "/weights/v7", 7)
    finally:
        await runner.cleanup()
    assert bodies == [{"model_path": "/weights/v7", "weight_version": "7", "flush_cache": True}]
