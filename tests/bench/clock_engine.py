"""An engine with a token clock and no model: SGLang's HTTP API, where only token steps take time.

A step takes a + b n seconds for n running samples and gives each of them one token. How long a response becomes is
drawn for its prompt and sample, and is the same whenever and wherever it is generated, in one piece or in several. A
prompt is a number in digits of the laptop's tokenizer; every response token is the same one, which no prompt ends with,
so what an earlier attempt left of a response is seen in the request. Prefill and weight updates take no time.

Run: python -m tests.bench.clock_engine PORT --base-s 0.004 --per-sample-s 0.0001 --slots 128 --mean 48 --cap 384
"""

import argparse
import asyncio
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from tests.bench.long_tail import Clock, Lengths

MODEL = str(Path(__file__).parents[2] / "topologies/demo/models/reverse-digits")  # the router looks for its tokenizer
DIGIT_ZERO = 6  # its token; the other digits follow
TOKEN, TEXT = 5, "}"  # what every response is made of
LOG_PROB = -0.5
STREAM_INTERVAL = 64  # tokens between two parts of a streamed answer, unless the request says


class SamplingParams(msgspec.Struct):
    """What is looked at of sampling_params."""

    max_new_tokens: int
    stream_interval: int = STREAM_INTERVAL


class GenerateBody(msgspec.Struct):
    """What is looked at of a request: one prompt, with what was generated of its response before."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False


class ControlBody(msgspec.Struct):
    """What is looked at of the other calls."""

    rid: str = ""
    abort_all: bool = False
    weight_version: str = ""
    mode: str = "abort"


@dataclass(eq=False)
class Running:
    """A request at work, or waiting for a slot."""

    rid: str
    left: int  # tokens until it stops by itself
    limit: int  # tokens that it may get
    interval: int  # tokens between two parts, where streamed
    num_tokens: int = 0
    spans: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])  # version, first token
    finish: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self, version: str) -> None:
        """Get one token."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, self.num_tokens))
        self.num_tokens += 1
        if self.num_tokens >= self.left:
            self.end("stop")
        elif self.num_tokens >= self.limit:
            self.end("length")
        elif self.num_tokens % self.interval == 0:
            self.changed.set()

    def end(self, reason: str) -> None:
        self.finish = reason
        self.changed.set()

    def answer(self, version: str) -> dict[str, Any]:
        """All that it has so far, as SGLang says it."""
        ends = [start for _, start in self.spans[1:]] + [self.num_tokens]
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": None if self.finish is None else {"type": self.finish, "length": self.num_tokens},
            "completion_tokens": self.num_tokens,
            "weight_version": version,
            "output_token_logprobs": [(LOG_PROB, TOKEN, None)] * self.num_tokens,
        }
        if self.finish is not None:
            meta["weight_versions"] = [
                {"version": name, "start": start, "end": end}
                for (name, start), end in zip(self.spans, ends, strict=False)
            ]
        return {"text": TEXT * self.num_tokens, "output_ids": [TOKEN] * self.num_tokens, "meta_info": meta}


