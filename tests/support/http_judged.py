"""An async grader that calls an HTTP judge, and that judge: it answers after a while, or misbehaves as it is told."""

import asyncio
import os
import sys
from typing import Any

import aiohttp
from aiohttp import web

URL = "JUDGE_URL"  # variable of the grader's environment
_sessions: list[aiohttp.ClientSession] = []


async def judged(sample: Any) -> Any:
    """A user's grader: asks the judge, whose JSON has the reward."""
    if not _sessions:
        _sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    url = sample.metadata.get("url") or os.environ[URL]
    async with _sessions[0].post(url, json={"response": sample.response}) as response:
        response.raise_for_status()
        return (await response.json(content_type=None))["reward"]


async def _answer(request: web.Request) -> web.StreamResponse:
    command = (await request.json())["response"]
    match command:
        case "hang":
            await asyncio.sleep(3600)
        case "429":
            return web.json_response({}, status=429)
        case "400":
            return web.json_response({}, status=400)
        case "nonsense":
            return web.json_response({"reward": "very good"})
        case "null":
            return web.json_response({"reward": None})
        case "html":
            return web.Response(text="<html>")
        case "dies":
            assert request.transport is not None
            request.transport.abort()
        case _:
            await asyncio.sleep(request.app["delay_s"])
    return web.json_response({"reward": 1.0})


async def serve(delay_s: float) -> None:
    """Serve on a free port, whose number is printed, until killed."""
    app = web.Application()
    app["delay_s"] = delay_s
    app.router.add_post("/", _answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)  # noqa: T201 - read by the parent
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
