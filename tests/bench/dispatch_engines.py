"""Many scripted engines in one process: SGLang's HTTP API with answers that cost next to nothing to make.

How a batch behaves: an engine advances all its running requests together, CHUNK tokens at a time. A stride takes
CHUNK (a + b n) seconds for n running requests; then each of them has CHUNK tokens more and sends them in a chunk of its
own. A request over the slots waits in the engine's queue, first come first served, and takes a slot that is free at the
beginning of a stride. So lengths are multiples of CHUNK. Prefill and weight updates take no time.

A prompt is a number in digits; the length of a response is drawn for it and the index of its sample, and what an
earlier attempt left of it counts. `GET /counters` on any port returns the counters of all engines.

Run: python -m tests.bench.dispatch_engines --ports 9001,9002 --base-ms 10 --per-request-ms 0.1 --slots 32 --mean 4096
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import msgspec
import uvloop
from aiohttp import web

from tests.bench.long_tail import Clock, Lengths
from tests.bench.zero_engine import MODEL

CHUNK: Final = 64  # tokens
TOKEN: Final = 5  # all that a response is made of; no prompt has it
DIGIT_ZERO: Final = 6  # its token; the other digits follow
_TRIPLES = b",".join([b"[-0.5,%d,null]" % TOKEN] * CHUNK)
_IDS = b",".join([b"%d" % TOKEN] * CHUNK)
_EVENT = b'data: {"text":"%b","output_ids":[%b],"meta_info":{"id":"%b","finish_reason":%b,"completion_tokens":%d,'
_META = b'"weight_version":"%b","output_token_logprobs":[%b]%b}}\n\n'


class Sampling(msgspec.Struct):
    """What is looked at of sampling_params."""

    max_new_tokens: int


class GenerateBody(msgspec.Struct):
    """What is looked at of a request for one sample."""

    rid: str
    input_ids: list[int]
    sampling_params: Sampling


class ControlBody(msgspec.Struct):
    """What is looked at of the other calls."""

    rid: str = ""
    abort_all: bool = False
    weight_version: str = ""
    mode: str = "abort"


class Counters(msgspec.Struct):
    """Of all engines of the process."""

    posts: dict[str, int]  # by path
    num_tokens: int
    busy_slot_s: float  # slots in use, summed over strides
    num_running: int
    num_queued: int
    updated_at: list[float]  # monotonic time of each engine's newest update
    first_token_at: list[float]  # and of the first chunk of a later request; 0: none yet


@dataclass(eq=False)
class Running:
    """A request at work, or in the queue."""

    rid: bytes
    left: int  # tokens until it ends by itself, a multiple of CHUNK
    response: web.StreamResponse
    begun: float  # monotonic time
    num_tokens: int = 0
    spans: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])  # version, first token
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, version: bytes, num_new: int, reason: bytes = b"null") -> None:
        """Send a chunk; the last one has a reason."""
        if num_new and (not self.spans or self.spans[-1][0] != version):
            self.spans.append((version, self.num_tokens))
        self.num_tokens += num_new
        triples, ids, text = (_TRIPLES, _IDS, b"}" * CHUNK) if num_new else (b"", b"", b"")
        more = b"" if reason == b"null" else b',"weight_versions":%b' % self._versions()
        event = _EVENT % (text, ids, self.rid, reason, self.num_tokens) + _META % (version, triples, more)
        try:
            await self.response.write(event)
            if reason != b"null":
                await self.response.write(b"data: [DONE]\n\n")
                await self.response.write_eof()
        except ConnectionError:  # the caller is gone
            self.left = 0
        if reason != b"null":
            self.ended.set()

    def _versions(self) -> bytes:
        ends = [start for _, start in self.spans[1:]] + [self.num_tokens]
        return msgspec.json.encode(
            [
                {"version": version.decode(), "start": start, "end": end}
                for (version, start), end in zip(self.spans, ends, strict=False)
            ]
        )


class Engine:
    """One engine."""

    def __init__(self, clock: Clock, lengths: Lengths) -> None:
        self._clock, self._lengths = clock, lengths
        self.requests: dict[str, Running] = {}  # in order of arrival
        self.posts = Counter[str]()
        self.version = b"default"
        self.num_tokens = 0
        self.busy_slot_s = 0.0
        self.updated_at = self.first_token_at = 0.0
        self._paused = False
        self._changed = asyncio.Event()
        self._decode, self._decode_control = msgspec.json.Decoder(GenerateBody), msgspec.json.Decoder(ControlBody)

    @property
    def running(self) -> list[Running]:
        return [] if self._paused else list(islice(self.requests.values(), self._clock.slots))

    async def run(self) -> None:
        """Advance the running requests, for ever. A stride that came late is made up for by the next ones."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time()
            while running := self.running:
                stride_s = CHUNK * self._clock.step_s(len(running))
                due += stride_s
                await asyncio.sleep(due - loop.time())
                self.busy_slot_s += stride_s * len(running)
                for request in running:
                    if request.rid.decode() in self.requests and not self._paused:
                        await self._advance(request)
            self._changed.clear()
            await self._changed.wait()

    async def _advance(self, request: Running) -> None:
        request.left -= CHUNK
        self.num_tokens += CHUNK
        if not self.first_token_at and request.begun > self.updated_at:
            self.first_token_at = time.monotonic()
        if request.left <= 0:
            del self.requests[request.rid.decode()]
        await request.send(self.version, CHUNK, b"null" if request.left > 0 else b'{"type":"stop"}')

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every endpoint."""
        body = await request.read()
        if request.method == "POST":
            self.posts[request.path] += 1
        if request.path == "/generate":
            return await self._generate(request, self._decode.decode(body))
        answer: dict[str, Any] = {"success": True, "message": "", "num_paused_requests": 0}
        match request.path:
            case "/abort_request":
                control = self._decode_control.decode(body)
                await self._abort([*self.requests] if control.abort_all else [control.rid])
            case "/pause_generation":
                self._paused = True
                if self._decode_control.decode(body or b"{}").mode == "abort":
                    await self._abort([*self.requests])
            case "/continue_generation":
                self._paused = False
                self._changed.set()
            case "/update_weights_from_disk" | "/update_weight_version":
                self.version = self._decode_control.decode(body).weight_version.encode()
                self.updated_at, self.first_token_at = time.monotonic(), 0.0
            case "/weights_checker":
                answer |= {"ranks": [], "per_engine_checksum": "sum"}
            case "/v1/loads":
                num_running = len(self.running)
                load = {"num_running_reqs": num_running, "num_waiting_reqs": len(self.requests) - num_running}
                answer = {"loads": [{"dp_rank": 0, "token_usage": 0.0, **load}]}
            case _:
                answer = {"model_path": MODEL, "is_generation": True, "weight_version": self.version.decode()}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _generate(self, request: web.BaseRequest, body: GenerateBody) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        running = self.requests[body.rid] = Running(body.rid.encode(), self._left_of(body), response, time.monotonic())
        self._changed.set()
        try:
            await running.ended.wait()
        finally:
            self.requests.pop(body.rid, None)
        return response

    def _left_of(self, body: GenerateBody) -> int:
        """Tokens that the response still gets."""
        num_before = body.input_ids.count(TOKEN)
        digits = (str(token - DIGIT_ZERO) for token in body.input_ids if token != TOKEN)
        index = int(body.rid.split("-")[1])  # rollout actors call a request <lease>-<index of the sample>-...
        whole = self._lengths.of(int("".join(digits)), index)
        limit = min(whole - num_before, body.sampling_params.max_new_tokens)
        return CHUNK * max(1, -(-limit // CHUNK))

    async def _abort(self, rids: list[str]) -> None:
        for rid in rids:
            request = self.requests.pop(rid, None)
            if request is not None:
                await request.send(self.version, 0, b'{"type":"abort","message":""}')


class Engines:
    """All engines of the process."""

    def __init__(self, num: int, clock: Clock, lengths: Lengths) -> None:
        self.all = [Engine(clock, lengths) for _ in range(num)]

    async def handle(self, engine: Engine, request: web.BaseRequest) -> web.StreamResponse:
        """A request to one of them."""
        if request.path != "/counters":
            return await engine.handle(request)
        return web.Response(body=msgspec.json.encode(self.counters()), content_type="application/json")

    def counters(self) -> Counters:
        posts = sum((engine.posts for engine in self.all), Counter[str]())
        running = [len(engine.running) for engine in self.all]
        return Counters(
            posts=dict(posts),
            num_tokens=sum(engine.num_tokens for engine in self.all),
            busy_slot_s=sum(engine.busy_slot_s for engine in self.all),
            num_running=sum(running),
            num_queued=sum(len(engine.requests) for engine in self.all) - sum(running),
            updated_at=[engine.updated_at for engine in self.all],
            first_token_at=[engine.first_token_at for engine in self.all],
        )


async def serve(ports: list[int], clock: Clock, lengths: Lengths) -> None:
    """Serve until the process is ended."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the router greets in HTTP/2 first
    engines = Engines(len(ports), clock, lengths)
    for port, engine in zip(ports, engines.all, strict=True):

        async def handle(request: web.BaseRequest, engine: Engine = engine) -> web.StreamResponse:
            return await engines.handle(engine, request)

        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    async with asyncio.TaskGroup() as group:
        for engine in engines.all:
            group.create_task(engine.run())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", required=True, help="one per engine, with commas between them")
    parser.add_argument("--base-ms", type=float, required=True, help="a")
    parser.add_argument("--per-request-ms", type=float, default=0.0, help="b")
    parser.add_argument("--slots", type=int, required=True, help="of an engine")
    parser.add_argument("--mean", type=float, required=True, help="response tokens, before the cap")
    parser.add_argument("--sigma", type=float, default=0.0, help="of the log of the length")
    parser.add_argument("--cap", type=int, default=32_768, help="response tokens")
    args = parser.parse_args(argv)
    clock = Clock(args.base_ms / 1e3, args.per_request_ms / 1e3, args.slots)
    lengths = Lengths(args.mean, args.sigma, args.cap)
    uvloop.run(serve([int(port) for port in args.ports.split(",")], clock, lengths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
