"""What partial rollout and asynchrony gain on long-tailed responses, against what a simulation predicts. Prints JSON.

Real: nats-server, sglang-router, and buffer, rollout and reward as a run starts them, each in its process.
Stand-ins: an engine with a token clock (see clock_engine) and a trainer whose steps take a fixed time. Each mode is a
run of its own with the same prompts and lengths. The simulation (see long_tail) is given the same clock and lengths,
and plays the same rules without anything else that takes time. Useful tokens are response tokens of trained groups.

    share of gain = (measured ratio of two modes - 1) / (predicted ratio - 1)

Token steps are slow, so that engine and trainer mostly sleep and two cores carry all the actors; what is measured is
how well these keep the engine at work, not how fast they compute. Discarded tokens are counted from the log: those of
groups that ended untrained, and those of an attempt that the next one does not go on from; and the engine's count of
the tokens that it made must be that of the log.

Run: python -m tests.bench.bench_long_tail
"""

import argparse
import json
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import psutil

from messages import BatchReady, BatchTrained, GroupAborted, GroupCompleted, Message, RoundHalted
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, Stage, fold
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.node.supervisor.ports import free_port
from runtime.process.logs import configure_logging
from runtime.settings.load import load_topology
from runtime.settings.processes import Tier, with_address
from runtime.settings.topology import Topology, encode_topology
from tests.bench.long_tail import Clock, Lengths, Mode, Simulation, Trained, Work, tokens_per_s
from tests.bench.rig import (
    NATS,
    ROOT,
    check_alive,
    connected,
    cpu_seconds,
    difference,
    nats_process,
    processes,
    rounded,
    showing_logs,
    specs_of,
)
from tests.support.running_server import running_server
from tests.support.tiny_engine import wait_until_200

RECIPE = ROOT / "topologies" / "laptop.toml"
TARGET_SHARE = 0.75
PROMPTS = ROOT / "tests" / "bench" / "long_tail_prompts.py"
MODES = {
    "synchronous": Mode(over_sampling=1),
    "abort_and_drop": Mode(over_sampling=2, on_halt="drop"),
    "partial": Mode(over_sampling=2),
    "stale_1": Mode(over_sampling=1, max_staleness=1),
    "stale_2": Mode(over_sampling=1, max_staleness=2),
    "partial_stale_1": Mode(over_sampling=2, max_staleness=1),
    "partial_stale_2": Mode(over_sampling=2, max_staleness=2),
}
GAINS = {  # of a mode over another
    "partial_over_abort_and_drop": ("partial", "abort_and_drop"),
    "partial_over_synchronous": ("partial", "synchronous"),
    "stale_1_over_0": ("stale_1", "synchronous"),
    "stale_2_over_0": ("stale_2", "synchronous"),
    "partial_stale_1_over_0": ("partial_stale_1", "partial"),
    "partial_stale_2_over_0": ("partial_stale_2", "partial"),
}


@dataclass(frozen=True)
class Plan:
    """What all modes have in common."""

    work: Work
    num_warm_up: int  # train steps before the measured ones
    clock: Clock
    lengths: Lengths
    on_weight_update: str
    timeout_s: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured train steps")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--groups", type=int, default=16, help="prompt groups per step")
    parser.add_argument("--samples", type=int, default=4, help="samples per group")
    parser.add_argument("--base-ms", type=float, default=4.0, help="a: of a token step")
    parser.add_argument("--per-sample-ms", type=float, default=0.1, help="b: of a token step, for each running sample")
    parser.add_argument("--slots", type=int, default=128, help="of the engine")
    parser.add_argument("--mean", type=float, default=48.0, help="response tokens, before the cap")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log of the length")
    parser.add_argument("--cap", type=int, default=384, help="response tokens")
    parser.add_argument("--train-s", type=float, default=1.0, help="of a train step")
    parser.add_argument("--on-weight-update", default="in_place", help="what running requests do meanwhile")
    parser.add_argument("--mode", choices=MODES, action="append", help="one mode only; default: all")
    parser.add_argument("--predict", action="store_true", help="simulate only")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds per mode")
    args = parser.parse_args(argv)
    configure_logging("bench", "laptop")
    plan = Plan(
        work=Work(args.warm_up + args.steps, args.groups, args.samples, args.train_s),
        num_warm_up=args.warm_up,
        clock=Clock(args.base_ms / 1e3, args.per_sample_ms / 1e3, args.slots),
        lengths=Lengths(args.mean, args.sigma, args.cap),
        on_weight_update=args.on_weight_update,
        timeout_s=args.timeout,
    )
    modes = {name: MODES[name] for name in args.mode or MODES}
    predicted = {name: predict(plan, mode) for name, mode in modes.items()}
    measured: dict[str, Any] = {}
    for name in modes if not args.predict else ():
        print(f"{name} ...", file=sys.stderr, flush=True)
        measured[name] = anyio.run(measure, plan, modes[name], backend_options={"use_uvloop": True})
    print(json.dumps(rounded(report(plan, predicted, measured)), indent=2))
    return 0


