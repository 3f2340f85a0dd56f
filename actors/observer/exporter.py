"""Process of a node that answers `/metrics` for Prometheus until SIGTERM. The run starts it, and does not wait for it.

The home node's tells what the log says; each node's tells the facts of its machine. Until it has read the whole log,
it leaves the former out, so that Prometheus never sees a counter that is too low.
"""

import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import psutil
from aiohttp import web
from anyio.lowlevel import checkpoint

from actors.observer.exposition import COUNTER, GAUGE, OPENMETRICS, TEXT, Family, Labels, families_of, rendered
from actors.observer.observed import Observed
from actors.observer.observing import observing
from actors.observer.page import observed_of
from runtime.bus.addresses import NODE_VARIABLE, split_host_port
from runtime.bus.errors import BusError
from runtime.http.connections import served as served_at
from runtime.node.external_clients import ClientsUnreadable
from runtime.node.reopen import FoundRun, NoLog, find_run
from runtime.process.main import spare_the_collector
from runtime.settings.placement import is_loopback
from runtime.util.errors import flatten
from runtime.util.exit_codes import EXIT_OK
from runtime.util.threads import BoundedThreads

RUN_VARIABLE: Final = "PHYSARUM_RUN"
RUN_DIR_VARIABLE: Final = "PHYSARUM_RUN_DIR"
PROCESS_VARIABLE: Final = "PHYSARUM_PROCESS"
WITH_LOG: Final = "log"  # argument of the home node's
AGAIN_S: Final = 2.0  # after a log that cannot be read
FACTS_TIMEOUT_S: Final = 2.0  # of a disk that does not answer
CPU_MODES: Final = ("user", "system", "idle", "iowait")

log = logging.getLogger("prometheus")


class Exporter:
    """The HTTP side.

    Args:
        run: name of the run.
        node: this node.
        run_dir: directory of the run on this node.
        observed: fold of the run's log; None: another node tells what it says.
    """

    def __init__(self, run: str, node: str, run_dir: Path, observed: Observed | None) -> None:
        self.caught_up = False  # the whole log is folded
        self._labels = {"run": run}
        self._node = node
        self._run_dir = run_dir
        self._observed = observed
        self._threads = BoundedThreads(1)

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        return application

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        openmetrics = "application/openmetrics-text" in request.headers.get("Accept", "")
        families = await self._facts()
        if self._observed is not None:
            text = "1 once the whole log is read; before, metrics of the run are left out."
            families.append(Family("exporter_caught_up", GAUGE, text, [({}, float(self.caught_up))]))
            families += families_of(self._observed) if self.caught_up else ()
        text = rendered(families, self._labels, openmetrics=openmetrics)
        return web.Response(body=text.encode(), headers={"Content-Type": OPENMETRICS if openmetrics else TEXT})

    async def _facts(self) -> list[Family]:
        """Return the facts of this machine; none while it does not answer."""
        if not self._threads.is_full:
            with suppress(OSError, psutil.Error), anyio.move_on_after(FACTS_TIMEOUT_S):
                return await self._threads.run(lambda: facts_of(self._node, self._run_dir))
        return []


def facts_of(node: str, run_dir: Path) -> list[Family]:
    """Return the facts of this machine and of the run's processes on it, the children of this process's parent."""
    times, memory, disk = psutil.cpu_times(), psutil.virtual_memory(), psutil.disk_usage(str(run_dir))
    at: Labels = {"node": node}
    modes = [({**at, "mode": mode}, float(getattr(times, mode, 0.0))) for mode in CPU_MODES]
    resident, seconds = use_of_processes(os.getppid())
    return [
        Family("node_cpu_seconds", COUNTER, "CPU time of all cores of the machine, by mode.", [*modes]),
        Family(
            "node_memory_bytes",
            GAUGE,
            "Memory of the machine.",
            [
                ({**at, "kind": "total"}, memory.total),
                ({**at, "kind": "available"}, memory.available),
            ],
        ),
        Family(
            "run_disk_bytes",
            GAUGE,
            "The disk that holds the run directory.",
            [
                ({**at, "kind": "total"}, disk.total),
                ({**at, "kind": "free"}, disk.free),
            ],
        ),
        Family(
            "process_resident_bytes",
            GAUGE,
            "Resident memory of a process of the run and its children; pages that they share count for each.",
            [({**at, "process": name}, number) for name, number in sorted(resident.items())],
        ),
        Family(
            "process_cpu_seconds",
            COUNTER,
            "CPU time of a process of the run and its children since it started.",
            [({**at, "process": name}, number) for name, number in sorted(seconds.items())],
        ),
    ]


def use_of_processes(daemon: int) -> tuple[Mapping[str, int], Mapping[str, float]]:
    """Return the resident bytes and the CPU seconds of the processes of a node daemon, each with its children."""
    resident: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in psutil.Process(daemon).children():
        with suppress(psutil.Error):  # it ends, or is of another user
            name = process.environ().get(PROCESS_VARIABLE)
            for one in (process, *process.children(recursive=True)) if name is not None else ():
                with suppress(psutil.Error):
                    resident[str(name)] += one.memory_info().rss
                    seconds[str(name)] += sum(one.cpu_times()[:4])  # with children that ended
    return resident, seconds


async def follow(run: FoundRun, observed: Observed, exporter: Exporter) -> None:
    """Fold the events of a run, and go on when it is started again. Never returns."""
    while True:
        try:
            await _fold(run, observed, waits=exporter.caught_up)
            exporter.caught_up = True
        except* (NoLog, BusError, ClientsUnreadable, OSError) as errors:
            log.warning("the log cannot be read: %s", flatten(errors)[0])
            await anyio.sleep(AGAIN_S)


async def _fold(run: FoundRun, observed: Observed, *, waits: bool) -> None:
    """Fold the events up to the newest one, or, if it waits, as long as a node daemon runs the run."""
    async with observing(run, observed, note=log.warning, waits=waits) as folding:
        async for _ in folding.batches():
            await checkpoint()  # requests get their turn between two batches of a long history
        live = folding.events.live
    if waits and not live:
        await anyio.sleep(AGAIN_S)


@asynccontextmanager
async def served(exporter: Exporter, host: str, port: int) -> AsyncGenerator[int, None]:
    """Answer `/metrics` for the duration of a block; yield the port.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    async with served_at(exporter.application(), host, port) as got:
        yield got


async def _run(address: str, *, with_log: bool) -> None:
    host, port = split_host_port(address)
    name, node = os.environ[RUN_VARIABLE], os.environ[NODE_VARIABLE]
    run_dir = Path(os.environ[RUN_DIR_VARIABLE])
    run = find_run(str(run_dir), trust=True) if with_log else None
    observed = None if run is None else observed_of(run)[0]
    exporter = Exporter(name, node, run_dir, observed)
    async with served(exporter, host, port) as got, anyio.create_task_group() as tasks:
        reach = "" if is_loopback(host) else "; other machines reach it, without TLS and without a password"
        log.info("/metrics is served on port %d of %s%s", got, host, reach)
        if run is not None and observed is not None:
            tasks.start_soon(follow, run, observed, exporter)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break
        tasks.cancel_scope.cancel()


def main(arguments: Sequence[str]) -> int:
    """Serve the metrics of the run in PHYSARUM_RUN_DIR at the address in the first argument."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    spare_the_collector()
    anyio.run(lambda: _run(arguments[0], with_log=WITH_LOG in arguments[1:]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
