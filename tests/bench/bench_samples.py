"""CPU of a rollout actor's process per token of streamed answers, from the bytes of an engine to stored segments.

A scripted engine in a process of its own streams answers in chunks. This process reads them with the client of the
rollout actor, takes a segment at each spill and encodes it for the bus. Only its own CPU time counts. Prints
microseconds per token by part, and bytes held per token.

Run: python -m tests.bench.bench_samples
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import sys
import time
import tracemalloc
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import numpy as np
import uvloop
from aiohttp import web

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.checks import ExpectedAnswer
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.reading import AnswerReader
from messages import Int32Array, SampleKey, SegmentsPublished
from messages.codec import encode

CHUNK = 64  # tokens
VOCABULARY = 151_936
LABEL = "1@engine.policy.0.0123abcd.1"
KEY = SampleKey(group_id=0, attempt=0, index=0)
PROMPT = Int32Array(range(100))


def events_of(num_tokens: int, *, cumulative: bool = False) -> list[bytes]:
    """The events of one streamed answer, as SGLang writes them."""
    numbers = np.random.default_rng(0)
    ids = numbers.integers(VOCABULARY, size=num_tokens).tolist()
    triples = [
        [log_prob, token, None] for log_prob, token in zip((-numbers.random(num_tokens)).tolist(), ids, strict=True)
    ]
    events: list[bytes] = []
    for start in range(0, num_tokens, CHUNK):
        end = min(start + CHUNK, num_tokens)
        begin = 0 if cumulative else start
        last = end == num_tokens
        meta = {
            "id": "r",
            "finish_reason": {"type": "length", "length": num_tokens} if last else None,
            "prompt_tokens": len(PROMPT),
            "weight_version": LABEL,
            "weight_versions": [{"version": LABEL, "start": 0, "end": num_tokens}] if last else None,
            "total_retractions": 0,
            "output_token_logprobs": triples[begin:end],
            "completion_tokens": end,
            "cached_tokens": 0,
            "dp_rank": None,
        }
        answer = {"text": "word" * (end - begin), "output_ids": ids[begin:end], "meta_info": meta}
        events.append(json.dumps(answer, separators=(",", ":")).encode())
    return events


def reader_of(buffer: SampleBuffer, num_tokens: int) -> AnswerReader:
    return AnswerReader(buffer, ExpectedAnswer("r", len(PROMPT), num_tokens, VOCABULARY), sent_under=1)


def spill(buffer: SampleBuffer) -> int:
    """Encode the new tokens as a message of the data plane; return its bytes."""
    segment = buffer.take(KEY, PROMPT)
    return len(encode(SegmentsPublished(group_id=0, attempt=0, lease="lease", segments=(segment,))))


def us_per_token(seconds: float, num_tokens: int) -> float:
    return round(1e6 * seconds / num_tokens, 3)


def reading(num_tokens: int, spills: int, *, cumulative: bool = False) -> float:
    """CPU of decoding, checking, storing and spilling alone, in microseconds per token."""
    events = events_of(num_tokens, cumulative=cumulative)
    every = max(1, len(events) // max(1, spills))
    began = time.process_time()
    buffer = SampleBuffer()
    reader = reader_of(buffer, num_tokens)
    for number, event in enumerate(events, 1):
        reader.add_chunk(event)
        if spills and number % every == 0:
            spill(buffer)
    took = time.process_time() - began
    assert reader.ended
    assert buffer.num_tokens == num_tokens
    return us_per_token(took, num_tokens)


def held(num_tokens: int) -> float:
    """Bytes held per token of one sample."""
    events = events_of(num_tokens)
    gc.collect()
    tracemalloc.start()
    buffer = SampleBuffer()
    reader = reader_of(buffer, num_tokens)
    for event in events:
        reader.add_chunk(event)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(size / num_tokens, 1)


def engine(events: list[bytes], connection: Connection) -> None:
    """Answer each request with the same stream, an event at a time. Runs in a process of its own."""
    chunks = [b"data: " + event + b"\n\n" for event in (*events, b"[DONE]")]

    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0)  # other streams go on
        return response

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(serve())


async def over_http(port: int, num_tokens: int, streams: int, spills: int) -> float:
    """CPU of this process per token with concurrent streams over HTTP, in microseconds."""
    every = max(1, num_tokens // CHUNK // max(1, spills)) * CHUNK
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = SglangClient(session)
        body: dict[str, Any] = {"rid": "r", "input_ids": PROMPT.tolist()}

        async def ask() -> None:
            buffer = SampleBuffer()
            reader = reader_of(buffer, num_tokens)
            add = reader.add_chunk

            def add_and_spill(data: bytes) -> None:
                add(data)
                if spills and buffer.num_tokens % every == 0:
                    spill(buffer)

            reader.add_chunk = add_and_spill
            await client.stream(f"http://127.0.0.1:{port}", body, reader)
            assert buffer.num_tokens == num_tokens

        began = time.process_time()
        await asyncio.gather(*(ask() for _ in range(streams)))
        return us_per_token(time.process_time() - began, num_tokens * streams)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of an answer")
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--spills", type=int, default=60, help="of each sample")
    args = parser.parse_args(argv)
    results: dict[str, Any] = {
        "reading_us_per_token": min(reading(args.tokens, 0) for _ in range(3)),
        "reading_and_spills_us_per_token": min(reading(args.tokens, args.spills) for _ in range(3)),
        "cumulative_us_per_token": reading(args.tokens // 8, args.spills, cumulative=True),
        "held_bytes_per_token": held(args.tokens),
    }
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(events_of(args.tokens), theirs), daemon=True)
    process.start()
    try:
        results["http_us_per_token"] = uvloop.run(over_http(ours.recv(), args.tokens, args.streams, args.spills))
    finally:
        process.terminate()
        process.join(10)
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
