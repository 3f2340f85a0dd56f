"""An observer of a long run: from the command to a page with all events, first and again, and beside a live run.

It writes the directory of a run with an archive of events, opens it with `bin/watch RUN --page`, and follows the page
as a browser does. `again` starts from the snapshot that `first` left. `live` publishes events at a steady rate to a
server, which the same command follows with one page open.

Run: python -m tests.bench.bench_observer
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import psutil

from actors.observer.observing import SNAPSHOT_FILE
from runtime.process.logs import configure_logging
from tests.actors.observer.test_following import a_run
from tests.bench.rig import ROOT, rounded
from tests.support.archived_run import events_of_a_run, make_archived_run

TARGETS = {"first_s": 60.0, "again_s": 10.0, "peak_mb": 150.0}
OPEN_S = 600.0
LONGEST_LINE = 64 * 1024 * 1024  # bytes of one state of the page


@contextmanager
def watching(directory: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Run the command for the duration of a block; yield its process and the URL of its page, with the secret."""
    command = [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "watch", str(directory), "--trust"]
    process = psutil.Popen([*command, "--page"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    try:
        assert process.stdout.readline().startswith("page "), "the command shows no page"
        asked = subprocess.run([*command, "--url"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
        yield process, asked.stdout.strip()
    finally:
        process.terminate()
        process.wait(timeout=10)


@asynccontextmanager
async def page_of(url: str) -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
    """Open a page as a browser does; yield its states."""
    place, _, secret = url.partition("#token=")
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {secret}"},
        read_bufsize=LONGEST_LINE,
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        async with session.get(place) as answer:
            assert answer.status == 200

        async def states() -> AsyncGenerator[dict[str, Any]]:
            ticket = await (await session.post(f"{place}ticket")).text()
            async with session.get(f"{place}events", params={"ticket": ticket}) as stream:
                async for line in stream.content:
                    if line.startswith(b"data: "):
                        yield msgspec.json.decode(line.removeprefix(b"data: "))

        yield states()


def used(process: psutil.Process) -> tuple[float, float]:
    """CPU seconds of a process so far, and the most memory that it held, in MB."""
    times = process.cpu_times()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert peak is not None
    return times.user + times.system, int(peak[1]) / 1e3


async def opened(directory: Path, num_events: int) -> dict[str, Any]:
    """Seconds, CPU and memory from the command to a page that shows all events."""
    began = time.monotonic()
    with watching(directory) as (process, url), anyio.fail_after(OPEN_S):
        shown_s, states = time.monotonic() - began, 0
        async with page_of(url) as page:
            async for state in page:
                states += 1
                if state["now"]["num_events"] >= num_events:
                    break
        took_s, (cpu_s, peak_mb) = time.monotonic() - began, used(process)
    return {"took_s": took_s, "cpu_s": cpu_s, "peak_mb": peak_mb, "url_after_s": shown_s, "states_of_the_page": states}


async def beside_a_live_run(directory: Path, seconds: float, rate: float) -> dict[str, Any]:
    """CPU share and memory of the command with one page open, while events come at a rate."""
    num_events, states = int(seconds * rate), 0
    async with a_run(directory) as (bus, _):
        events = events_of_a_run(num_events)
        await bus.publish(next(events))
        with watching(directory) as (process, url), anyio.fail_after(OPEN_S + 2 * seconds):
            async with page_of(url) as page, anyio.create_task_group() as tasks:
                await anext(page)
                before, began = used(process), time.monotonic()

                async def publish() -> None:
                    for number in range(1, num_events):
                        await anyio.sleep(max(0.0, began + number / rate - time.monotonic()))
                        await bus.publish(next(events))

                tasks.start_soon(publish)
                async for state in page:
                    states += 1
                    if state["now"]["num_events"] >= num_events:
                        break
                tasks.cancel_scope.cancel()
            took_s, after = time.monotonic() - began, used(process)
    return {
        "events": num_events,
        "events_per_s": num_events / took_s,
        "cpu_percent_of_a_core": 100 * (after[0] - before[0]) / took_s,
        "peak_mb": after[1],
        "states_of_the_page": states,
    }


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"targets": TARGETS}
    directory = args.run or folder / "long"
    if not directory.exists():
        began = time.monotonic()
        await make_archived_run(directory, args.events)
        results["made_s"] = time.monotonic() - began
    (directory / SNAPSHOT_FILE).unlink(missing_ok=True)
    results["archive_mb"] = sum(path.stat().st_size for path in (directory / "archive").iterdir()) / 1e6
    results["first"] = await opened(directory, args.events)
    results["again"] = await opened(directory, args.events)
    snapshot = directory / SNAPSHOT_FILE
    results["snapshot_mb"] = snapshot.stat().st_size / 1e6 if snapshot.exists() else 0.0
    if args.live_s:
        live = folder / "small"
        live.mkdir()
        results["live"] = await beside_a_live_run(live, args.live_s, args.rate)
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="archived events, at least")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="directory of the long run; made if it is missing, and kept"
    )
    parser.add_argument("--live-s", type=float, default=60.0, help="seconds beside a live run; 0: leave that out")
    parser.add_argument("--rate", type=float, default=100.0, help="events per second of the live run")
    args = parser.parse_args(argv)
    configure_logging("bench", "observer")
    with tempfile.TemporaryDirectory() as folder:
        results = anyio.run(measure, args, Path(folder))
    print(json.dumps(rounded(results), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
