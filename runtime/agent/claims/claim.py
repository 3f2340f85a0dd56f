"""The claim on a run directory: one agent per node and run, held by a lock."""

import fcntl
import os
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from runtime.secrets import make_private

LOCK_FILE = "agent.lock"
NODE_LOCK_FILE = "agent-{}.lock"  # of one of several nodes that share the directory


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a claim."""

    pid: int
    host: str
    since: float  # Unix time in seconds


class RunClaimed(Exception):
    """Another agent runs in this directory."""

    def __init__(self, run_dir: Path, holder: Holder | None) -> None:
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        super().__init__(f"{run_dir} is in use: {who} runs it; stop that first, or choose another run.name")
        self.run_dir = run_dir
        self.holder = holder


class Claim:
    """A held claim; leave its context to give it up. The lock dies with the process, so none is ever stale."""

    def __init__(self, run_dir: Path, node: str | None, file: IO[str]) -> None:
        self.run_dir = run_dir
        self.node = node  # of a shared directory
        self._file = file

    @classmethod
    def take(cls, run_dir: Path, *, node: str | None = None) -> Self:
        """Claim a run directory, which is made when missing and closed to other users.

        Args:
            node: gives each node of a shared directory a claim of its own.

        Raises:
            RunClaimed: another agent holds it.
            OSError: the directory cannot be made or written.
        """
        make_private(run_dir)
        path = lock_of(run_dir, node)
        file = path.open("a+", encoding="utf-8")  # not truncated: it may be another agent's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise RunClaimed(run_dir, _read_holder(file)) from None
        file.seek(0)
        file.truncate()
        holder = Holder(pid=os.getpid(), host=socket.gethostname(), since=time.time())
        file.write(msgspec.json.encode(holder).decode() + "\n")
        file.flush()
        return cls(run_dir, node, file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()  # the file stays: removing it would let two agents lock two files of one name


def lock_of(run_dir: Path, node: str | None) -> Path:
    """The file whose lock is the claim on a directory, or on a node's part in it."""
    return run_dir / (LOCK_FILE if node is None else NODE_LOCK_FILE.format(node))


def nodes_in(run_dir: Path) -> list[str]:
    """The nodes that have ever claimed a part in a shared directory."""
    before, after = NODE_LOCK_FILE.split("{}")
    found = run_dir.glob(NODE_LOCK_FILE.format("*"))
    return [path.name.removeprefix(before).removesuffix(after) for path in found]


def is_lock(path: Path) -> bool:
    """Whether a file is a claim's: such files are never deleted."""
    return path.name == LOCK_FILE or path.match(NODE_LOCK_FILE.format("*"))


@contextmanager
def kept_unclaimed(run_dir: Path) -> Generator[bool]:
    """Keep agents from claiming a directory, or a node's part in it, for the duration of a block. Writes nothing.

    Yields False if one holds a claim. Several may do so at the same time. An agent that starts meanwhile is refused,
    unless it is the first one of its node.
    """
    with ExitStack() as opened:  # a directory without a lock: no agent has ever run there
        files = [opened.enter_context(path.open("rb")) for path in run_dir.glob("*") if is_lock(path)]
        yield all([_locks_shared(file) for file in files])


def refuse_claimed(run_dir: Path, node: str | None, *, held: Claim | None = None) -> None:
    """Refuse a start beside an agent that holds the directory. Writes nothing.

    Args:
        run_dir: of the run.
        node: that is to be started, if nodes share the directory: others may hold their parts in it. None: the whole
            directory is to be claimed.
        held: the claim of the caller, if it has one.

    Raises:
        RunClaimed: an agent holds the directory, or the node's part; without a node, the part of any node.
    """
    own = None if held is None else lock_of(run_dir, held.node)
    nodes = nodes_in(run_dir) if node is None else [node]
    for path in (lock_of(run_dir, each) for each in (None, *nodes)):
        if path == own or not path.exists():
            continue
        with path.open("r", encoding="utf-8") as file:
            if not _locks_shared(file):
                raise RunClaimed(run_dir, _read_holder(file))


def _locks_shared(file: IO[Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(file: IO[str]) -> Holder | None:
    file.seek(0)
    try:
        return msgspec.json.decode(file.read(), type=Holder)
    except msgspec.DecodeError:  # caught between its lock and its write
        return None
