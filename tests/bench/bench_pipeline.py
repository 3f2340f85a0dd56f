"""What the whole pipeline costs per sample when engine and trainer take no time. Prints JSON.

Real: nats-server, sglang-router, and buffer, rollout and reward as a run starts them, each in its process, with
the prompts, tokenizer and grader of the laptop recipe. Stand-ins, in processes of their own: an engine that answers at
once, and a trainer that reads its batches and says at once that they are trained. Each mode then sends the same
requests to the engine through the router alone, so that the share of HTTP is of the same run, and the same number of
samples through a pipeline of plain nats-py without types and recovery (bare_pipeline):

    bus_us_per_sample = us_per_sample - engine_http.us_per_sample
    bus_cpu_us_per_sample: CPU time of all processes but engine and router, without that of the client of HTTP alone
    cpu_ratio_to_bare: that to the CPU time of the bare pipeline

Engine and router cost more beside the pipeline than alone, so their own time in the pipeline is left out. The client's
is a part of the rollout actor, where it cannot be told apart; what it costs there beyond its time alone counts as bus.

Wall times depend on how many cores there are and who else uses them; CPU times depend on that much less. The three
take turns in each round; figures are medians over the rounds.

Run: python -m tests.bench.bench_pipeline
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import psutil

from messages import BatchTrained
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.node.supervisor.ports import free_port
from runtime.process.logs import configure_logging
from runtime.settings.load import load_topology
from runtime.settings.processes import Tier, with_address
from runtime.settings.topology import Topology, encode_topology
from tests.bench import bare_pipeline
from tests.bench.rig import (
    NATS,
    ROOT,
    check_alive,
    connected,
    cpu_seconds,
    difference,
    family,
    nats_process,
    processes,
    rounded,
    showing_logs,
    specs_of,
)
from tests.support.running_server import running_server
from tests.support.tiny_engine import wait_until_200

WAIT_S = 30.0  # for a step of the bare pipeline
IS_JSON = {"Content-Type": "application/json"}
RECIPE = ROOT / "topologies" / "laptop.toml"
SHARED = 'share=[["buffer", "rollout", "reward", "filter"]]'
TARGETS = {  # microseconds per sample, and a ratio; docs/develop/benchmarks.md, goals
    "batched": {"bus": 150, "engine_http": 100, "cpu_ratio_to_bare": 4},
    "single": {"bus": 250, "engine_http": 250, "cpu_ratio_to_bare": 3},
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_steps: int  # measured train steps
    num_warm_up: int  # steps before them
    num_groups: int  # per step
    num_samples: int  # per group
    concurrency: int  # samples in flight
    shared: bool  # whether the light actors are in one process

    @property
    def samples_per_step(self) -> int:
        return self.num_groups * self.num_samples


@dataclass(frozen=True)
class Services:
    """The processes of one mode by name, and where its servers listen."""

    processes: dict[str, psutil.Process]
    router_url: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="measured train steps per mode")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before them")
    parser.add_argument("--groups", type=int, default=64, help="prompt groups per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per group")
    parser.add_argument("--concurrency", type=int, default=64, help="samples in flight")
    parser.add_argument("--share", action="store_true", help="all light actors in one process")
    parser.add_argument("--mode", choices=TARGETS, action="append", help="one mode only; default: all")
    parser.add_argument("--rounds", type=int, default=1, help="of pipeline, HTTP alone and bare pipeline")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per mode and round")
    args = parser.parse_args(argv)
    configure_logging("bench", "laptop")
    size = Size(args.steps, args.warm_up, args.groups, args.samples, args.concurrency, args.share)
    results: dict[str, Any] = {"steps": size.num_steps, "groups": size.num_groups, "samples_per_group": args.samples}
    for mode in args.mode or TARGETS:
        rounds = [
            anyio.run(measure, mode, size, args.timeout, backend_options={"use_uvloop": True})
            for _ in range(args.rounds)
        ]
        results[mode] = rounded({**medians_of(rounds), "targets": TARGETS[mode]})
    print(json.dumps(results, indent=2))
    return 0


async def measure(mode: str, size: Size, timeout_s: float) -> dict[str, Any]:
    """Figures of one mode: the pipeline, its engine requests alone, and the bare pipeline."""
    batched = mode == "batched"
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(timeout_s):
        run_dir = Path(folder)
        topology = topology_of(size, batched=batched)
        (run_dir / TOPOLOGY_FILE).write_bytes(encode_topology(topology))
        async with running_server(run_dir / "bus") as server, connected(server.url, topology) as bus:
            with showing_logs(run_dir), services(topology, run_dir, server.url) as running:
                await bus.kv.put(address_key("router", "policy", 0), Address(url=running.router_url))
                with actors(topology, run_dir, server.url) as hosts:
                    pipeline = await watch_steps(bus, size, running.processes | hosts | {NATS: nats_process()})
                http = await engine_alone(running, size, batched=batched)
            bare = await bare_alone(size, run_dir, scores_each=not batched)
    cpu_us = pipeline["cpu_us_per_sample"]
    bus_cpu_us = cpu_us["total"] - cpu_us["engine"] - cpu_us["router"] - http["cpu_us_per_sample"]["client"]
    return {
        **pipeline,
        "engine_http": http,
        "bare": bare,
        "engine_http_share": http["us_per_sample"] / pipeline["us_per_sample"],
        "bus_us_per_sample": pipeline["us_per_sample"] - http["us_per_sample"],
        "bus_cpu_us_per_sample": bus_cpu_us,
        "cpu_ratio_to_bare": bus_cpu_us / (bare["cpu_us_per_sample"]["total"] or math.nan),  # of few samples: 0
    }


def medians_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each figure's median over the rounds."""
    first = rounds[0]
    return {
        name: medians_of([each[name] for each in rounds])
        if isinstance(first[name], dict)
        else statistics.median(each[name] for each in rounds)
        for name in first
    }


