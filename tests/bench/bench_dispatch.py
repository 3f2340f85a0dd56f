"""One rollout actor, many scripted engines: halts, updates, CPU and memory per token, idle slots. Prints JSON.

The rollout actor is a process of its own, whose CPU time and memory alone count. The engines (dispatch_engines, which
says how a batch behaves) have processes of their own; this process is the driver: it puts tasks, halts rounds and
publishes weights as buffer and trainer do. Weights take no time to load and are not verified; samples need no score.

Three runs, for each number of engines:

- `streams`: every slot has a response that does not end. CPU per token and memory per token in a window of --seconds,
  with a spill of every sample every --spill-every-s; before it, the memory of the open streams. Then the round is
  halted beside an evaluation with a request per engine: how long until its groups are given back, and how many POSTs
  the engines get. Then new weights: how long until an engine sends its first chunk under them.
- `slots`: lengths are lognormal, n samples a prompt, and more tasks than slots: which share of the slots is idle while
  tasks wait in the queue.

Full size: --engines 16 32 64 --slots 32 --seconds 60 --mean 4096 --token-ms 80.

Run: python -m tests.bench.bench_dispatch
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import msgspec
import psutil

from messages import (
    EngineState,
    EngineStateChanged,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    EvalSetSize,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Int32Array,
    Prompt,
    RolloutRequested,
    RoundHalted,
    SamplingParams,
    TrainerStarted,
    WeightsAnnounced,
)
from messages.subjects import stream_of
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.bus.nats.store import api_call
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.node.supervisor.ports import free_port
from runtime.process.logs import configure_logging
from runtime.settings.load import load_topology
from runtime.settings.processes import with_address
from runtime.settings.topology import Topology, encode_topology
from tests.bench.dispatch_engines import CHUNK, DIGIT_ZERO, Counters
from tests.bench.rig import ROOT, check_alive, connected, cpu_seconds, processes, rounded, showing_logs, specs_of
from tests.support.running_server import running_server
from tests.support.tiny_engine import wait_until_200

RECIPE = ROOT / "topologies" / "laptop.toml"
POOL: Final = "policy"
POLL_S: Final = 0.1
ENDLESS: Final = 200_000  # tokens of a response that does not end in a run; a group of 8 fits a message
TARGETS = {
    "halt_p99_s": 2.0,
    "halt_posts_at_64_engines": 2100,
    "update_to_first_token_s": 2.0,
    "cpu_us_per_token": 1.5,
    "bytes_per_token": 40,
    "kb_per_open_stream": 36,
    "idle_share": 0.05,
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_engines: int
    slots: int  # of an engine
    num_samples: int  # of a prompt
    token_ms: float  # between two tokens of a request
    seconds: float
    spill_every_s: float
    mean: float
    sigma: float
    cap: int
    waves: float  # tasks of the run `slots`, in fillings of all slots
    engine_processes: int
    changes: tuple[str, ...]  # of the recipe
    timeout_s: float

    @property
    def num_slots(self) -> int:
        return self.num_engines * self.slots


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 8, 16], help="one result each")
    parser.add_argument("--slots", type=int, default=16, help="of an engine")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--token-ms", type=float, default=20.0, help="between two tokens of a request")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the window with open streams")
    parser.add_argument("--spill-every-s", type=float, default=1.0, help="of the recipe")
    parser.add_argument("--mean", type=float, default=1024.0, help="response tokens of the run `slots`, before the cap")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log of the length")
    parser.add_argument("--cap", type=int, default=32_768, help="response tokens of the run `slots`")
    parser.add_argument("--waves", type=float, default=3.0, help="tasks of the run `slots`, in fillings of all slots")
    parser.add_argument("--engine-processes", type=int, default=2)
    parser.add_argument("--run", choices=("streams", "slots"), action="append", help="one only; default: both")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="KEY=VALUE of the recipe")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per run")
    args = parser.parse_args(argv)
    configure_logging("bench", "laptop")
    results: dict[str, Any] = {"targets": TARGETS}
    for num_engines in args.engines:
        size = Size(
            num_engines,
            args.slots,
            args.samples,
            args.token_ms,
            args.seconds,
            args.spill_every_s,
            args.mean,
            args.sigma,
            args.cap,
            args.waves,
            args.engine_processes,
            tuple(args.changes),
            args.timeout,
        )
        found = results[f"{num_engines}_engines"] = dict[str, Any]()
        for run in args.run or ("streams", "slots"):
            measure = streams if run == "streams" else slots
            found[run] = rounded(anyio.run(measure, size, backend_options={"use_uvloop": True}))
    print(json.dumps(results, indent=2))
    return 0


async def streams(size: Size) -> dict[str, Any]:
    """Open streams in every slot, a halt beside an evaluation, and an update."""
    with anyio.fail_after(size.timeout_s):
        async with scene(size, mean=ENDLESS, sigma=0.0, concurrency=2 * size.slots) as stage:
            idle = stage.rollout.memory_info().rss
            await stage.put_groups(range(size.num_slots // size.num_samples))
            await stage.until(lambda now: now.num_running + now.num_queued >= size.num_slots)
            await stage.until(lambda now: now.num_tokens >= size.num_slots)
            held = await stage.window(size.seconds, idle)
            halt = await stage.halt_beside_an_evaluation()
            update = await stage.update()
    return {**held, **halt, **update}


async def slots(size: Size) -> dict[str, Any]:
    """More tasks than slots: the share of idle slots from the first filling until the queue is empty."""
    with anyio.fail_after(size.timeout_s):
        async with scene(size, mean=size.mean, sigma=size.sigma, concurrency=size.slots) as stage:
            num_groups = round(size.waves * size.num_slots / size.num_samples)
            await stage.put_groups(range(num_groups))
            await stage.until(lambda now: now.num_running + now.num_queued >= 0.75 * size.num_slots)
            before, begin = await stage.counters(), time.monotonic()
            queued, running = list[int](), list[int]()
            cpu = cpu_seconds({"rollout": stage.rollout})["rollout"]
            while await stage.num_waiting():
                await anyio.sleep(POLL_S)
                now = await stage.counters()
                queued.append(now.num_queued)
                running.append(now.num_running)
                check_alive(stage.watched)
            after, took_s = await stage.counters(), time.monotonic() - begin
            cpu_s = cpu_seconds({"rollout": stage.rollout})["rollout"] - cpu
    busy = (after.busy_slot_s - before.busy_slot_s) / (size.num_slots * took_s)
    return {
        "idle_share": 1 - statistics.fmean(running) / size.num_slots,
        "idle_share_with_waits_for_a_stride": 1 - busy,  # an engine begins a request with its next stride
        "rollout_cores": cpu_s / took_s,
        "mean_queued_at_engines": statistics.fmean(queued) if queued else 0.0,
        "tokens_per_s": (after.num_tokens - before.num_tokens) / took_s,
        "window_s": took_s,
    }


class Stage:
    """A rollout actor at work, and what the driver knows."""

    def __init__(
        self,
        size: Size,
        bus: Bus,
        rollout: psutil.Process,
        watched: dict[str, psutil.Process],
        engine_urls: Sequence[str],
        session: aiohttp.ClientSession,
    ) -> None:
        self.rollout, self.watched = rollout, watched
        self._size, self._bus, self._session = size, bus, session
        self._engine_urls = engine_urls  # one per process
        self._seq = 0
        self._num_groups = 0
        self._version = 0

    async def counters(self) -> Counters:
        """The sum over all engines."""
        found = list[Counters]()
        for url in self._engine_urls:
            async with self._session.get(f"{url}/counters") as answer:
                found.append(msgspec.json.decode(await answer.read(), type=Counters))
        posts = dict[str, int]()
        for one in found:
            for path, number in one.posts.items():
                posts[path] = posts.get(path, 0) + number
        return Counters(
            posts=posts,
            num_tokens=sum(one.num_tokens for one in found),
            busy_slot_s=sum(one.busy_slot_s for one in found),
            num_running=sum(one.num_running for one in found),
            num_queued=sum(one.num_queued for one in found),
            updated_at=[at for one in found for at in one.updated_at],
            first_token_at=[at for one in found for at in one.first_token_at],
        )

    async def until(self, condition: Any) -> None:
        """Wait until the counters are as wanted."""
        while not condition(await self.counters()):
            check_alive(self.watched)
            await anyio.sleep(POLL_S)

    async def num_waiting(self) -> int:
        """Tasks that no rollout actor has pulled."""
        return await num_undelivered(self._bus, f"rollout-{POOL}")

    async def begin(self) -> None:
        """Publish the first weights, and wait until all engines have them and accept requests.

        Otherwise the first tasks crowd on the engines that were ready first.
        """
        await self._bus.publish(TrainerStarted(incarnation=1, step=0))
        self._seq = await self._bus.last_ledger_seq()
        await self.announce()
        await self.until(lambda now: min(now.updated_at) > 0)
        ready = set[str]()
        async with self._bus.read(EngineStateChanged) as events:
            while len(ready) < self._size.num_engines:
                received = await events.next(1.0)
                check_alive(self.watched)
                if received is not None and received.message.new is EngineState.CURRENT:
                    ready.add(received.message.engine)

    async def announce(self) -> float:
        """Publish new weights; return the monotonic time before that."""
        self._version += 1
        weights = WeightsAnnounced(
            version=self._version, step=self._version, incarnation=1, path="nowhere", checksum="sum", size_bytes=0
        )
        begin = time.monotonic()
        await self._bus.publish(weights)
        return begin

    async def put_groups(self, numbers: Sequence[int], round_number: int = 0) -> None:
        """Publish tasks of training groups."""
        for number in numbers:
            await self._bus.publish(
                RolloutRequested(
                    group_id=number,
                    attempt=1,
                    round=round_number,
                    min_version=self._version,
                    prompt=prompt_of(number),
                    num_samples=self._size.num_samples,
                    sampling=SamplingParams(max_new_tokens=ENDLESS),
                )
            )
        self._num_groups = max(self._num_groups, *(number + 1 for number in numbers))

    async def window(self, seconds: float, idle: int) -> dict[str, Any]:
        """CPU and memory of the rollout actor while streams run on."""
        opened, at_open = self.rollout.memory_info().rss, (await self.counters()).num_tokens
        cpu, begin = cpu_seconds({"rollout": self.rollout})["rollout"], time.monotonic()
        await anyio.sleep(seconds)
        after = await self.counters()
        cpu_s = cpu_seconds({"rollout": self.rollout})["rollout"] - cpu
        num_tokens, num_streams = after.num_tokens - at_open, self._size.num_slots
        return {
            "streams": num_streams,
            "cpu_us_per_token": 1e6 * cpu_s / num_tokens,
            "rollout_cores": cpu_s / (time.monotonic() - begin),
            "tokens_per_s": num_tokens / (time.monotonic() - begin),
            "tokens_per_stream": num_tokens / num_streams,
            "spills_per_sample": seconds / self._size.spill_every_s,
            "bytes_per_token": (self.rollout.memory_info().rss - opened) / num_tokens,
            "kb_per_open_stream": (opened - idle) / num_streams / 1e3,
        }

    async def halt_beside_an_evaluation(self) -> dict[str, Any]:
        """Halt the round while an evaluation with one request per engine runs on."""
        num_items = self._size.num_engines
        issued = EvalIssued(
            incarnation=1, step=1, version=self._version, sets=(EvalSetSize(set="eval", num_items=num_items),)
        )
        self._seq = await self._bus.append(issued, expected_last=self._seq)
        running = (await self.counters()).posts.get("/generate", 0)
        for item in range(num_items):
            await self._bus.publish(
                EvalRequested(
                    step=1,
                    set="eval",
                    item=item,
                    version=self._version,
                    prompt=prompt_of(10**6 + item),
                    num_samples=1,
                    sampling=SamplingParams(max_new_tokens=ENDLESS),
                )
            )
        await self.until(lambda now: now.posts.get("/generate", 0) >= running + min(num_items, self._size.slots))
        before, begin = (await self.counters()).posts, time.time()
        self._seq = await self._bus.append(RoundHalted(incarnation=1, round=0), expected_last=self._seq)
        took_s = list[float]()
        async with self._bus.read(GroupAborted, GroupCompleted, GroupFailed, from_seq=self._seq) as events:
            while len(took_s) < self._num_groups:
                received = await events.next(1.0)
                check_alive(self.watched)
                if received is not None:
                    took_s.append(received.time.timestamp() - begin)
        after = (await self.counters()).posts
        posts = {path: number - before.get(path, 0) for path, number in after.items() if number > before.get(path, 0)}
        ended = EvalEnded(incarnation=1, step=1, version=self._version, metrics={})
        self._seq = await self._bus.append(ended, expected_last=self._seq)
        return {
            "halt_p50_s": statistics.median(took_s),
            "halt_p99_s": sorted(took_s)[int(0.99 * (len(took_s) - 1))],
            "halt_posts": sum(posts.values()),
            "halt_posts_by_path": posts,
        }

    async def update(self) -> dict[str, Any]:
        """New weights, and tasks that wait for them: until the first token of the first engine, and of the last."""
        # as many as all engines take: with fewer, the engines that are updated first could take all of them
        num_groups = 2 * self._size.num_slots // self._size.num_samples
        first = self._num_groups
        begin = await self.announce()
        await self.put_groups(range(first, first + num_groups), 1)
        await self.until(lambda now: min(now.updated_at) > begin and min(now.first_token_at) > 0)
        now = await self.counters()
        return {
            "update_to_last_engine_s": max(now.updated_at) - begin,
            "update_to_first_token_s": min(now.first_token_at) - begin,
            "update_to_first_token_of_last_engine_s": max(now.first_token_at) - begin,
            "of_that_chunk_s": CHUNK * self._size.token_ms / 1e3,  # an engine sends no sooner
        }


def prompt_of(number: int) -> Prompt:
    digits = str(number)
    ids = Int32Array([DIGIT_ZERO + int(digit) for digit in digits])
    return Prompt(data="numbers", row=0, text=digits, prompt_ids=ids)


async def num_undelivered(bus: Bus, durable: str) -> int:
    """Messages that a durable consumer has not delivered."""
    connection = bus._connection  # pyright: ignore[reportPrivateUsage]
    info = await api_call(connection, f"CONSUMER.INFO.{stream_of(bus.run, 'work')}.{durable}")
    return info["num_pending"]


def topology_of(size: Size, ports: Sequence[int], concurrency: int) -> Topology:
    """The laptop's recipe on engines that run already."""
    urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in ports)
    changes = [
        f"engines.{POOL}.urls=[{urls}]",
        f"engines.{POOL}.concurrency={concurrency}",
        f"engines.{POOL}.batch_requests=false",
        f'engines.{POOL}.verify="never"',
        f"rollout.n_samples_per_prompt={size.num_samples}",
        f"rollout.max_response_len={ENDLESS}",
        f"rollout.spill_every_s={size.spill_every_s}",
        *size.changes,
    ]
    return load_topology(RECIPE, changes).topology


