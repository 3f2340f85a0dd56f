"""Scripted engine: SGLang's HTTP API without a model, with scripted answers and no delay by default."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from actors.rollout.sglang.client import ROUTING_KEY
from actors.rollout.sglang.labels import version_of

MODEL: Final = str(Path(__file__).parents[2] / "topologies/demo/models/reverse-digits")  # for the router
Script = Callable[[list[int], dict[str, Any]], list[int]]  # prompt ids, sampling params -> response ids


def four_tokens(prompt: list[int], params: dict[str, Any]) -> list[int]:
    """Script that answers at most four tokens."""
    return [1, 2, 3, 4][: params["max_new_tokens"]]


@dataclass
class ScriptedEngine:
    """State and settings of one engine."""

    script: Script = four_tokens
    checksum: str = "sum"
    text: Callable[[list[int]], str] = lambda ids: " ".join(map(str, ids))
    version: str = "default"
    url: str = ""
    hold: bool = False  # requests stay in flight until released or aborted
    refuses_weights: bool = False
    raw_answers: dict[str, bytes] = field(default_factory=dict[str, bytes])  # by path, in place of the real ones
    abort_at: asyncio.Event | None = None  # aborts wait for it
    update_at: asyncio.Event | None = None  # updates wait for it
    paused: bool = False
    calls: list[str] = field(default_factory=list[str])  # pauses, updates and continues, in order
    update_bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stream_every: int = 2  # tokens per streamed chunk
    incremental: bool = False  # True: chunks hold only new tokens; False: all tokens so far
    break_at: asyncio.Event | None = None  # once set, streams lose their connection after the last token
    streams: int = 0  # streamed requests that are held after their first tokens
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    routing_keys: list[str] = field(default_factory=list[str])  # of requests that came through a router
    updates: list[str] = field(default_factory=list[str])
    checks: list[str] = field(default_factory=list[str])  # checksum requests: "paused" or "running"
    probes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # requests for prompt log-probs
    prompt_log_prob: float = -0.5  # of each prompt token
    swallows_weights: bool = False  # reports success but keeps its weights
    loads: Callable[[str], str] | None = None  # maps a weights directory to the checksum after the update
    probe_reason: Callable[[], dict[str, Any]] = lambda: {"type": "length", "length": 0}  # finish reason of probes
    num_answered: int = 0  # requests whose whole answer is being sent
    probe_at: asyncio.Event | None = None  # answers to probes wait for it
    fails_to_continue: int = 0  # number of continue calls that will fail
    fails_to_resume: bool = False
    given_back: set[str] = field(default_factory=set[str])  # kinds of released memory
    info: dict[str, Any] = field(default_factory=dict[str, Any])  # additional fields of its model and server info
    aborts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    load: dict[str, Any] = field(default_factory=dict[str, Any])  # of its scheduler, as /v1/loads reports it
    num_loads: int = 0  # requests for it
    answer_loads: Handler | None = None  # in its place
    _broken: bool = False
    _running: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    _aborted: set[str] = field(default_factory=set[str])
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait_for_streams(self, number: int, timeout_s: float = 40.0) -> None:
        """Wait until that number of streamed requests are held, with their first tokens sent."""
        async with asyncio.timeout(timeout_s), self._arrived:
            await self._arrived.wait_for(lambda: self.streams >= number)

    async def wait_for_requests(self, number: int, timeout_s: float = 40.0) -> None:
        """Wait until that number of requests have arrived since the start."""
        async with asyncio.timeout(timeout_s), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= number)

    def release(self) -> None:
        """Complete all held requests, and hold no more."""
        self.hold = False
        for event in self._running.values():
            event.set()

    def release_one(self) -> None:
        """Complete the oldest held request."""
        next(iter(self._running.values())).set()

    def break_connections(self) -> None:
        """Drop every request in flight, as a killed engine does."""
        self._broken = True
        self.release()

    @property
    def held(self) -> int:
        """The version in its weight label; 0: no version."""
        return version_of(self.version)

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
        app.router.add_post("/update_weight_version", self._rename)
        app.router.add_post("/weights_checker", self._check)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/release_memory_occupation", self._give_back)
        app.router.add_post("/resume_memory_occupation", self._take_again)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/loads", self.answer_loads or self._loads)
        for path in ("/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self._info)
        return app

    async def _loads(self, _: web.Request) -> web.Response:
        self.num_loads += 1
        return web.json_response({"loads": [self.load]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["sampling_params"]["max_new_tokens"] == 0:
            return await self._probe(body)
        async with self._arrived:
            self.requests.append(body)
            self.routing_keys += request.headers.getall(ROUTING_KEY, [])
            self._arrived.notify_all()
        prompts = body["input_ids"]
        if body.get("stream"):
            return await self._stream(request, body)
        answer = await self._answer(body, prompts)
        self.num_answered += 1
        if self._broken and request.transport is not None:
            request.transport.close()
        return web.json_response(answer)

    async def _probe(self, body: dict[str, Any]) -> web.Response:
        self.probes.append(body)
        if self.probe_at is not None:
            await self.probe_at.wait()
        answer = self._whole("probe", [], self.probe_reason())
        first, *rest = body["input_ids"][body["logprob_start_len"] :]
        log_probs = [[self.prompt_log_prob, token, None] for token in rest]
        answer["meta_info"]["input_token_logprobs"] = [[None, first, None], *log_probs]
        if width := body.get("top_logprobs_num"):
            likeliest = [[self.prompt_log_prob - number, number, None] for number in range(width)]
            answer["meta_info"]["input_top_logprobs"] = [None, *([likeliest] * len(rest))]
        return web.json_response(answer)

    async def _answer(self, body: dict[str, Any], prompts: Any) -> Any:
        if not isinstance(prompts[0], list):
            return await self._one(body["rid"], prompts, body["sampling_params"])
        members = [
            self._one(f"{body['rid']}_{index}", prompt, body["sampling_params"]) for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*members)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Send the first half of the tokens in chunks, and the rest once the request is not held."""
        rid, params = body["rid"], body["sampling_params"]
        ids = self.script(body["input_ids"], params)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        labels: list[tuple[str, int, int]] = []

        async def send(ids: list[int], reason: dict[str, Any] | None) -> None:
            nonlocal sent
            event = self._event(rid, ids, reason, sent if self.incremental else 0)
            if labels:
                spans = [{"version": label, "start": start, "end": end} for label, start, end in labels]
                event["meta_info"]["weight_versions"] = spans
            sent = len(ids)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        for end in range(self.stream_every, len(ids) // 2 + 1, self.stream_every):
            await send(ids[:end], None)
        async with self._arrived:
            self.streams += 1
            self._arrived.notify_all()
        before, num_before = self.version, sent
        aborted = self.hold and await self._held(rid)
        if self._broken and request.transport is not None:
            request.transport.close()
            return response
        if self.version != before and num_before:
            labels = [(before, 0, num_before), (self.version, num_before, sent if aborted else len(ids))]
        await send(ids[:sent], ABORTED) if aborted else await send(ids, _reason(ids, params))
        self.num_answered += 1
        if self.break_at is not None and request.transport is not None:
            await self.break_at.wait()
            request.transport.close()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, rid: str, ids: list[int], reason: dict[str, Any] | None, start: int) -> dict[str, Any]:
        event = self._whole(rid, ids, reason)
        event["text"] = event["text"][len(self.text(ids[:start])) :] if start else event["text"]
        event["output_ids"] = ids[start:]
        event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][start:]
        if reason is None:  # like SGLang, which sends spans in the last chunk only
            del event["meta_info"]["weight_versions"]
        return event

    async def _held(self, rid: str) -> bool:
        """Wait until a request is released or aborted. True: it was aborted."""
        over = self._running[rid] = asyncio.Event()
        try:
            await over.wait()
        finally:
            del self._running[rid]
        return rid in self._aborted

    async def _one(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        ids = self.script(prompt, params)
        reason = _reason(ids, params)
        if self.hold and await self._held(rid):
            ids, reason = ids[: len(ids) // 2], ABORTED
        return self._whole(rid, ids, reason)

    def _whole(self, rid: str, ids: list[int], reason: dict[str, Any] | None) -> dict[str, Any]:
        meta = {
            "id": rid,
            "finish_reason": reason,
            "completion_tokens": len(ids),
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}] if ids else [],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"text": self.text(ids), "output_ids": ids, "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborts.append(body)
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
        self.calls.append("update")
        self.update_bodies.append(body)
        if self.update_at is not None:
            await self.update_at.wait()
        if self.refuses_weights:
            return web.json_response({"success": False, "message": "no such directory"}, status=400)
        self.version = body["weight_version"]
        self.updates.append(body["model_path"])
        if self.loads is not None and not self.swallows_weights:
            self.checksum = self.loads(body["model_path"])
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _pause(self, request: web.Request) -> web.Response:
        self.calls.append((await request.json())["mode"])
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        if self.fails_to_continue:
            self.fails_to_continue -= 1
            return web.Response(status=503)
        self.calls.append("continue")
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        return web.Response(status=400 if self._running else 200)

    async def _give_back(self, request: web.Request) -> web.Response:
        """Release memory, like SGLang: a busy server, or one that has released it already, crashes."""
        tags = set((await request.json())["tags"])
        self.calls.append(f"release {' '.join(sorted(tags))}")
        assert not self._running
        assert not tags & self.given_back
        self.given_back |= tags
        return web.json_response(None)

    async def _take_again(self, request: web.Request) -> web.Response:
        tags = set((await request.json())["tags"])
        self.calls.append(f"resume {' '.join(sorted(tags))}")
        assert tags <= self.given_back
        if self.fails_to_resume:
            return web.Response(status=500)
        self.given_back -= tags
        return web.json_response(None)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _rename(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.version})

    async def _check(self, request: web.Request) -> web.Response:
        self.checks.append("paused" if self.paused else "running")
        return web.json_response({"success": True, "message": "", "ranks": [], "per_engine_checksum": self.checksum})

    async def _info(self, request: web.Request) -> web.Response:
        info = {
            "model_path": MODEL,
            "is_generation": True,
            "weight_version": self.version,
            "dtype": "float32",
        } | self.info
        return web.Response(text=json.dumps(info), content_type="application/json")


ABORTED = {"type": "abort", "message": "Aborted"}


def _reason(ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
    if len(ids) >= params["max_new_tokens"]:
        return {"type": "length", "length": len(ids)}
    return {"type": "stop", "matched": ids[-1] if ids else None}


@asynccontextmanager
async def serving(engine: ScriptedEngine, port: int = 0) -> AsyncIterator[ScriptedEngine]:
    """Serve the engine on a port during the block."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the router tries HTTP/2 first
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