def topology_of(size: Size, *, batched: bool) -> Topology:
    """The laptop's recipe without evaluation, checkpoints and stored samples, on an engine that runs already."""
    changes = [
        f"train.num_steps={size.num_warm_up + size.num_steps + 1}",
        f"rollout.rollout_batch_size={size.num_groups}",
        f"rollout.n_samples_per_prompt={size.num_samples}",
        f"engines.policy.concurrency={size.concurrency}",
        f"engines.policy.batch_requests={'true' if batched else 'false'}",
        f'engines.policy.urls=["http://127.0.0.1:{free_port()}"]',
        "engines.policy.router=sglang-router",
        "observe.samples=false",  # the demo keeps them for its page
    ]
    topology = load_topology(RECIPE, [*changes, *([SHARED] if size.shared else [])]).topology
    return msgspec.structs.replace(topology, eval=())


# processes


@contextmanager
def services(topology: Topology, run_dir: Path, bus_url: str) -> Iterator[Services]:
    """The engine and the router, both serving."""
    [engine_url] = topology.engines["policy"].urls
    port = free_port()
    [router] = [spec for spec in specs_of(topology, run_dir) if spec.name.startswith("router")]
    commands = {
        "engine": [sys.executable, "-m", "tests.bench.zero_engine", engine_url.rpartition(":")[2]],
        "router": [with_address(part, "127.0.0.1", port) for part in router.command],
    }
    with processes(commands, run_dir, bus_url) as running:
        wait_until_200(f"{engine_url}/ready", running["engine"])
        wait_until_200(f"http://127.0.0.1:{port}/liveness", running["router"])
        yield Services(running, f"http://127.0.0.1:{port}")


@contextmanager
def actors(topology: Topology, run_dir: Path, bus_url: str) -> Iterator[dict[str, psutil.Process]]:
    """The light actors as a run starts them, and the no-op trainer."""
    commands = {spec.name: list(spec.command) for spec in specs_of(topology, run_dir) if spec.tier is Tier.ACTOR}
    commands["trainer"] = [sys.executable, "-m", "tests.bench.zero_trainer", str(run_dir)]
    with processes(commands, run_dir, bus_url) as running:
        yield running


# measurements