def predict(plan: Plan, mode: Mode) -> float:
    """Useful tokens per second of an ideal run."""
    return tokens_per_s(Simulation(plan.work, mode, plan.clock, plan.lengths).run(), plan.num_warm_up)


def report(plan: Plan, predicted: dict[str, float], measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each mode by itself, then the gains of modes over others."""
    modes = {name: {"predicted_tokens_per_s": tokens, **measured.get(name, {})} for name, tokens in predicted.items()}
    gains: dict[str, Any] = {}
    for name, (better, worse) in GAINS.items():
        if better in predicted and worse in predicted:
            gain = {"predicted": predicted[better] / predicted[worse]}
            if measured:
                gain["measured"] = measured[better]["tokens_per_s"] / measured[worse]["tokens_per_s"]
                gain["share_of_gain"] = (gain["measured"] - 1) / (gain["predicted"] - 1)
            gains[name] = gain
    return {"target_share_of_gain": TARGET_SHARE, "setting": asdict(plan), "modes": modes, "ratios": gains}


async def measure(plan: Plan, mode: Mode) -> dict[str, Any]:
    """Figures of one run."""
    with tempfile.TemporaryDirectory() as folder, anyio.fail_after(plan.timeout_s):
        run_dir = Path(folder)
        topology = topology_of(plan, mode)
        (run_dir / TOPOLOGY_FILE).write_bytes(encode_topology(topology))
        async with running_server(run_dir / "bus") as server, connected(server.url, topology) as bus:
            with showing_logs(run_dir):
                async with running(plan, topology, run_dir, server.url, bus) as (watched, engine_url):
                    return await watch(bus, plan, watched | {NATS: nats_process()}, engine_url)


def topology_of(plan: Plan, mode: Mode) -> Topology:
    """The laptop's topology with another recipe, on an engine that runs already."""
    work = plan.work
    changes = [
        f"train.num_steps={work.num_steps}",
        f"rollout.rollout_batch_size={work.num_groups}",
        f"rollout.over_sampling_batch_size={work.num_groups * mode.over_sampling}",
        f"rollout.n_samples_per_prompt={work.num_samples}",
        f"rollout.max_response_len={plan.lengths.cap}",
        f"rollout.on_halt={json.dumps(mode.on_halt)}",
        f"rollout.max_staleness={mode.max_staleness}",
        "rollout.max_attempts=1000",  # the longest may be halted many times
        "rollout.shuffle=false",
        "algorithm.num_steps_per_rollout=1",
        f"engines.policy.concurrency={plan.clock.slots}",
        "engines.policy.batch_requests=false",
        f'engines.policy.urls=["http://127.0.0.1:{free_port()}"]',
        "engines.policy.router=sglang-router",
        f'data=[{{ name = "numbers", source = "{PROMPTS}:prompt", label_key = "label", rm_type = "exact_match" }}]',
    ]
    if mode.max_staleness:  # else nothing runs then
        changes.append(f"rollout.on_weight_update={json.dumps(plan.on_weight_update)}")
    return msgspec.structs.replace(load_topology(RECIPE, changes).topology, eval=())


@asynccontextmanager
async def running(
    plan: Plan, topology: Topology, run_dir: Path, bus_url: str, bus: Bus
) -> AsyncGenerator[tuple[dict[str, psutil.Process], str]]:
    """All processes at work, and the engine's URL."""
    (engine_url,) = topology.engines["policy"].urls
    specs = specs_of(topology, run_dir)
    port = free_port()
    (router,) = [spec for spec in specs if spec.name.startswith("router")]
    clock, lengths = plan.clock, plan.lengths
    engine = [sys.executable, "-m", "tests.bench.clock_engine", engine_url.rpartition(":")[2]]
    engine += [f"--base-s={clock.base_s}", f"--per-sample-s={clock.per_sample_s}", f"--slots={clock.slots}"]
    engine += [f"--mean={lengths.mean}", f"--sigma={lengths.sigma}", f"--cap={lengths.cap}", f"--seed={lengths.seed}"]
    services = {"engine": engine, "router": [with_address(part, "127.0.0.1", port) for part in router.command]}
    actors = {spec.name: list(spec.command) for spec in specs if spec.tier is Tier.ACTOR}
    trainer = [sys.executable, "-m", "tests.bench.zero_trainer", str(run_dir), f"--step-s={plan.work.train_s}"]
    with processes(services, run_dir, bus_url) as served:
        wait_until_200(f"{engine_url}/ready", served["engine"])
        wait_until_200(f"http://127.0.0.1:{port}/liveness", served["router"])
        await bus.kv.put(address_key("router", "policy", 0), Address(url=f"http://127.0.0.1:{port}"))
        with processes(actors | {"trainer": trainer}, run_dir, bus_url) as hosts:
            yield served | hosts, engine_url


async def watch(bus: Bus, plan: Plan, watched: dict[str, psutil.Process], engine_url: str) -> dict[str, Any]:
    """Follow the log to the end of the last round; figures of the measured steps, and of the tokens of all."""
    state, books, trained = LedgerState(), TokenBooks(), list[Trained]()
    before = cpu_seconds(watched)
    async with bus.read(*LEDGER_EVENTS) as events:
        while len(trained) < plan.work.num_steps or in_flight(state):
            received = await events.next(timeout_s=1.0)
            if received is None:
                check_alive(watched)
                continue
            fold(state, received.message, received.seq)
            if state.failed:
                raise RuntimeError(f"groups fail: {state.failed}")
            books.add(received.message)
            if isinstance(received.message, BatchTrained):
                trained.append(Trained(received.time.timestamp(), books.of_batch[received.message.step]))
    clock = await clock_of(engine_url)
    measured_s = trained[-1].ended_s - trained[plan.num_warm_up - 1].ended_s
    return {
        "tokens_per_s": tokens_per_s(trained, plan.num_warm_up),
        "s_per_step": measured_s / (len(trained) - plan.num_warm_up),
        "tokens_trained": sum(books.of_batch.values()),
        "tokens_generated": clock["num_tokens"],
        "tokens_not_in_the_log": clock["num_tokens"] - books.generated,
        "tokens_discarded": clock["num_tokens"] - books.generated + books.lost + books.of_closed(state),
        "halts": books.num_halts,
        "engine_busy_s": clock["busy_s"],
        "engine_late_s": clock["late_s"],
        "cpu_s": difference(cpu_seconds(watched), before),
    }


def in_flight(state: LedgerState) -> bool:
    return any(group.stage is Stage.IN_FLIGHT for group in state.groups.values())


class TokenBooks:
    """Where the response tokens of a log are."""

    def __init__(self) -> None:
        self.generated = 0
        self.lost = 0  # of attempts that the next one did not go on from
        self.of_batch: dict[int, int] = {}  # by step
        self.num_halts = 0
        self._ends: dict[int, GroupCompleted | GroupAborted] = {}  # newest by group

    def add(self, event: Message) -> None:
        """Take the next event of the log into account."""
        match event:
            case GroupCompleted() | GroupAborted():
                before = self._ends.get(event.group_id)
                if before is None or event.attempt > before.attempt:
                    self._ends[event.group_id] = event
                    self._end_attempt(event, before)
            case BatchReady():
                groups = [self._ends[ref.group_id] for ref in event.groups]
                self.of_batch[event.step] = sum(map(tokens_of, groups))
            case RoundHalted():
                self.num_halts += 1
            case _:
                pass

    def _end_attempt(self, end: GroupCompleted | GroupAborted, before: GroupCompleted | GroupAborted | None) -> None:
        """A sample goes on from another if its segments begin with those of the other."""
        now = {sample.index: sample for sample in end.samples}
        self.generated += tokens_of(end)
        for sample in before.samples if before is not None else ():
            segments = now[sample.index].segments if sample.index in now else ()
            if segments[: len(sample.segments)] == sample.segments:
                self.generated -= sample.response_len
            else:
                self.lost += sample.response_len

    def of_closed(self, state: LedgerState) -> int:
        """Tokens of groups that ended without being trained."""
        trained = {ref.group_id for batch in state.batches.values() for ref in batch.groups}
        return sum(tokens_of(end) for group, end in self._ends.items() if group not in {*trained, *state.groups})


def tokens_of(end: GroupCompleted | GroupAborted) -> int:
    return sum(sample.response_len for sample in end.samples)


async def clock_of(engine_url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{engine_url}/clock") as answer:
        return await answer.json()


if __name__ == "__main__":
    sys.exit(main())