class ClockEngine:
    """The running samples and the clock that gives them tokens."""

    def __init__(self, clock: Clock, lengths: Lengths) -> None:
        self._clock = clock
        self._lengths = lengths
        self._requests: dict[str, Running] = {}  # in order of arrival
        self._version = "0"
        self._paused = False
        self._draining = 0  # weight updates that wait for the running samples
        self._changed = asyncio.Condition()
        self._generate_body = msgspec.json.Decoder(GenerateBody)
        self._control_body = msgspec.json.Decoder(ControlBody)
        self._num_tokens = 0  # generated
        self._busy_s = 0.0  # token steps together, as the clock has them
        self._late_s = 0.0  # what the machine added to them

    async def run(self) -> None:
        """Give tokens, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            async with self._changed:
                await self._changed.wait_for(self._active)
            begun = due = loop.time()
            while running := self._active():
                step_s = self._clock.step_s(len(running))
                due += step_s
                await asyncio.sleep(due - loop.time())  # what came late is made up for by the next steps
                self._busy_s += step_s
                for request in running:
                    if request.finish is None:
                        request.advance(self._version)
                        self._num_tokens += 1
                if any(request.finish for request in running):
                    await self._collect()
            self._late_s += loop.time() - max(begun, due)

    def _active(self) -> list[Running]:
        """Those that get a token at the next step: the first that fit the slots."""
        if self._paused:
            return []
        return list(self._requests.values())[: self._clock.slots] if not self._draining else self._started()

    def _started(self) -> list[Running]:
        return [request for request in self._requests.values() if request.num_tokens]

    async def _collect(self) -> None:
        """Forget what has ended, and let those know who wait for it."""
        self._requests = {rid: request for rid, request in self._requests.items() if request.finish is None}
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every endpoint."""
        body = await request.read()
        match request.path:
            case "/generate":
                return await self._generate(request, self._generate_body.decode(body))
            case "/abort_request" | "/pause_generation" | "/continue_generation" | "/update_weights_from_disk":
                await self._control(request.path, self._control_body.decode(body or b"{}"))
                answer: dict[str, Any] = {"success": True, "message": "", "num_paused_requests": 0}
            case "/weights_checker":
                answer = {"success": True, "message": "", "ranks": [], "per_engine_checksum": "sum"}
            case "/clock":
                answer = {"num_tokens": self._num_tokens, "busy_s": self._busy_s, "late_s": self._late_s}
            case _:
                answer = {"model_path": MODEL, "is_generation": True, "weight_version": self._version}
        return _json(answer)

    async def _control(self, path: str, body: ControlBody) -> None:
        match path:
            case "/abort_request":
                await self._abort([*self._requests] if body.abort_all else [body.rid])
            case "/pause_generation":
                self._paused = True
                if body.mode == "abort":
                    await self._abort([*self._requests])
            case "/continue_generation":
                self._paused = False
            case _:
                await self._update(body.weight_version)
        await self._notify()

    async def _abort(self, rids: list[str]) -> None:
        for rid in rids:
            if rid in self._requests:
                self._requests[rid].end("abort")
        await self._collect()

    async def _update(self, version: str) -> None:
        """Take new weights: at once while paused, otherwise once no sample is half generated."""
        self._draining += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._paused or not self._started())
            self._version = version
        finally:
            self._draining -= 1

    async def _generate(self, request: web.BaseRequest, body: GenerateBody) -> web.StreamResponse:
        running = self._running(body)
        if body.rid in self._requests:
            return _json({"error": {"message": f"{body.rid} is running"}}, status=400)
        self._requests[body.rid] = running
        await self._notify()
        if not body.stream:
            while running.finish is None:
                await _next_change(running)
            return _json(running.answer(self._version))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await _next_change(running)
            await response.write(b"data: " + msgspec.json.encode(running.answer(self._version)) + b"\n\n")
            if running.finish is not None:
                await response.write(b"data: [DONE]\n\n")
                return response

    def _running(self, body: GenerateBody) -> Running:
        ids = body.input_ids
        num_prompt = next(n for n in range(len(ids), 0, -1) if ids[n - 1] != TOKEN)
        prompt = int("".join(str(token - DIGIT_ZERO) for token in ids[:num_prompt]))
        index = int(body.rid.split("-")[1])  # rollout actors call a request <lease>-<index of the sample>-...
        left = self._lengths.of(prompt, index) - (len(ids) - num_prompt)
        return Running(body.rid, left, body.sampling_params.max_new_tokens, body.sampling_params.stream_interval)


async def _next_change(running: Running) -> None:
    await running.changed.wait()
    running.changed.clear()


def _json(answer: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json", status=status)


async def serve(port: int, engine: ClockEngine) -> None:
    """Listen until the process is ended."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the router greets in HTTP/2 first
    runner = web.ServerRunner(web.Server(engine.handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await engine.run()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--base-s", type=float, required=True, help="a")
    parser.add_argument("--per-sample-s", type=float, required=True, help="b")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--mean", type=float, required=True, help="response tokens, before the cap")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log of the length")
    parser.add_argument("--cap", type=int, required=True, help="response tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    clock = Clock(args.base_s, args.per_sample_s, args.slots)
    uvloop.run(serve(args.port, ClockEngine(clock, Lengths(args.mean, args.sigma, args.cap, args.seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
