"""Tokens per second of the tiny engine: alone, over HTTP one request per sample or per group, behind the router.

One tiny Qwen3 with drawn weights, 16-token prompts, 64-token responses, 64 samples in flight, everything in one run.
`router_long` and `router_streamed`: responses of 448 tokens, whole, and in chunks of 64 as a rollout actor wants them.
`real`: the shapes of SmolLM2-135M with drawn weights, 16 prompts of 29 tokens x 8 samples of 8 tokens, with prefill.
Prints JSON. `per_cpu_s` divides by the CPU seconds of the engine process, `ratio` compares that with the slots alone.

Run: python -m tests.bench.bench_engine
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import uvloop

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.processes import STREAM_INTERVAL
from actors.rollout.sglang.reading import AnswerReader
from runtime.node.supervisor.ports import free_port
from tests.support.tiny_engine import SMOLLM2, running_engine, running_router, write_config

PROMPT, RESPONSE, IN_FLIGHT, GROUP = 16, 64, 64, 8  # tokens, tokens, samples, samples per prompt
LONG = 448  # tokens of a response that is streamed
VOCABULARY = 64
REAL_PROMPTS, REAL_PROMPT, REAL_RESPONSE = 16, 29, 8  # prompts, tokens, tokens


@dataclass
class Measured:
    """Tokens generated, and the seconds that took: wall, and CPU of the engine process."""

    num_tokens: int
    wall_s: float
    cpu_s: float

    def as_dict(self, reference: "Measured | None") -> dict[str, float]:
        numbers = {"per_s": self.num_tokens / self.wall_s, "per_cpu_s": self.num_tokens / self.cpu_s}
        if reference is not None:
            numbers["ratio"] = numbers["per_cpu_s"] / (reference.num_tokens / reference.cpu_s)
        return {name: round(value, 3 if name == "ratio" else 0) for name, value in numbers.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement")
    parser.add_argument("--real-rounds", type=int, default=3, help="of the real shapes; 0 leaves them out")
    parser.add_argument("--no-router", action="store_true", help="leave the router out")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as engines have it; read when torch is imported
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_config(directory, hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=VOCABULARY)
        alone = slots_alone(directory, args.seconds)
        results: dict[str, Any] = {"slots_alone": alone.as_dict(None)}
        routed = not args.no_router and importlib.util.find_spec("sglang_router") is not None
        for name, measured in uvloop.run(over_http(directory, args.seconds, routed=routed)).items():
            results[name] = measured.as_dict(alone)
        if args.real_rounds:
            results["real"] = real_shapes(directory / "real", args.real_rounds)
    print(json.dumps(results, indent=2))
    return 0


def slots_alone(directory: Path, seconds: float) -> Measured:
    """Drive the scheduler without a thread or a server, always with IN_FLIGHT requests."""
    import torch

    from actors.tiny_engine.engine import core, requests
    from runtime.models.config import read_model

    torch.set_num_threads(1)
    numbers = iter(range(1_000_000_000))

    def fresh() -> requests.Request:
        number = next(numbers)
        stopping = requests.Stopping(limit=RESPONSE)
        prompt = prompt_of(number)
        return requests.Request(str(number), prompt, requests.Sampling(), stopping, seed=number)

    settings = core.Settings(IN_FLIGHT, 512, None, 0, dummy=True, weight_version="0")
    with torch.inference_mode():
        scheduler = core.Core(directory, read_model(directory), settings).scheduler

        def generate(until: float) -> None:
            while time.perf_counter() < until:
                missing = IN_FLIGHT - len(scheduler.slots.requests) - len(scheduler.waiting)
                scheduler.submit([fresh() for _ in range(missing)])
                scheduler.step()
                scheduler.take_reports()

        generate(time.perf_counter() + 0.5)
        before, wall, cpu = scheduler.num_generated, time.perf_counter(), time.thread_time()
        generate(wall + seconds)
        return Measured(scheduler.num_generated - before, time.perf_counter() - wall, time.thread_time() - cpu)


def real_shapes(directory: Path, num_rounds: int) -> dict[str, dict[str, float]]:
    """Generate with a real model's shapes, in each dtype and number of threads."""
    write_config(directory, **SMOLLM2, initializer_range=0.02)
    cores = len(os.sched_getaffinity(0))
    results: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16"):
        for num_threads in sorted({1, cores}):
            measured = real_rounds(directory, dtype, num_threads, num_rounds)
            results[f"{dtype}, {num_threads} threads"] = measured.as_dict(None)
    return results


