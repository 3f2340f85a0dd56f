"""A scripted engine as a simulated process, and the HTTP session through which a simulated rollout actor reaches it."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tests.simulate.loop import Process, VirtualLoop
from tests.support.scripted_engine import ABORTED, ScriptedEngine

LATENCY_S: Final = 0.001
TOKEN_S: Final = (0.002, 0.02)
UPDATE_S: Final = (0.01, 0.5)


class _Request:
    """What the scripted engine reads of a request."""

    transport = None

    def __init__(self, path: str, headers: dict[str, str], data: bytes | None) -> None:
        self.path = path
        self.headers = CIMultiDict(headers)
        self._data = data

    async def json(self) -> Any:
        return json.loads(self._data or b"null")


class Response:
    """A response that arrives in parts."""

    def __init__(self) -> None:
        self.status = 0
        self.content = self
        self._parts: deque[bytes] = deque()
        self._is_over = False
        self._is_broken = False
        self._changed = asyncio.Event()
        self.deadline = 0.0

    def put(self, part: bytes) -> None:
        self._parts.append(part)
        self._changed.set()

    def end(self, *, broken: bool = False) -> None:
        """Nothing follows; `broken`: the connection was lost."""
        self._is_over, self._is_broken = True, self._is_broken or broken
        self._changed.set()

    async def head(self) -> None:
        """Wait for the status."""
        async with asyncio.timeout_at(self.deadline):
            while not self.status:
                if self._is_over:
                    raise aiohttp.ServerDisconnectedError
                self._changed.clear()
                await self._changed.wait()

    async def iter_any(self) -> AsyncIterator[bytes]:
        while True:
            while self._parts:
                yield self._parts.popleft()
            if self._is_broken:
                raise aiohttp.ClientPayloadError("the connection was lost")
            if self._is_over:
                return
            self._changed.clear()
            async with asyncio.timeout_at(self.deadline):
                await self._changed.wait()

    def _read_nowait(self, _n: int) -> bytes:
        parts = b"".join(self._parts)
        self._parts.clear()
        return parts


class SimulatedEngine(ScriptedEngine):
    """One engine process: answers at chance, takes its time, and may die."""

    def __init__(self, loop: VirtualLoop, name: str, url: str, random: Random, log_prob_of: Any) -> None:
        super().__init__()
        self.url = url
        self.process = Process(loop, name)
        self._random = random
        self._log_prob_of = log_prob_of  # of the weights of a directory
        self._handlers = {
            (route.method, route.resource.canonical): route.handler
            for route in self.app().router.routes()
            if route.resource is not None
        }
        self._responses: dict[Response, None] = {}
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._rids: dict[str, bool] = {}  # running requests, and whether each was aborted

    def broken(self) -> None:
        """Have clients lose their connections: the process was killed."""
        for response in tuple(self._responses):
            response.end(broken=True)
        self._responses.clear()

    def begin(self, method: str, path: str, headers: dict[str, str], data: bytes | None, response: Response) -> None:
        """Answer a request."""
        self._responses[response] = None
        self.process.start(self._respond(method, path.partition("?")[0], headers, data, response))

    async def _respond(
        self, method: str, path: str, headers: dict[str, str], data: bytes | None, response: Response
    ) -> None:
        await asyncio.sleep(LATENCY_S * self._random.random())
        request: Any = _Request(path, headers, data)
        if path == "/generate":
            await self._answer_generate(await request.json(), response)
        else:
            handler = self._handlers[method, path]
            answer = await handler(request)
            assert isinstance(answer, web.Response)
            response.status = answer.status
            body = answer.body
            response.put(body if isinstance(body, bytes) else b"")
        response.end()
        self._responses.pop(response, None)

    async def _answer_generate(self, body: dict[str, Any], response: Response) -> None:
        if body["sampling_params"]["max_new_tokens"] == 0:
            answer = await self._probe(body)
            response.status = 200
            response.put(answer.body if isinstance(answer.body, bytes) else b"")
            return
        prompts = body["input_ids"]
        if not body.get("stream"):
            many = isinstance(prompts[0], list)
            rids = [f"{body['rid']}_{index}" for index in range(len(prompts))] if many else [body["rid"]]
            runs = [self._run(rid, body["sampling_params"], None) for rid in rids]
            answers = await asyncio.gather(*runs)
            response.status = 200
            response.put(json.dumps(answers if many else answers[0]).encode())
            return
        response.status = 200
        response.put(b"")
        last = await self._run(body["rid"], body["sampling_params"], response)
        response.put(b"data: " + json.dumps(last).encode() + b"\n\n")
        response.put(b"data: [DONE]\n\n")

    async def _run(self, rid: str, params: dict[str, Any], response: Response | None) -> dict[str, Any]:
        """Sample one response; return the last answer."""
        most: int = params["max_new_tokens"]
        length = min(most, self._random.randint(1, most + 2))
        ids: list[int] = []
        labels: list[str] = []
        self._rids[rid] = False
        try:
            while len(ids) < length and not self._rids[rid]:
                low, high = TOKEN_S
                await asyncio.sleep(low + (high - low) * self._random.random())
                while self.paused and not self._rids[rid]:
                    await self._goes_on.wait()
                if self._rids[rid]:
                    break
                ids.append(self._random.randint(1, 9))
                labels.append(self.version)
                if response is not None and len(ids) % self.stream_every == 0 and len(ids) < length:
                    event = self._event(rid, list(ids), None, 0)
                    response.put(b"data: " + json.dumps(event).encode() + b"\n\n")
            is_aborted = self._rids[rid]
        finally:
            del self._rids[rid]
        whole = (
            {"type": "length", "length": len(ids)}
            if len(ids) >= most
            else {"type": "stop", "matched": ids[-1] if ids else None}
        )
        answer = self._whole(rid, ids, ABORTED if is_aborted else whole)
        answer["meta_info"]["weight_versions"] = _spans(labels)
        return answer

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid = body.get("rid", "")
        for known in self._rids:
            if body.get("abort_all") or known == rid or known.startswith(f"{rid}_"):
                self._rids[known] = True
        self._goes_on.set()
        if self.paused:
            self._goes_on = asyncio.Event()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        if not self.paused:
            self.paused = True
            self._goes_on = asyncio.Event()
        if mode == "abort":
            for rid in self._rids:
                self._rids[rid] = True
            self._goes_on.set()
            self._goes_on = asyncio.Event()
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.paused = False
        self._goes_on.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        low, high = UPDATE_S
        await asyncio.sleep(low + (high - low) * self._random.random())
        self.version = body["weight_version"]
        self.updates.append(body["model_path"])
        self.checksum, self.prompt_log_prob = self._log_prob_of(body["model_path"])
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, label in enumerate(labels):
        if spans and spans[-1]["version"] == label:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": label, "start": place, "end": place + 1})
    return spans


class Session:
    """In place of aiohttp's session: reaches the engines of a simulation by their URLs."""

    def __init__(self, engines: dict[str, SimulatedEngine]) -> None:
        self._engines = engines

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to close."""

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, data: bytes | None, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[Response]:
        """Send a request, and yield the response once its head is there."""
        await asyncio.sleep(0)
        base, slash, path = url.removeprefix("http://").partition("/")
        engine = self._engines.get(f"http://{base}")
        if engine is None or engine.process.is_dead:
            raise aiohttp.ClientConnectionError(f"nothing listens at {base}")
        response = Response()
        response.deadline = asyncio.get_running_loop().time() + (timeout.total or 1e9)
        engine.begin(method, slash + path, headers, data, response)
        await response.head()
        yield response
