"""A scripted judge behind HTTP, and a user's functions around judges."""

import json
import os
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from aiohttp import web

MAX_SCORE = 27  # of three digits

Reply = tuple[int, Any] | str | None  # status and body, the text of an answer, or None: no answer at all


class ScriptedJudge:
    """Answers POST /v1/chat/completions by its script, whose last reply repeats."""

    def __init__(self, *script: Reply, **headers: str) -> None:
        self.script = list(script)
        self.headers = headers
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""
        self.now = self.most = 0  # requests in hand

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            if reply is None:
                await anyio.sleep_forever()
            status, body = (200, completion(reply)) if isinstance(reply, str) else reply  # type: ignore[misc]
            return web.json_response(body, status=status, headers=self.headers)
        finally:
            self.now -= 1


def completion(text: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    """A response with one answer."""
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


@asynccontextmanager
async def serving(judge: ScriptedJudge, port: int = 0) -> AsyncGenerator[ScriptedJudge]:
    """Serve a scripted judge on a free port, or on this one."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield judge
    finally:
        await runner.cleanup()


def digits(sample: Any) -> float:
    """A user's parser: the sum of the answer's digits."""
    return score_of(sample.judge_answer)


def score_of(answer: str) -> float:
    """The sum of the digits of an answer, between 0 and 1."""
    return sum(int(character) for character in answer if character.isdigit()) / MAX_SCORE


def asks(sample: Any) -> float:
    """A user's grader that calls the judge "digits" itself."""
    content = [{"role": "user", "content": sample.response}]
    body = {"model": "digits", "messages": content, "temperature": 0, "max_tokens": 3}
    request = urllib.request.Request(
        f"{os.environ['PHYSARUM_JUDGE_URL']}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {os.environ['PHYSARUM_JUDGE_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return score_of(json.load(response)["choices"][0]["message"]["content"])


async def asks_later(sample: Any) -> float:
    """The same in an async function."""
    return await anyio.to_thread.run_sync(asks, sample)