def real_rounds(
    directory: Path, dtype: str, num_threads: int, num_rounds: int, *, prompt: int = REAL_PROMPT
) -> Measured:
    """Generate all samples of all prompts, round after round; the first one warms up."""
    import torch

    from actors.tiny_engine.engine import core, requests
    from runtime.models.config import read_model

    torch.set_num_threads(num_threads)
    settings = core.Settings(IN_FLIGHT, 512, None, 0, dummy=True, weight_version="0", dtype=dtype)
    stopping = requests.Stopping(limit=REAL_RESPONSE)
    before, wall, cpu = 0, 0.0, 0.0
    with torch.inference_mode():
        scheduler = core.Core(directory, read_model(directory), settings).scheduler
        for number in range(num_rounds + 1):
            if number == 1:
                before, wall, cpu = scheduler.num_generated, time.perf_counter(), time.process_time()
            for which in range(REAL_PROMPTS):
                ids = [(number * 7919 + which * 131 + place) % SMOLLM2["vocab_size"] for place in range(prompt)]
                group = [
                    requests.Request(f"{number}.{which}.{index}", list(ids), requests.Sampling(), stopping, seed=index)
                    for index in range(GROUP)
                ]
                scheduler.submit(group)
            while not scheduler.idle:
                scheduler.step()
            scheduler.take_reports()
    num_tokens = scheduler.num_generated - before
    return Measured(num_tokens, time.perf_counter() - wall, time.process_time() - cpu)


async def over_http(directory: Path, seconds: float, *, routed: bool) -> dict[str, Measured]:
    results: dict[str, Measured] = {}
    flags = ("--stream-interval", str(STREAM_INTERVAL), "--incremental-streaming-output")
    with running_engine(directory, "--load-format", "dummy", "--context-length", "512", *flags) as engine:
        for name, group in (("http_direct", 1), ("http_batched", GROUP)):
            results[name] = await load(engine.url, engine.process.pid, seconds, group)
        if routed:
            with router_before(engine.url) as url:
                for name, group in (("router", 1), ("router_batched", GROUP)):
                    results[name] = await load(url, engine.process.pid, seconds, group)
                for name, stream in (("router_long", False), ("router_streamed", True)):
                    results[name] = await load(url, engine.process.pid, seconds, 1, length=LONG, stream=stream)
    return results


@contextlib.contextmanager
def router_before(engine_url: str) -> Iterator[str]:
    with running_router(free_port(), engine_url) as url:
        yield url


async def load(
    url: str, pid: int, seconds: float, group: int, *, length: int = RESPONSE, stream: bool = False
) -> Measured:
    """Keep IN_FLIGHT samples in flight for a while, `group` of them per request."""
    body = {
        "sampling_params": {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "stream": stream,
    }
    async with client() as session:

        async def generate(until: float) -> int:
            counts = [worker(session, url, body, until, group, index) for index in range(IN_FLIGHT // group)]
            return sum(await asyncio.gather(*counts))

        await generate(time.perf_counter() + 0.5)
        process = psutil.Process(pid)
        wall, cpu = time.perf_counter(), cpu_seconds(process)
        num_tokens = await generate(wall + seconds)
        return Measured(num_tokens, time.perf_counter() - wall, cpu_seconds(process) - cpu)


async def worker(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], until: float, group: int, index: int
) -> int:
    num_tokens = 0
    while time.perf_counter() < until:
        index += IN_FLIGHT
        prompt = prompt_of(index)
        ids = prompt if group == 1 else [prompt] * group
        data = msgspec.json.encode(body | {"input_ids": ids, "rid": f"{index}.{group}"})
        async with session.post(f"{url}/generate", data=data, headers={"Content-Type": "application/json"}) as response:
            data = await response.read()
            response.raise_for_status()
        if body["stream"]:
            num_tokens += streamed_tokens(data)
            continue
        answer = msgspec.json.decode(data)
        for sample in answer if group > 1 else [answer]:
            num_tokens += len(sample["output_ids"])
    return num_tokens


def streamed_tokens(data: bytes) -> int:
    """Put a stream together, as a rollout actor does."""
    reader = AnswerReader(SampleBuffer())
    for event in data.split(b"\n\n")[:-2]:  # after the last ones: [DONE], and nothing
        reader.add_chunk(event.removeprefix(b"data: "))
    return reader.num_tokens


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=2 * IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def prompt_of(number: int) -> list[int]:
    return [(number * 7 + position) % VOCABULARY for position in range(PROMPT)]


if __name__ == "__main__":
    sys.exit(main())
