"""Many members of a role on one server: joins at once, renewals of all, and the server's cost while nothing happens.

Each member has a connection of its own, as the daemons of so many nodes do. Prints seconds and a share of a core.

Run: python -m tests.bench.bench_roster
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import psutil

from runtime.bus.bus import Bus
from runtime.bus.limits import BusLimits, StreamLimits
from runtime.bus.roster import Member, Roster
from runtime.process.logs import configure_logging
from tests.support.running_server import running_server

RUN = "bench"
ROLE = "node"
RENEW_EVERY_S = 10.0  # while idle
RENEWALS = 5  # of all members; their median counts
LIMITS = BusLimits(connect_timeout_s=60.0)


async def timed(members: int, work: Callable[[int], Awaitable[object]]) -> float:
    """Seconds until all have done it, begun at once."""
    begun = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(members):
            group.start_soon(work, number)
    return time.perf_counter() - begun


async def measure(num_members: int, idle_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        async with running_server(Path(directory)) as server, AsyncExitStack() as opened:
            buses: dict[int, Bus] = {}

            async def connect(number: int) -> None:
                buses[number] = await opened.enter_async_context(
                    Bus.connect(server.url, RUN, name=f"m{number}", limits=LIMITS)
                )

            begun = time.perf_counter()
            for number in range(num_members):  # one after the other: an exit stack belongs to one task
                await connect(number)
            connected_s = time.perf_counter() - begun
            await buses[0].ensure_streams(StreamLimits())
            rosters = [Roster(buses[number], renew_every_s=RENEW_EVERY_S) for number in range(num_members)]
            members: dict[int, Member] = {}

            async def enter(number: int) -> None:
                members[number] = await rosters[number].enter(ROLE, f"{ROLE}.{number}", f"n{number}")

            held: dict[int, Any] = {}

            async def renew(number: int) -> None:
                held[number] = await rosters[number]._hold(ROLE, members[number], held.get(number))

            found = {"connect_s": connected_s, "join_s": await timed(num_members, enter)}
            await timed(num_members, renew)  # the first one reads the key too
            found["renew_s"] = statistics.median([await timed(num_members, renew) for _ in range(RENEWALS)])
            begun = time.perf_counter()
            listed = await rosters[0].members(ROLE)
            found["list_s"] = time.perf_counter() - begun
            if len(listed.members) != num_members:
                raise RuntimeError(f"{len(listed.members)} of {num_members} are on the roster")
            async with anyio.create_task_group() as group:
                for number in range(num_members):
                    group.start_soon(rosters[number].keep_joined, ROLE, members[number])
                await anyio.sleep(min(2.0, idle_s))  # the first renewals
                process = psutil.Process(server.pid)
                before, begun = sum(process.cpu_times()[:2]), time.perf_counter()
                await anyio.sleep(idle_s)
                spent_s = sum(process.cpu_times()[:2]) - before
                found["idle_core_share"] = spent_s / (time.perf_counter() - begun)
                group.cancel_scope.cancel()
            return {name: round(value, 4) for name, value in {"members": num_members, **found}.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=256)
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds over which the idle server is measured")
    args = parser.parse_args(argv)
    configure_logging("bench", RUN)
    found = anyio.run(measure, args.members, args.idle_s, backend_options={"use_uvloop": True})
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
