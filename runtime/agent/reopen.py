"""A run's log for a spectator: from its bus while an agent runs it, else from a copy of what the bus stored."""

import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from messages import Plane
from messages.subjects import RUN_NAME, stream_of
from runtime.agent.claims.claim import kept_unclaimed
from runtime.agent.claims.rundir import BUS_FILE, TOPOLOGY_FILE
from runtime.agent.supervision import guardian
from runtime.agent.supervision.spawn import Child
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.limits import BusLimits
from runtime.bus.nats.server import STORED_STREAMS, ServerSettings, server_command, wait_ready, write_config
from runtime.ledger.archive import RunEvents, history, start_state
from runtime.ledger.fold import LedgerState
from runtime.secrets import Login, Secret, with_login

RUNS = Path("runs")
STREAMS = Path("nats") / STORED_STREAMS  # in the run directory
LIMITS = BusLimits(connect_timeout_s=2.0, publish_timeout_s=10.0)
SERVER_STOP_S = 5.0
OPEN_TIMEOUT_S = 15.0  # an agent that starts, or ends, has neither a bus nor a store to copy for a moment
LOOK_AGAIN_S = 0.1


class NoSuchRun(Exception):
    """There is no run of this name or in this directory."""


class NoLog(Exception):
    """The run's log cannot be read; the text says why."""


class _RunTable(msgspec.Struct, frozen=True):
    name: str


class _BusTable(msgspec.Struct, frozen=True):
    url: str | None = None


class _StoredTopology(msgspec.Struct, frozen=True):
    """What a spectator needs of topology.json, whichever version wrote it."""

    run: _RunTable
    bus: _BusTable = _BusTable()


class FoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run on disk."""

    name: str
    directory: Path
    bus_url: str | None = None  # of a server that is not the run's own


class OpenedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log that can be read."""

    events: RunEvents
    begins: LedgerState | None  # the state before the first event, where what came before is lost
    live: bool  # read from the run's bus, so it may still grow


def find_run(word: str, runs: Path = RUNS) -> FoundRun:
    """A run by its name under `runs`, else by its directory.

    Raises:
        NoSuchRun: neither is there.
    """
    directory = next((path for path in (runs / word, Path(word)) if _holds_a_run(path)), None)
    if directory is None:
        raise NoSuchRun(f"no run {word!r}: neither {runs / word} nor {word} is the directory of a run")
    stored = directory / TOPOLOGY_FILE
    if not stored.exists():
        name = directory.resolve().name
        if RUN_NAME.fullmatch(name) is None:
            raise NoSuchRun(f"{directory} has no {TOPOLOGY_FILE}, and its own name cannot be that of a run")
        return FoundRun(name=name, directory=directory)
    try:
        topology = msgspec.json.decode(stored.read_bytes(), type=_StoredTopology)
    except msgspec.DecodeError as error:  # a ValidationError is one
        raise NoSuchRun(f"{stored} cannot be read: {error}") from error
    return FoundRun(name=topology.run.name, directory=directory, bus_url=topology.bus.url)


def _holds_a_run(path: Path) -> bool:
    return any((path / part).exists() for part in (TOPOLOGY_FILE, BUS_FILE, STREAMS))


@asynccontextmanager
async def opened_log(run: FoundRun) -> AsyncGenerator[OpenedLog, None]:
    """The run's events, archived ones too, for the duration of a block. Nothing is written to the run.

    While an agent holds the run directory, they come from its bus; otherwise from a server of this process on a copy of
    the event stream, so that neither the store nor an agent that starts meanwhile is touched. Only while files are
    copied is an agent kept from starting.

    Raises:
        NoLog: no bus answers and there is nothing to copy.
        BusUnavailable: the server went away during the block.
    """
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="physarum-log-")))
        url = await _live_url(run, scratch)
        live = url is not None
        if url is None:
            url = await stack.enter_async_context(_server_on(scratch))
        bus = await stack.enter_async_context(Bus.connect(url, run.name, name="spectator", limits=LIMITS))
        events = await stack.enter_async_context(history(bus, run.directory))
        yield OpenedLog(events=events, begins=await start_state(bus, run.directory), live=live)


async def _live_url(run: FoundRun, scratch: Path) -> str | None:
    """The URL of the run's bus, or None once its events have been copied.

    Raises:
        NoLog: neither could be had in time.
    """
    problem = "its bus was never up"
    with anyio.move_on_after(OPEN_TIMEOUT_S):
        while True:
            if run.bus_url is None and await anyio.to_thread.run_sync(_copy_events, run, scratch):
                return None
            url = _url_in(run.directory) or run.bus_url  # the former has the login
            if url is not None:
                try:
                    await _look(url, run.name)
                except BusError as error:
                    problem = str(error)
                else:
                    return url
            await anyio.sleep(LOOK_AGAIN_S)  # another process starts or ends; it sends us nothing
    raise NoLog(f"the log of run {run.name} cannot be reached: {problem}")


def _copy_events(run: FoundRun, scratch: Path) -> bool:
    """Copy the stored events, unless the run is in somebody's hands.

    Raises:
        NoLog: nothing runs and nothing is stored.
    """
    stream = STREAMS / stream_of(run.name, Plane.EVENT)
    with kept_unclaimed(run.directory) as unclaimed:
        if not unclaimed or guardian.find(f"@{run.directory.resolve()}"):  # left by a killed agent, for a moment
            return False
        if not (run.directory / stream).exists():
            raise NoLog(f"run {run.name} has no log: nothing runs it, and {run.directory} stores no events")
        shutil.copytree(run.directory / stream, scratch / stream, ignore=shutil.ignore_patterns("obs"))  # consumers
        return True


def _url_in(directory: Path) -> str | None:
    path = directory / BUS_FILE
    return path.read_text().strip() or None if path.exists() else None


async def _look(url: str, name: str) -> None:
    """Raises BusError if no server answers there, or it has no such log."""
    async with Bus.connect(url, name, name="spectator", limits=LIMITS) as bus:
        await bus.state(Plane.EVENT)


@asynccontextmanager
async def _server_on(directory: Path) -> AsyncGenerator[str, None]:
    """A server for the duration of a block, which dies with this process; its URL."""
    login = Login(user="spectator", password=Secret.random())
    config = write_config(directory / "nats.conf", ServerSettings(store_dir=directory / "nats", login=login))
    command = [*server_command(config, directory), "--log", str(directory / "nats.log")]
    server = await Child.start(command, os.environ)
    try:
        os.close(server.output)  # it writes to its log
        ports = await wait_ready(directory, server.pid, login=login)
        yield with_login(ports.url, login)
    finally:
        server.ask_to_stop()
        with anyio.move_on_after(SERVER_STOP_S, shield=True):
            await server.wait()
        server.kill()
        with anyio.CancelScope(shield=True):
            await server.wait()
