"""Opens a run's log read-only: from its bus while a daemon runs it, else from a copy of the stored events."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

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
from runtime.node.claims.started import was_started_here
from runtime.node.supervisor import guardian
from runtime.node.supervisor.spawn import Child
from runtime.settings.reading.access import Access
from runtime.settings.reading.foreign import TRUST, Asked, harmless_part, is_own, is_written_by_the_user_alone
from runtime.settings.reading.former import in_new_form
from runtime.settings.reading.schema import chosen_keys
from runtime.settings.topology import Topology
from runtime.util.formatting import show
from runtime.util.secrets import Login, Secret, with_login, without_logins

T = TypeVar("T")

RUNS = Path("runs")
BUS_DIRECTORY = "bus"  # in the run directory
STORE = "nats"  # in the run directory
OWN_FILES: Final = (TOPOLOGY_FILE, BUS_FILE)
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
    """A run on disk.

    A stranger may have written the directory of a `foreign` run. Then commands connect to no bus that it
    names, open no file outside of it, and `bus_url` is None.
    """

    name: str
    directory: Path
    foreign: bool = False
    asked: tuple[Asked, ...] = ()  # what a stranger's directory names, and only the user's consent lets in
    bus_url: str | None = None  # of an external server
    addresses: Mapping[str, str | None] = {}  # settings of the nodes; none: not set


class OpenedLog(msgspec.Struct, frozen=True, kw_only=True):
    """An opened log."""

    events: RunEvents
    begins: LedgerState | None  # state before the first event, if earlier events are lost
    live: bool  # read from the run's bus: it may still grow


def find_run(word: str, runs: Path = RUNS, *, trust: bool = False) -> FoundRun:
    """Find a run by its name under `runs`, else by its directory.

    A directory that only the user can write is the user's own below `runs`, and elsewhere if the user started its run
    on this machine. Any directory is, while a process of the user runs the run. Any other may be a stranger's.

    Args:
        word: name or directory.
        runs: directory of the user's runs.
        trust: whether the caller vouches for the directory.

    Raises:
        NoSuchRun: neither exists, or a stranger's directory holds a link or a special file.
    """
    directory = next((path for path in (runs / word, Path(word)) if _holds_a_run(path)), None)
    if directory is None:
        raise NoSuchRun(f"no run {word!r}: neither {runs / word} nor {word} is the directory of a run")
    stranger = not (is_own(directory, runs, OWN_FILES) or _is_run_by_the_user(directory) or _was_started(directory))
    if stranger and not trust:
        _refuse_links(directory)
    found = _run_in(directory)
    if stranger:
        found = msgspec.structs.replace(found, asked=tuple(_asked(directory)), foreign=not trust)
    return msgspec.structs.replace(found, bus_url=None) if found.foreign else found


def _was_started(directory: Path) -> bool:
    return is_written_by_the_user_alone(directory, OWN_FILES) and was_started_here(directory)


def _is_run_by_the_user(directory: Path) -> bool:
    """Whether a process of this user has the mark of the run. Root can read marks of other users' processes too."""
    return any(_user_of(pid) == os.geteuid() for pid in guardian.find(f"@{directory.resolve()}"))


def _user_of(pid: int) -> int | None:
    """Return who started a process; None: it has ended.

    The owner of its directory in /proc does not say it: that is root, if the process forbids to read its memory.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)
    return None if found is None else int(found[1])


def _run_in(directory: Path) -> FoundRun:
    topology = _stored_in(directory, _StoredTopology)
    name = directory.resolve().name if topology is None else topology.run.name
    if RUN_NAME.fullmatch(name) is None:
        where = f"the name of {directory}" if topology is None else f"{directory / TOPOLOGY_FILE}: run.name"
        raise NoSuchRun(f"{where}, {show(name)}, is not a valid run name")
    if topology is None:
        return FoundRun(name=name, directory=directory)
    addresses = {node: found.address for node, found in topology.nodes.items()}
    return FoundRun(name=name, directory=directory, bus_url=topology.bus.url, addresses=addresses)


def _stored_in(directory: Path, kind: type[T]) -> T | None:
    stored = directory / TOPOLOGY_FILE
    try:
        return msgspec.json.decode(stored.read_bytes(), type=kind) if stored.exists() else None
    except (msgspec.DecodeError, RecursionError) as error:  # a ValidationError is a DecodeError
        raise NoSuchRun(f"{stored} cannot be read: {error}") from error


def _asked(directory: Path) -> Iterator[Asked]:
    yield from harmless_part(in_new_form(_stored_in(directory, dict[str, Any]) or {}, chosen_keys(Topology)), Topology)[
        1
    ]
    if (directory / BUS_FILE).exists():
        yield Asked(key=f"the file {BUS_FILE}", value=without_logins(url_in(directory) or ""), access=Access.ADDRESS)


def _refuse_links(directory: Path) -> None:
    """Refuse a directory that holds anything but directories and regular files: a start writes nothing else there."""
    for folder, directories, files in os.walk(directory.resolve()):
        for path in (Path(folder, name) for name in (*directories, *files)):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = f"a link to {os.readlink(path)}" if stat.S_ISLNK(mode) else "no regular file"
                raise NoSuchRun(f"{directory} may be a stranger's, and {path} is {kind}; {TRUST} follows it")


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
            if run.foreign:
                raise NoLog(f"a node daemon holds {run.directory}, which may be a stranger's: {TRUST} asks its bus")
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
        if not unclaimed or _is_run_by_the_user(run.directory):  # processes of a killed daemon remain briefly
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
