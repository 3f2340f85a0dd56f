"""The join file: how other nodes reach the bus of a run. The node with the bus writes it; the others wait for it."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import msgspec

from runtime.bus.bus import Bus
from runtime.bus.credential import check_certificate
from runtime.bus.errors import BusError
from runtime.bus.limits import BusLimits
from runtime.node.claims.run_id import KEY, IdOnBus, RunMismatch, id_in
from runtime.process.logs import silenced
from runtime.util.files import write_atomically
from runtime.util.import_path import command_name
from runtime.util.secrets import Login, Secret, read_private, with_login

JOIN_FILE: Final = "join.toml"  # in the run directory, readable by its owner only
LOOK_AGAIN_S: Final = 0.5
LIMITS: Final = BusLimits(connect_timeout_s=3.0, publish_timeout_s=3.0, attempt_timeout_s=2.0, drain_timeout_s=1.0)
HEAD: Final = "# How other nodes join this run: %s FILE --node NAME --join join.toml. Keep it secret."


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """How a node reaches the bus of a run."""

    run: str
    run_id: str
    incarnation: int  # of the node daemon that wrote it
    url: str
    user: str
    password: str
    certificate: str  # PEM
    is_check: bool = False  # of a check; nothing starts on its bus

    @property
    def login(self) -> Login:
        """The login of the bus."""
        return Login(user=self.user, password=Secret(self.password))

    @property
    def url_with_login(self) -> str:
        """The URL of the bus, for clients."""
        return with_login(self.url, self.login)


class NotJoined(Exception):
    """The run's bus was not found in time. The text says why."""


class _Unusable(Exception):
    """A join file cannot be used now; the text says why. A newer one may be usable."""


def write_join(path: Path, join: Join) -> None:
    """Write a join file, readable by its owner only.

    Raises:
        OSError: it cannot be written.
    """
    fields = msgspec.structs.asdict(join).items()
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in fields]  # JSON strings are TOML strings
    write_atomically(path, "\n".join([HEAD % command_name("start-topology"), *lines, ""]).encode())


def read_join(path: Path) -> Join:
    """Read a join file.

    Raises:
        OSError: it cannot be read.
        ValueError: other users may read it, or its content is invalid. The text shows none of the content.
    """
    try:
        found = msgspec.convert(tomllib.loads(read_private(path)), Join)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a join file of this version") from error
    check_certificate(path, found.certificate)
    return found


async def joined(
    path: Path,
    run: str,
    run_dir: Path,
    *,
    wait_s: float,
    show: Callable[[str], None],
    is_finished: Callable[[], bool],
    checks: bool = False,
) -> Join | None:
    """Wait for a join file of the run whose bus answers; return None if the run is finished, so that none will come.

    Show what is missing, whenever that changes.

    Args:
        path: of the join file.
        run: name of the run.
        run_dir: of this node; may be shared with the node that has the bus.
        wait_s: seconds to wait.
        show: prints a line for the user.
        is_finished: reads from the run directory whether the run is finished.
        checks: the caller only checks: the bus may be that of a check, or of a run.

    Raises:
        NotJoined: there was none within wait_s.
    """
    problem = ""
    with silenced(), anyio.move_on_after(wait_s):
        while True:
            try:
                return await _usable(path, run, run_dir, checks=checks)
            except _Unusable as error:
                if await anyio.to_thread.run_sync(is_finished):
                    return None
                if str(error) != problem:
                    problem = str(error)
                    show(f"waiting for the run's bus, up to {wait_s:g} s: {problem}")
            await anyio.sleep(LOOK_AGAIN_S)  # another machine writes the file: there is no event
    raise NotJoined(problem)


async def _usable(path: Path, run: str, run_dir: Path, *, checks: bool) -> Join:
    """Read the join file, and compare it with the run and its bus.

    Raises:
        _Unusable: it is missing, is of another run, or its bus does not answer.
    """
    try:
        join, own = await anyio.to_thread.run_sync(read_join, path), id_in(run_dir)
    except FileNotFoundError:
        raise _Unusable(f"{path} does not exist yet") from None
    except (OSError, ValueError, RunMismatch) as error:
        raise _Unusable(str(error)) from error
    if join.run != run:
        raise _Unusable(f"{path} is ignored: it is of run {join.run}")
    if join.is_check and not checks:
        raise _Unusable(f"{path} is ignored: it is of a check, not of a start")
    if own is not None and own.joined and own.id != join.run_id:
        raise _Unusable(f"{path} is ignored: it is of another run {run} than the one in {run_dir}")
    try:
        async with Bus.connect(
            join.url_with_login, run, name="join", limits=LIMITS, certificate=join.certificate
        ) as bus:
            entry = await bus.kv.get(KEY, IdOnBus)
    except (BusError, ValueError) as error:
        raise _Unusable(f"the bus of {path} does not accept this node: {error}") from error
    if entry is None or entry.value is None or entry.value.id != join.run_id:
        raise _Unusable(f"{path} is ignored: the bus at {join.url} has another run")
    return join
