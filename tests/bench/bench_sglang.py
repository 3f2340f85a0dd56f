"""Tokens per second of SGLang's own server by router and rollout actor, against the same requests sent to it alone.

Server, router, bus and rollout actor are real, in processes of their own, with the arguments of a run. The server
computes on the CPU, with a model whose token step takes 20 ms and more. Each pass generates as many responses of one
length, as many at a time, with the bodies that a rollout actor sends: log-probs, streamed. Passes come in pairs, every
second pair the other way round. Prints JSON; `ratio` is the median of the pairs' ratios.

Run: python -m tests.bench.bench_sglang     (after bin/setup --sglang)
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import msgspec
import psutil

from actors.rollout.sglang.body import generate_body
from messages import GroupCompleted, Int32Array, Prompt, RolloutRequested, SamplingParams, WeightsAnnounced
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.node.supervisor.ports import free_port
from runtime.process.logs import configure_logging
from runtime.settings.load import load_topology
from runtime.settings.processes import with_address
from runtime.settings.topology import Topology, encode_topology
from tests.bench.bench_engine import streamed_tokens
from tests.bench.rig import ROOT, connected, cpu_seconds, difference, processes, rounded, showing_logs, specs_of
from tests.sglang.recipe import RECIPE, overrides
from tests.sglang.server import SGLANG_START_S, TP1, Server, wait_until_up
from tests.support.rollout import grade
from tests.support.running_server import running_server
from tests.support.tiny_engine import wait_until_200
from tests.support.tiny_models import write_model

GOAL: Final = 0.95
PROMPT: Final = 16  # tokens
VOCABULARY: Final = 64
SHAPE: Final = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
GROUP: Final = 4  # samples
PASS_LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class Size:
    """What a pass generates."""

    num_groups: int
    response: int  # tokens
    concurrency: int  # samples in flight

    @property
    def num_tokens(self) -> int:
        return self.num_groups * GROUP * self.response


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--groups", type=int, default=6, help=f"of {GROUP} samples, in a pass")
    parser.add_argument("--response", type=int, default=320, help="tokens of each sample; above 256 they are streamed")
    parser.add_argument("--concurrency", type=int, default=8, help="samples in flight")
    args = parser.parse_args(argv)
    configure_logging("bench", "laptop")
    size = Size(args.groups, args.response, args.concurrency)
    print(json.dumps(rounded(anyio.run(measure, size, args.pairs, backend_options={"use_uvloop": True})), indent=2))
    return 0


async def measure(size: Size, num_pairs: int) -> dict[str, Any]:
    """Figures of all pairs."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        model = write_model(run_dir / "model", tokenizer=True, max_position_embeddings=512, **SHAPE)
        topology = topology_of(size, model)
        (run_dir / TOPOLOGY_FILE).write_bytes(encode_topology(topology))
        async with running_server(run_dir / "bus") as server, connected(server.url, topology) as bus:
            with showing_logs(run_dir), engine(topology, run_dir) as served:
                async with rollout(topology, run_dir, server.url, bus, served.url) as hosts:
                    await bus.publish(
                        WeightsAnnounced(version=1, step=0, incarnation=1, path=str(model), checksum="", size_bytes=0)
                    )
                    watched = {**hosts, "engine": psutil.Process(served.processes[0].pid), "bench": psutil.Process()}
                    return await pairs_of(Passes(bus, served.url, size), num_pairs, watched)


def topology_of(size: Size, model: Path) -> Topology:
    """The laptop recipe on SGLang with another model and longer responses."""
    changes = [
        *overrides(**{"model.hf_checkpoint": model}),
        f"rollout.n_samples_per_prompt={GROUP}",
        f"rollout.max_response_len={size.response}",
        f"engines.policy.concurrency={size.concurrency}",
        "engines.policy.batch_requests=false",
        'engines.policy.verify="never"',  # nobody computes a probe here
        "engines.policy.sglang.sleep_on_idle=true",
        "engines.policy.router=sglang-router",
    ]
    return msgspec.structs.replace(load_topology(RECIPE, changes).topology, eval=())


@contextmanager
def engine(topology: Topology, run_dir: Path) -> Iterator[Server]:
    """The server, with the arguments that a run gives it."""
    (spec,) = [spec for spec in specs_of(topology, run_dir) if spec.name.startswith("engine")]
    port = free_port()
    words = [with_address(word, "127.0.0.1", port) for word in spec.command]
    with (run_dir / "engine.log").open("wb") as log:
        process = psutil.Popen(words, env={**os.environ, **spec.env}, stdout=log, stderr=log, cwd=ROOT)
    server = Server(TP1, f"http://127.0.0.1:{port}", run_dir / "engine.log", [process])
    try:
        wait_until_up(server)
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def rollout(
    topology: Topology, run_dir: Path, bus_url: str, bus: Bus, engine_url: str
) -> AsyncGenerator[dict[str, psutil.Process]]:
    """Router and rollout actor as a run starts them, and somebody who gives every sample a score at once."""
    specs = {spec.name: spec for spec in specs_of(topology, run_dir)}
    port = free_port()
    router = [with_address(part, "127.0.0.1", port) for part in specs["router.policy"].command]
    commands = {"router": router, "rollout": list(specs["rollout"].command)}
    with processes(commands, run_dir, bus_url) as running:
        wait_until_200(f"http://127.0.0.1:{port}/liveness", running["router"])
        await bus.kv.put(address_key("engine", "policy", 0), Address(url=engine_url))
        await bus.kv.put(address_key("router", "policy", 0), Address(url=f"http://127.0.0.1:{port}"))
        async with anyio.create_task_group() as group:
            group.start_soon(grade, bus)
            yield running
            group.cancel_scope.cancel()


