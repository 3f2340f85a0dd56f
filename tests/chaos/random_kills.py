"""Random kill -9 of a run's processes for many minutes; then the run is finished and its whole log audited.

Run: python -m tests.chaos.random_kills --minutes 30 --seed 7

Any process may be killed: the NATS server, the router, engines, trainer ranks, CPU actors, and the node daemon itself,
which the same command then restarts. After the given time the kills stop. The run gets its last few train steps and
must end by itself. Prints one line of JSON on standard output; the exit code is 0 if every check passed.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import psutil
import structlog

from messages import (
    ActorExited,
    ActorStarted,
    BatchReady,
    BatchTrained,
    GroupCompleted,
    GroupsIssued,
)
from runtime.settings.derived import over_sampling_batch_size
from runtime.settings.load import load_topology
from runtime.settings.topology import Topology
from tests.chaos.audit import Log, audit, read_all
from tests.chaos.harness import LAPTOP, Command, Run
from tests.support.verified import note, ran

DAEMON: Final = "daemon"
WEIGHTS: Final = {DAEMON: 0.3}  # draw weight of a role; default 1. The node daemon's death ends all processes
STEPS_PER_S: Final = 10.0  # more than a run reaches, so that time ends it and not the number of steps
LAST_STEPS: Final = 3  # trained without kills, after the steps already started


class Victims:
    """Chooses processes and times of kills. Deterministic for a seed as long as the same processes live.

    Args:
        seed: Seed of the draws.
        mean_s: Mean seconds between two kills.
        trainer_spacing_s: Shortest time between two kills that end the trainer, in seconds.
    """

    def __init__(self, seed: int, *, mean_s: float, trainer_spacing_s: float) -> None:
        self._random = random.Random(seed)
        self._mean_s = mean_s
        self._spacing_s = trainer_spacing_s
        self._trainer_killed_s = float("-inf")

    def next_wait_s(self) -> float:
        """Seconds until the next kill. Exponentially distributed, so that no moment is more likely than another."""
        return self._random.expovariate(1 / self._mean_s)

    def choose(self, living: Sequence[str], now_s: float) -> str | None:
        """Choose a live process or the node daemon. None: no process may be killed now."""
        rested = now_s - self._trainer_killed_s >= self._spacing_s
        names = [name for name in sorted([*living, DAEMON]) if rested or not _ends_trainer(name)]
        if not living or not names:
            return None
        name = self._random.choices(names, [WEIGHTS.get(name, 1.0) for name in names])[0]
        if _ends_trainer(name):
            self._trainer_killed_s = now_s
        return name


def _ends_trainer(name: str) -> bool:
    return name == DAEMON or name.startswith("trainer")


class Toll(msgspec.Struct, frozen=True, kw_only=True):
    """Kills of a run and their cost."""

    killed: dict[str, int]  # by process
    num_killed: int
    steps: int
    restarts: dict[str, int]  # by process, within the life of a node daemon
    unasked: dict[str, int]  # ends of processes that were not killed, by name and reason
    extra_attempts: int  # groups issued again
    completed_twice: int  # completions beyond the first of a group's attempt
    replayed_steps: int


async def torment(run: Run, victims: Victims, *, seconds: float) -> tuple[list[str], bool]:
    """Kill processes of a run for a time, then stop it with Ctrl-C. Return the killed, and whether the run finished."""
    killed: list[str] = []
    ends, from_seq, finished = anyio.current_time() + seconds, 1, False
    while not finished and anyio.current_time() < ends:
        async with run.started(from_seq=from_seq) as command:
            killed += await _kill_until_the_daemon(command, victims, ends)
            finished = command.log.finished
            family: list[psutil.Process] = []
            if not finished:
                family = command.family()
                command.send(signal.SIGKILL if killed[-1:] == [DAEMON] else signal.SIGINT)
            await command.end()
            await run.gone(family)
            from_seq = command.log.seq + 1
    return killed, finished


async def _kill_until_the_daemon(command: Command, victims: Victims, ends: float) -> list[str]:
    """Kill until the time is over, the run has finished, or the node daemon is next. Return the killed processes."""
    killed: list[str] = []
    while not command.log.finished and (left_s := ends - anyio.current_time()) > 0:
        wait_s = victims.next_wait_s()
        await command.log.read_for(min(wait_s, left_s))
        name = None if wait_s > left_s else victims.choose(command.living(), anyio.current_time())
        if name is None:
            continue
        killed.append(name)
        say(f"kill -9 of {name} after {command.log.trained} steps")
        if name == DAEMON:
            break
        with suppress(ProcessLookupError):  # the process has just ended
            command.log.kill(name)
    return killed


async def finish(run: Run) -> None:
    """Give the run its last steps, wait for its end, and check that no process is left."""
    async with run.reopened() as bus, bus.read(BatchReady) as batches:
        begun = max([received.message.step + 1 async for received in batches.so_far()], default=0)
    run.plan_steps(min(run.num_steps, begun + LAST_STEPS))
    async with run.started() as command:
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)


def toll_of(log: Log, killed: Sequence[str]) -> Toll:
    """Count kills, restarts and repeated work in the log."""
    restarts = Counter(event.actor for _, event in log if isinstance(event, ActorStarted) and event.restarts > 0)
    exits = [event for _, event in log if isinstance(event, ActorExited) and event.reason != "stopped"]
    asked = Counter(killed)
    unasked: Counter[str] = Counter()
    for event in exits:
        if event.exit_code == -signal.SIGKILL and asked[event.actor] > 0:
            asked[event.actor] -= 1
        else:
            unasked[f"{event.actor}: {event.reason}"] += 1
    completed = Counter((event.group_id, event.attempt) for _, event in log if isinstance(event, GroupCompleted))
    issued = [group for _, event in log if isinstance(event, GroupsIssued) for group in event.groups]
    trained = [event for _, event in log if isinstance(event, BatchTrained)]
    return Toll(
        killed=dict(Counter(killed)),
        num_killed=len(killed),
        steps=len({event.step for event in trained}),
        restarts=dict(restarts),
        unasked=dict(unasked),
        extra_attempts=sum(group.attempt > 0 for group in issued),
        completed_twice=sum(completed.values()) - len(completed),
        replayed_steps=sum(event.replay for event in trained),
    )


def decided_by_the_data(topology: Topology) -> bool:
    """Whether the order of the data alone determines the groups of each train step."""
    rollout = topology.rollout
    return (
        rollout.max_staleness == 0
        and rollout.dynamic_filter is None
        and over_sampling_batch_size(rollout) == rollout.rollout_batch_size
    )


def same_at_any_length(topology: Topology) -> list[str]:
    """Settings that make a train step independent of the number of steps, which is chosen at the end only."""
    algorithm, settings = topology.algorithm, []
    if algorithm.entropy_coef_end is not None:
        settings.append(f"algorithm.entropy_coef_end={algorithm.entropy_coef}")
    if topology.optimizer.lr_decay_style != "constant":
        settings.append("optimizer.lr_decay_style=constant")
    return settings


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(argv: list[str] | None = None) -> int:
    """Run from the command line. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0)
    add("--seed", type=int, default=7)
    add("--topology", type=Path, default=LAPTOP)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the topology")
    add("--mean-s", type=float, default=15.0, help="between two kills")
    add("--trainer-spacing-s", type=float, default=60.0, help="at least, between two kills that end the trainer")
    add("--directory", type=Path, help="where the run is kept; default: one that is removed in the end")
    add("--results", type=Path, metavar="DIR", help="note the run on the page of what was verified, beside DIR")
    args = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as scratch:
        directory = (args.directory or Path(scratch)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(json.dumps(report := anyio.run(_attempt, args, directory)) + "\n")
    if args.results is not None:
        where = f"{args.minutes:.0f} minutes, seed {args.seed}"
        note([ran("python -m tests.chaos.random_kills", where, f"{report['num_killed']} kills survived")], args.results)
    return 0


async def _attempt(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    began, seconds = time.monotonic(), args.minutes * 60
    planned = f"train.num_steps={max(1, round(seconds * STEPS_PER_S))}"
    topology = load_topology(args.topology, [*args.set, planned]).topology
    settings = ("train.save_interval=10", *same_at_any_length(topology), *args.set)
    run = Run(
        directory,
        num_steps=topology.train.num_steps,
        eval_interval=None,
        overrides=settings,
        settings=(),
        topology=args.topology.resolve(),
    )
    victims = Victims(args.seed, mean_s=args.mean_s, trainer_spacing_s=args.trainer_spacing_s)
    killed, finished = await torment(run, victims, seconds=seconds)
    if not finished:
        await finish(run)
    books = await audit(run, killed=None, ordered=decided_by_the_data(topology))
    async with run.reopened() as bus:
        toll = toll_of(await read_all(bus, run), killed)
    report = msgspec.to_builtins(toll)
    report |= {"books": msgspec.to_builtins(books), "seconds": round(time.monotonic() - began), "seed": args.seed}
    say(f"{len(killed)} kills survived")
    return report


if __name__ == "__main__":
    sys.exit(main())
