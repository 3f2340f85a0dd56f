"""Opens a run's log read-only: from its bus while a daemon runs it, else from a copy of the stored events."""

import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec

from messages import Plane
from messages.subjects import RUN_NAME, stream_of
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.limits import BusLimits
from runtime.bus.nats.certificate import CERTIFICATE_FILE
from runtime.bus.nats.server import ServerSettings, server_command, stored_streams, wait_ready, write_config
from runtime.ledger.archive import RunEvents, history, start_state
from runtime.ledger.fold import LedgerState
from runtime.node.claims.claim import kept_unclaimed
from runtime.node.claims.rundir import BUS_FILE, TOPOLOGY_FILE
from runtime.node.supervisor import guardian
from runtime.node.supervisor.spawn import Child
from runtime.util.secrets import Login, Secret, with_login

RUNS = Path("runs")
BUS_DIRECTORY = "bus"  # in the run directory
STORE = "nats"  # in the run directory
LIMITS = BusLimits(connect_timeout_s=2.0, publish_timeout_s=10.0)
SERVER_STOP_S = 5.0
OPEN_TIMEOUT_S = 15.0  # a daemon that starts or ends has briefly neither a bus nor a store to copy
LOOK_AGAIN_S = 0.1


class NoSuchRun(Exception):
    """There is no run with this name or in this directory."""


class NoLog(Exception):
    """The run's log cannot be read; the text says why."""


class _RunTable(msgspec.Struct, frozen=True):
    name: str


class _BusTable(msgspec.Struct, frozen=True):
    url: str | None = None


class _NodeTable(msgspec.Struct, frozen=True):
    address: str | None = None


class _StoredTopology(msgspec.Struct, frozen=True):
    """The needed part of topology.json, whichever version wrote it."""

    run: _RunTable
    bus: _BusTable = _BusTable()
    nodes: dict[str, _NodeTable] = {}


class FoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run on disk."""

    name: str
    directory: Path
    bus_url: str | None = None  # of an external server
    addresses: Mapping[str, str | None] = {}  # settings of the nodes; none: not set


class OpenedLog(msgspec.Struct, frozen=True, kw_only=True):
    """An opened log."""

    events: RunEvents
    begins: LedgerState | None  # state before the first event, if earlier events are lost
    live: bool  # read from the run's bus: it may still grow


def find_run(word: str, runs: Path = RUNS) -> FoundRun:
    """Find a run by its name under `runs`, else by its directory.

    Raises:
        NoSuchRun: neither exists.
    """
    directory = next((path for path in (runs / word, Path(word)) if _holds_a_run(path)), None)
    if directory is None:
        raise NoSuchRun(f"no run {word!r}: neither {runs / word} nor {word} is the directory of a run")
    stored = directory / TOPOLOGY_FILE
    if not stored.exists():
        name = directory.resolve().name
        if RUN_NAME.fullmatch(name) is None:
            raise NoSuchRun(f"{directory} has no {TOPOLOGY_FILE}, and its name is not a valid run name")
        return FoundRun(name=name, directory=directory)
    try:
        topology = msgspec.json.decode(stored.read_bytes(), type=_StoredTopology)
    except msgspec.DecodeError as error:  # a ValidationError is one
        raise NoSuchRun(f"{stored} cannot be read: {error}") from error
    addresses = {name: node.address for name, node in topology.nodes.items()}
    return FoundRun(name=topology.run.name, directory=directory, bus_url=topology.bus.url, addresses=addresses)


def _holds_a_run(path: Path) -> bool:
    parts = (path / TOPOLOGY_FILE, path / BUS_FILE, stored_streams(path / STORE))
    return any(part.exists() for part in parts)


@asynccontextmanager
async def opened_log(run: FoundRun) -> AsyncGenerator[OpenedLog, None]:
    """Open a run's events, archived ones included, for the duration of a block. Write nothing to the run.

    While a daemon holds the run directory, events come from its bus. Otherwise this process runs a server on a copy of
    the event stream. That does not change the store. A daemon may start meanwhile, except while the files are copied.

    Raises:
        NoLog: no bus answers and there is no store to copy.
        BusUnavailable: the server went away during the block.
    """
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="physarum-log-")))
        url = await live_url(run, scratch, partial(_look, run))
        live = url is not None
        if url is None:
            login = Login(user="spectator", password=Secret.random())
            settings = ServerSettings(store_dir=scratch / STORE, login=login)
            url = await stack.enter_async_context(server_in(scratch, settings))
        certificate = certificate_in(run.directory) if live else None
        connecting = Bus.connect(url, run.name, name="spectator", limits=LIMITS, certificate=certificate)
        bus = await stack.enter_async_context(connecting)
        events = await stack.enter_async_context(history(bus, run.directory))
        yield OpenedLog(events=events, begins=await start_state(bus, run.directory), live=live)


async def live_url(run: FoundRun, scratch: Path, look: Callable[[str], Awaitable[None]]) -> str | None:
    """Return the URL of the run's bus, or None after its events were copied.

    Args:
        run: the run.
        scratch: directory for the copy.
        look: checks the bus at a URL; raises BusError if it cannot be read.

    Raises:
        NoLog: neither was possible in time.
    """
    problem = "its bus did not start"
    with anyio.move_on_after(OPEN_TIMEOUT_S):
        while True:
            if run.bus_url is None and await anyio.to_thread.run_sync(_copy_events, run, scratch):
                return None
            url = url_in(run.directory) or run.bus_url  # the stored URL contains the login
            if url is not None:
                try:
                    await look(url)
                except BusError as error:
                    problem = str(error)
                else:
                    return url
            await anyio.sleep(LOOK_AGAIN_S)  # another process starts or ends; there is no event to wait for
    raise NoLog(f"the log of run {run.name} cannot be reached: {problem}")


def _copy_events(run: FoundRun, scratch: Path) -> bool:
    """Copy the stored events; return False if a daemon or its processes still run.

    Raises:
        NoLog: nothing runs, and nothing is stored.
    """
    name, copies = stream_of(run.name, Plane.EVENT), stored_streams(scratch / STORE)
    with kept_unclaimed(run.directory) as unclaimed:
        if not unclaimed or guardian.find(f"@{run.directory.resolve()}"):  # processes of a killed daemon remain briefly
            return False
        stored = stored_streams(run.directory / STORE) / name
        if not stored.exists():
            raise NoLog(f"run {run.name} has no log: no node daemon runs it, and {run.directory} stores no events")
        shutil.copytree(stored, copies / name, ignore=shutil.ignore_patterns("obs"))  # consumers
        return True


def url_in(directory: Path) -> str | None:
    """Return the URL of a run's bus with the login of its nodes; None if no node daemon has written it."""
    path = directory / BUS_FILE
    return path.read_text().strip() or None if path.exists() else None


def certificate_in(directory: Path) -> str | None:
    """Return the PEM certificate of a run's own server; None if it uses no TLS."""
    path = directory / BUS_DIRECTORY / CERTIFICATE_FILE
    return path.read_text() if path.exists() and not (url_in(directory) or "").startswith("nats://") else None


async def _look(run: FoundRun, url: str) -> None:
    """Check the bus. Raises BusError if no server answers, or it has no such log."""
    certificate = certificate_in(run.directory)
    async with Bus.connect(url, run.name, name="spectator", limits=LIMITS, certificate=certificate) as bus:
        await bus.state(Plane.EVENT)


@asynccontextmanager
async def server_in(directory: Path, settings: ServerSettings) -> AsyncGenerator[str, None]:
    """Run a NATS server for the duration of a block and yield its URL with the login. It dies with this process.

    Args:
        directory: of its config, its log and its file of ports.
        settings: of the server.

    Raises:
        BusUnavailable: it ended, for example because its port is taken.
    """
    config, login = write_config(directory / "nats.conf", settings), settings.login
    command = [*server_command(config, directory), "--log", str(directory / "nats.log")]
    server = await Child.start(command, os.environ)
    try:
        os.close(server.output)  # it writes to its log
        certificate = None if settings.certificate is None else settings.certificate.pem()
        ports = await wait_ready(directory, server.pid, login=login, certificate=certificate)
        yield with_login(ports.url, login)
    finally:
        server.ask_to_stop()
        with anyio.move_on_after(SERVER_STOP_S, shield=True):
            await server.wait()
        server.kill()
        with anyio.CancelScope(shield=True):
            await server.wait()