class Passes:
    """The two ways of a pass; each gives prompts that were never used before."""

    def __init__(self, bus: Bus, engine_url: str, size: Size) -> None:
        self._bus = bus
        self._engine_url = engine_url
        self._size = size
        self._params = SamplingParams(max_new_tokens=size.response)
        self._random = random.Random(1)
        self._numbers = itertools.count()

    async def through(self) -> float:
        """Tokens per second of tasks that a rollout actor takes from the bus, until their groups are complete."""
        size, begin = self._size, time.perf_counter()
        async with self._bus.read(GroupCompleted, from_seq=await self._next_seq()) as events:
            for prompt in self._prompts():
                await self._bus.publish(self._task(prompt))
            num_tokens = 0
            with anyio.fail_after(SGLANG_START_S):
                for _ in range(size.num_groups):
                    while (received := await events.next(timeout_s=1.0)) is None:
                        pass
                    num_tokens += sum(sample.response_len for sample in received.message.samples)
        assert num_tokens == size.num_tokens, num_tokens
        return num_tokens / (time.perf_counter() - begin)

    async def directly(self) -> float:
        """Tokens per second of the same requests, sent to the server with as little as possible around them."""
        waiting = iter([prompt for prompt in self._prompts() for _ in range(GROUP)])
        begin = time.perf_counter()
        counts: list[int] = []

        async def send(session: aiohttp.ClientSession) -> None:
            for prompt in waiting:
                async with session.post(f"{self._engine_url}/generate", json=self._body(prompt)) as answer:
                    counts.append(streamed_tokens(await answer.read()))

        timeout = aiohttp.ClientTimeout(total=PASS_LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, anyio.create_task_group() as group:
            for _ in range(self._size.concurrency):
                group.start_soon(send, session)
        assert sum(counts) == self._size.num_tokens, counts
        return sum(counts) / (time.perf_counter() - begin)

    @property
    def concurrency(self) -> int:
        return self._size.concurrency

    def _prompts(self) -> list[list[int]]:
        return [[self._random.randrange(2, VOCABULARY) for _ in range(PROMPT)] for _ in range(self._size.num_groups)]

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        rid, seed = uuid.uuid4().hex, self._random.randrange(2**31)
        limit = self._params.max_new_tokens
        body = generate_body(rid, [prompt], self._params, max_new_tokens=limit, seeds=[seed], version=1)
        return body | {"stream": True}

    def _task(self, ids: list[int]) -> RolloutRequested:
        prompt = Prompt(data="d", row=0, text="", prompt_ids=Int32Array(ids), label="", rm_type="exact_match")
        return RolloutRequested(
            group_id=next(self._numbers),
            attempt=0,
            round=0,
            min_version=1,
            prompt=prompt,
            num_samples=GROUP,
            sampling=self._params,
        )

    async def _next_seq(self) -> int:
        async with self._bus.read(GroupCompleted) as events:
            return max([received.seq async for received in events.so_far()], default=0) + 1


async def pairs_of(passes: Passes, num_pairs: int, watched: dict[str, psutil.Process]) -> dict[str, Any]:
    """Both ways in turn; the first pair, in which connections are made, is not counted."""
    found: list[dict[str, float]] = []
    spent: dict[str, dict[str, float]] = {"through": {}, "directly": {}}
    ways = {"through": passes.through, "directly": passes.directly}
    for number in range(num_pairs + 1):
        order = list(ways) if number % 2 else list(reversed(ways))
        pair: dict[str, float] = {}
        for name in order:
            before = cpu_seconds(watched)
            pair[name] = await ways[name]()
            spent[name] = difference(cpu_seconds(watched), before)
        print(f"pair {number}: {pair}", file=sys.stderr, flush=True)
        found.append(pair)
    counted = found[1:] or found
    direct = statistics.median(pair["directly"] for pair in counted)
    return {
        "ratio": statistics.median(pair["through"] / pair["directly"] for pair in counted),
        "goal": GOAL,
        "ratios": [pair["through"] / pair["directly"] for pair in counted],
        "tokens_per_s_directly": direct,
        "tokens_per_s_through": statistics.median(pair["through"] for pair in counted),
        "ms_per_step_directly": 1e3 * passes.concurrency / direct,
        "cpu_s_of_the_last_pair": spent,
    }


if __name__ == "__main__":
    sys.exit(main())