@asynccontextmanager
async def scene(size: Size, *, mean: float, sigma: float, concurrency: int) -> AsyncGenerator[Stage]:
    """Server, engines, router if the recipe has one, and a rollout actor whose engines all hold the first weights."""
    ports = [free_port() for _ in range(size.num_engines)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        topology = topology_of(size, ports, concurrency)
        (run_dir / TOPOLOGY_FILE).write_bytes(encode_topology(topology))
        specs = {spec.name: list(spec.command) for spec in specs_of(topology, run_dir)}
        parts = [ports[number :: size.engine_processes] for number in range(size.engine_processes)]
        clock = [f"--base-ms={size.token_ms}", f"--slots={concurrency}"]
        clock += [f"--mean={mean}", f"--sigma={sigma}", f"--cap={max(size.cap, round(mean))}"]
        engines = {
            f"engines-{number}": [
                sys.executable,
                "-m",
                "tests.bench.dispatch_engines",
                f"--ports={shown(part)}",
                *clock,
            ]
            for number, part in enumerate(parts)
            if part
        }
        router_port = free_port()
        routers = {
            name: [with_address(part, "127.0.0.1", router_port) for part in command]
            for name, command in specs.items()
            if name.startswith("router")
        }
        async with (
            running_server(run_dir / "bus") as server,
            connected(server.url, topology) as bus,
            aiohttp.ClientSession() as session,
        ):
            with showing_logs(run_dir), processes(engines | routers, run_dir, server.url) as served:
                for name, part in zip(engines, filter(None, parts), strict=True):
                    wait_until_200(f"http://127.0.0.1:{part[-1]}/ready", served[name])
                for name in routers:
                    wait_until_200(f"http://127.0.0.1:{router_port}/liveness", served[name])
                    await bus.kv.put(address_key("router", POOL, 0), Address(url=f"http://127.0.0.1:{router_port}"))
                rollout = {name: command for name, command in specs.items() if name.startswith("rollout")}
                with processes(rollout, run_dir, server.url) as hosts:
                    [process] = hosts.values()
                    urls = [f"http://127.0.0.1:{part[0]}" for part in parts if part]
                    stage = Stage(size, bus, process, served | hosts, urls, session)
                    await stage.begin()
                    yield stage


def shown(ports: Sequence[int]) -> str:
    return ",".join(map(str, ports))


if __name__ == "__main__":
    sys.exit(main())
