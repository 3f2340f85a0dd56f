"""Proxy between a rollout actor and an engine that forwards everything and corrupts answers to some /generate calls.

A function of the request's body chooses whether and how to corrupt an answer. The engine's original answer is kept for
comparison. odd_answers.py has the kinds of corruption.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web

DONE: Final = b"data: [DONE]\n\n"
JSON: Final = "application/json"
SSE: Final = "text/event-stream"


class Truth(NamedTuple):
    """An engine's original answer: chunks of a stream, members of a batch, or one answer."""

    parts: list[dict[str, Any]]
    streamed: bool
    batch: bool

    def encoded(self, parts: Sequence[dict[str, Any]] | None = None) -> list[bytes]:
        """Encode the answer in its original form, or the given parts in place of its own."""
        parts = self.parts if parts is None else parts
        if self.streamed:
            return [*(event_of(part) for part in parts), DONE]
        return [json.dumps(list(parts) if self.batch else parts[0]).encode()]


class Spoiled(NamedTuple):
    """A corrupted answer."""

    written: Sequence[bytes] = ()  # written one after another
    status: int = 200
    headers: dict[str, str] = {}
    pause_s: float = 0.0  # seconds between two writes
    breaks: bool = False  # closes the connection after the last write, without a proper end
    hangs: bool = False  # sends nothing after the last write, and no end


Spoil = Callable[[Truth], Spoiled]


class Case(NamedTuple):
    """One way to corrupt an answer."""

    name: str
    spoil: Spoil
    legal: bool = False  # unusual but valid: clients must accept it
    streamed: bool = True  # applies to streams
    whole: bool = True  # applies to complete answers
    asks: bool = True  # the request is forwarded to the engine all the same


def event_of(part: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(part).encode() + b"\n\n"


@dataclass
class Proxy:
    """A proxy in front of one engine.

    Args:
        engine: URL of the engine.
        choose: Chooses how to corrupt the answer to a /generate call, by its body. None: not at all.
    """

    engine: str
    choose: Callable[[dict[str, Any]], Case | None]
    url: str = ""
    hangs_probes: bool = False  # /generate calls for no new token get no answer
    num_calls: int = 0  # /generate calls for new tokens
    spoiled: Counter[str] = field(default_factory=Counter[str])  # by name of the case
    spoiled_as: dict[str, str] = field(default_factory=dict[str, str])  # name of the case, by request id
    truths: dict[str, Truth] = field(default_factory=dict[str, Truth])  # by request id
    aborts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _session: aiohttp.ClientSession | None = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def _hand_on(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.path == "/abort_request":
            self.aborts.append(json.loads(data))
        if request.path == "/generate":
            body = json.loads(data)
            if body["sampling_params"]["max_new_tokens"] > 0:
                self.num_calls += 1
                case = self.choose(body)
                if case is not None:
                    self.spoiled[case.name] += 1
                    self.spoiled_as[body["rid"]] = case.name
                    return await self._spoil(request, data, body, case)
            elif self.hangs_probes:
                await self._over.wait()
        assert self._session is not None
        async with self._session.request(request.method, self.engine + request.path_qs, data=data) as answer:
            if request.path == "/generate":
                return await self._pass(request, answer, json.loads(data))
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    async def _pass(
        self, request: web.Request, answer: aiohttp.ClientResponse, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        read = bytearray()
        try:
            async for chunk in answer.content.iter_any():
                read += chunk
                if read.endswith(DONE):  # the client ends here
                    self._note(bytes(read), answer.status, body)
                await response.write(chunk)
        finally:  # the client may use what it received before it disconnected
            if body.get("stream") or answer.content.at_eof():
                self._note(bytes(read), answer.status, body)
        return response

    async def _spoil(self, request: web.Request, data: bytes, body: dict[str, Any], case: Case) -> web.StreamResponse:
        truth = Truth([], bool(body.get("stream")), isinstance(body["input_ids"][0], list))
        if case.asks:
            assert self._session is not None
            async with self._session.post(self.engine + "/generate", data=data) as answer:
                read, status = await answer.read(), answer.status
            self._note(read, status, body)
            truth = self.truths.get(body["rid"], truth)
            if not truth.parts:  # refused or aborted: nothing to corrupt
                return web.Response(body=read, status=status, content_type=answer.content_type)
        spoiled = case.spoil(truth)
        headers = {"Content-Type": SSE if truth.streamed else JSON, **spoiled.headers}
        response = web.StreamResponse(status=spoiled.status, headers=headers)
        if spoiled.written or not spoiled.hangs:
            await response.prepare(request)
        for index, part in enumerate(spoiled.written):
            if index and spoiled.pause_s:
                await asyncio.sleep(spoiled.pause_s)  # the delay is the subject of the case
            await response.write(part)
        if spoiled.hangs:
            await self._over.wait()
        if (spoiled.breaks or spoiled.hangs) and request.transport is not None:
            request.transport.close()
        return response

    def _note(self, read: bytes, status: int, body: dict[str, Any]) -> None:
        if status != 200:
            return
        streamed, batch = bool(body.get("stream")), isinstance(body["input_ids"][0], list)
        if streamed:
            complete = read.split(b"\n\n")[:-1]
            events = [event.removeprefix(b"data: ") for event in complete]
            parts = [json.loads(event) for event in events if event != b"[DONE]" and not event.startswith(b'{"error"')]
        else:
            decoded = json.loads(read)
            parts = decoded if batch else [decoded]
        self.truths[body["rid"]] = Truth(parts, streamed, batch)


@asynccontextmanager
async def spoiling(engine: str, choose: Callable[[dict[str, Any]], Case | None]) -> AsyncGenerator[Proxy]:
    """Run a proxy on a port during the block."""
    proxy = Proxy(engine, choose)
    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", proxy._hand_on)  # pyright: ignore[reportPrivateUsage]
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": JSON}
    ) as session:
        proxy._session = session  # pyright: ignore[reportPrivateUsage]
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            proxy.url = f"http://{host}:{port}"
            yield proxy
        finally:
            proxy._over.set()  # pyright: ignore[reportPrivateUsage]
            await runner.cleanup()
