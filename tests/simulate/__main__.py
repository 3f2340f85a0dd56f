"""Simulated runs by seed, each audited. A run that breaks is shrunk and printed with its seed.

Run: python -m tests.simulate --seeds 100           seeds 0 to 99
     python -m tests.simulate --first 1234 --seeds 1 --log     one run, with its whole log

Prints one line of JSON at the end; the exit code is 1 if a run broke. Equal seeds give equal logs on any machine: the
command starts itself again with a fixed PYTHONHASHSEED.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from typing import Any, Final

import msgspec

from tests.simulate.audit import audit
from tests.simulate.faults import Fault
from tests.simulate.world import Broken, World

HASH_SEED: Final = "PYTHONHASHSEED"
LAST_EVENTS: Final = 40  # of a broken run that are printed


def main(argv: list[str] | None = None) -> int:
    """Play the runs; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="number of runs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--cpu-s", type=float, default=float("inf"), help="begin no run after so much CPU time")
    parser.add_argument("--log", action="store_true", help="print what happened in each run, and its events")
    args = parser.parse_args(argv)
    if os.environ.get(HASH_SEED) != "0":
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.simulate", *sys.argv[1:]], {**os.environ, HASH_SEED: "0"}
        )
    warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that a killed process had not begun
    sys.unraisablehook = lambda _: None  # of `finally` blocks of killed processes, which have no loop
    gc.collect()
    gc.freeze()
    digest, broken, struck = hashlib.sha256(), list[int](), Counter[str]()
    points: set[str] = set()
    num_runs = num_events = 0
    begun_s = time.process_time()
    for seed in range(args.first, args.first + args.seeds):
        if time.process_time() - begun_s > args.cpu_s:
            break
        world = World(seed)
        error = outcome(world)
        num_runs += 1
        num_events += len(world.server.history)
        struck.update(fault.kind for fault in world.all_faults)
        points |= world.faults.points
        digest.update(digest_of(world).encode())
        if args.log:
            print_line(f"seed {seed}: {digest_of(world)[:16]} {len(world.server.history)} messages")
        if args.log and args.seeds == 1:
            show(world, len(world.server.history))
        if error is not None:
            broken.append(seed)
            show_broken(seed, world, error)
    result = {
        "runs": num_runs,
        "broken": broken,
        "messages": num_events,
        "faults": dict(sorted(struck.items())),
        "crash_points": len(points),
        "cpu_s": round(time.process_time() - begun_s, 1),
        "digest": digest.hexdigest()[:16],
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if broken else 0


def outcome(world: World) -> str | None:
    """Play and audit a run; return what broke."""
    try:
        audit(world.play())
    except Broken as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a fault of the simulation is reported with its seed, too
        return f"the simulation failed: {error!r}"
    return None


def digest_of(world: World) -> str:
    """A digest of all that was stored."""
    found = hashlib.sha256()
    for name, message in world.server.history:
        found.update(f"{name} {message.seq} {message.subject} {message.time_s:.9f}".encode())
        found.update(message.data)
    return found.hexdigest()


def shrunk(seed: int, faults: list[Fault], error: str) -> tuple[list[Fault], str]:
    """Leave out faults as long as the run breaks; return what is left, and how it breaks then."""
    place = 0
    while place < len(faults):
        fewer = [*faults[:place], *faults[place + 1 :]]
        still = outcome(World(seed, faults=fewer))
        if still is None:
            place += 1
        else:
            faults, error = fewer, still
    return faults, error


def show_broken(seed: int, world: World, error: str) -> None:
    """Print a broken run: its seed, its recipe, the faults that it takes, and the end of its log."""
    faults, error = shrunk(seed, world.all_faults, error)
    least = World(seed, faults=faults)
    outcome(least)
    print_line(f"seed {seed} is broken: {error}")
    print_line(f"recipe: {least.recipe}")
    print_line(f"{len(faults)} of {len(world.all_faults)} faults are needed:")
    for fault in faults:
        print_line(f"  {fault}")
    show(least, LAST_EVENTS)


def show(world: World, num_events: int) -> None:
    """Print what happened in a run, and its last events."""
    lines = [(float(note[:9]), note) for note in world.notes]
    for seq, at_s, event in world.timed_log()[-num_events:]:
        text = msgspec.json.encode(event).decode()
        lines.append((at_s, f"{at_s:9.3f}  event {seq} {type(event).__name__} {text[:300]}"))
    for _, line in sorted(lines, key=lambda item: item[0]):
        print_line(line)


def print_line(text: str) -> None:
    """Print a line for people."""
    sys.stderr.write(text + "\n")


def results_of(printed: str) -> Any:
    """Read what the command printed at its end."""
    return json.loads(printed.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