async def watch_steps(bus: Bus, size: Size, watched: Mapping[str, psutil.Process]) -> dict[str, Any]:
    """Times of the measured steps by the log's clock, and the CPU that they cost each process."""
    times_s: list[float] = []
    cpu_before: dict[str, float] = {}
    wakeups_before: dict[str, float] = {}
    async with bus.read(BatchTrained) as events:
        while len(times_s) <= size.num_steps:
            received = await events.next(timeout_s=1.0)
            if received is None:
                check_alive(watched)
                continue
            assert received.message.num_samples == size.samples_per_step
            if received.message.step == size.num_warm_up:
                cpu_before, wakeups_before = cpu_seconds(watched), wakeups(watched)
            if received.message.step >= size.num_warm_up:
                times_s.append(received.time.timestamp())
    spent = difference(cpu_seconds(watched), cpu_before)
    woken = difference(wakeups(watched), wakeups_before)
    steps_s = [end - begin for begin, end in itertools.pairwise(times_s)]
    num_samples = size.num_steps * size.samples_per_step
    return {
        "ms_per_step": 1e3 * statistics.median(steps_s),
        "ms_per_step_mean": 1e3 * statistics.fmean(steps_s),
        "us_per_sample": 1e6 * statistics.median(steps_s) / size.samples_per_step,
        "cpu_us_per_sample": per_sample(spent, num_samples),
        "cpu_s": spent,
        "wakeups_per_group": {name: count / size.num_steps / size.num_groups for name, count in woken.items()},
    }


async def engine_alone(running: Services, size: Size, *, batched: bool) -> dict[str, Any]:
    """The same requests through the router, with aiohttp alone, so that this bench outlives changes of our client."""
    per_request = size.num_samples if batched else 1
    prompt = [11, 12, 13, 14]
    num_requests = size.samples_per_step // per_request
    numbers = itertools.count()

    async def send(session: aiohttp.ClientSession, left: Iterator[int]) -> None:
        for _ in left:
            ids: Any = [prompt] * per_request if batched else prompt
            body = {
                "rid": str(next(numbers)),
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 8},
                "return_logprob": True,
            }
            async with session.post(
                f"{running.router_url}/generate", data=msgspec.json.encode(body), headers=IS_JSON
            ) as answer:
                assert answer.status == 200
                msgspec.json.decode(await answer.read())

    async def step(session: aiohttp.ClientSession) -> float:
        left = iter(range(num_requests))
        begin = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(max(1, size.concurrency // per_request)):
                group.start_soon(send, session, left)
        return time.perf_counter() - begin

    watched = running.processes | {"client": psutil.Process()}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(size.num_warm_up):
            await step(session)
        before = cpu_seconds(watched)
        steps_s = [await step(session) for _ in range(size.num_steps)]
        spent = difference(cpu_seconds(watched), before)
    return {
        "ms_per_step": 1e3 * statistics.median(steps_s),
        "us_per_sample": 1e6 * statistics.median(steps_s) / size.samples_per_step,
        "cpu_us_per_sample": per_sample(spent, size.num_steps * size.samples_per_step),
    }


async def bare_alone(size: Size, run_dir: Path, *, scores_each: bool) -> dict[str, Any]:
    """The bare pipeline, on a server of its own."""
    async with running_server(run_dir / "bare") as server:
        client = await bare_pipeline.connect(server.url)
        await bare_pipeline.make_streams(client.jetstream())
        words = [server.url, f"--samples={size.num_samples}", *(["--score-each"] if scores_each else [])]
        commands = {
            f"bare-{role}": [sys.executable, "-m", "tests.bench.bare_pipeline", role, *words]
            for role in bare_pipeline.ROLES
        }
        buffer = bare_pipeline.Buffer(client, size.num_groups)
        await buffer.open()
        with showing_logs(run_dir), processes(commands, run_dir, server.url) as running:
            watched = running | {"buffer": psutil.Process(), NATS: psutil.Process(server.pid)}
            for _ in range(size.num_warm_up):
                await buffer.step(WAIT_S)
            before, steps_s = cpu_seconds(watched), list[float]()
            for _ in range(size.num_steps):
                begin = time.perf_counter()
                assert await buffer.step(WAIT_S) == size.samples_per_step
                steps_s.append(time.perf_counter() - begin)
            spent = difference(cpu_seconds(watched), before)
        await client.close()
    return {
        "ms_per_step": 1e3 * statistics.median(steps_s),
        "us_per_sample": 1e6 * statistics.median(steps_s) / size.samples_per_step,
        "cpu_us_per_sample": per_sample(spent, size.num_steps * size.samples_per_step),
    }


def wakeups(watched: Mapping[str, psutil.Process]) -> dict[str, float]:
    """How often processes and their children waited for something so far; most of their CPU goes with that."""
    return {
        name: sum(member.num_ctx_switches().voluntary for member in family(process))
        for name, process in watched.items()
    }


def per_sample(spent: Mapping[str, float], num_samples: int) -> dict[str, float]:
    each = {name: 1e6 * seconds / num_samples for name, seconds in spent.items()}
    return {**each, "total": sum(each.values())}


if __name__ == "__main__":
    sys.exit(main())
