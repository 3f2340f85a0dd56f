"""An engine without a model: SGLang's HTTP API, answers by script, no time per token unless asked for."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

Script = Callable[[list[int], dict[str, Any]], list[int]]  # prompt ids, sampling params -> response ids


def four_tokens(prompt: list[int], params: dict[str, Any]) -> list[int]:
    """The script of a fast engine."""
    return [1, 2, 3, 4][: params["max_new_tokens"]]


@dataclass
class ScriptedEngine:
    """State and knobs of one engine."""

    script: Script = four_tokens
    checksum: str = "sum"
    text: Callable[[list[int]], str] = lambda ids: " ".join(map(str, ids))
    version: str = "default"
    url: str = ""
    hold: bool = False  # requests stay in flight until released or aborted
    refuses_weights: bool = False
    raw_answers: dict[str, bytes] = field(default_factory=dict[str, bytes])  # by path, in place of the real ones
    abort_at: asyncio.Event | None = None  # aborts wait for it
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    updates: list[str] = field(default_factory=list[str])
    _broken: bool = False
    _running: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    _aborted: set[str] = field(default_factory=set[str])
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait_for_requests(self, number: int, timeout_s: float = 10.0) -> None:
        """Return once that many requests have arrived since the start."""
        async with asyncio.timeout(timeout_s), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= number)

    def release(self) -> None:
        """Let everything that is held end, and hold no more."""
        self.hold = False
        for event in self._running.values():
            event.set()

    def break_connections(self) -> None:
        """Lose every request that is in flight, as a killed engine does."""
        self._broken = True
        self.release()

    def app(self) -> web.Application:
        @web.middleware
        async def answer_raw(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = await handler(request)
            raw = self.raw_answers.get(request.path)
            return answer if raw is None else web.Response(body=raw, content_type="application/json")

        app = web.Application(client_max_size=2**28, middlewares=[answer_raw])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/weights_checker", self._check)
        for path in ("/ready", "/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self._info)
        return app

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self._arrived:
            self.requests.append(body)
            self._arrived.notify_all()
        prompts = body["input_ids"]
        answer = await self._answer(body, prompts)
        if self._broken and request.transport is not None:
            request.transport.close()
        return web.json_response(answer)

    async def _answer(self, body: dict[str, Any], prompts: Any) -> Any:
        if not isinstance(prompts[0], list):
            return await self._one(body["rid"], prompts, body["sampling_params"])
        members = [
            self._one(f"{body['rid']}_{index}", prompt, body["sampling_params"]) for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*members)

    async def _one(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        ids = self.script(prompt, params)
        reason: dict[str, Any] = {"type": "stop", "matched": ids[-1] if ids else None}
        if len(ids) >= params["max_new_tokens"]:
            reason = {"type": "length", "length": len(ids)}
        if self.hold:
            over = self._running[rid] = asyncio.Event()
            await over.wait()
            del self._running[rid]
            if rid in self._aborted:
                ids, reason = ids[: len(ids) // 2], {"type": "abort", "message": "Aborted"}
        meta = {
            "id": rid,
            "finish_reason": reason,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}] if ids else [],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"text": self.text(ids), "output_ids": ids, "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.abort_at is not None:
            await self.abort_at.wait()
        doomed = list(self._running) if body.get("abort_all") else [body.get("rid", "")]
        for rid in doomed:
            if rid in self._running:
                self._aborted.add(rid)
                self._running[rid].set()
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuses_weights:
            return web.json_response({"success": False, "message": "no such directory"}, status=400)
        self.version = body["weight_version"]
        self.updates.append(body["model_path"])
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _check(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "", "ranks": [], "per_engine_checksum": self.checksum})

    async def _info(self, request: web.Request) -> web.Response:
        info = {"model_path": "scripted", "is_generation": True, "weight_version": self.version}
        return web.Response(text=json.dumps(info), content_type="application/json")


@asynccontextmanager
async def serving(engine: ScriptedEngine, port: int = 0) -> AsyncIterator[ScriptedEngine]:
    """The engine on a port of its own for the duration of a block."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the router greets in HTTP/2 first
    runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        address = runner.addresses[0]
        engine.url = f"http://{address[0]}:{address[1]}"
        yield engine
    finally:
        engine.release()
        await runner.cleanup()
