"""The claim on a run directory, held by a file lock: one daemon per node and run."""

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

from runtime.util.secrets import make_private

LOCK_FILE = "agent.lock"  # keeps its old name: a daemon of an older version must see the lock
NODE_LOCK_FILE = "agent-{}.lock"  # for nodes that share the directory


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a claim."""

    pid: int
    host: str
    since: float  # Unix time in seconds


class RunClaimed(Exception):
    """Another daemon uses this directory."""

    def __init__(self, run_dir: Path, holder: Holder | None) -> None:
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        super().__init__(f"{run_dir} is in use: {who} runs it; stop that first, or choose another run.name")
        self.run_dir = run_dir
        self.holder = holder


class Claim:
    """A held claim; leaving its context releases it. The lock ends with the process, so it is never stale."""

    def __init__(self, run_dir: Path, node: str | None, file: IO[str]) -> None:
        self.run_dir = run_dir
        self.node = node  # in a shared directory
        self._file = file

    @classmethod
    def take(cls, run_dir: Path, *, node: str | None = None) -> Self:
        """Claim a run directory. It is created if missing, and closed to other users.

        Args:
            node: node of a shared directory; each has its own claim.

        Raises:
            RunClaimed: another daemon holds it.
            OSError: the directory cannot be created or written.
        """
        make_private(run_dir)
        path = lock_of(run_dir, node)
        file = path.open("a+", encoding="utf-8")  # not truncated: it may be another daemon's
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
        self._file.close()  # the file stays: otherwise two daemons could lock two files of one name


def lock_of(run_dir: Path, node: str | None) -> Path:
    """Return the lock file of a directory, or of a node's part of it."""
    return run_dir / (LOCK_FILE if node is None else NODE_LOCK_FILE.format(node))


def nodes_in(run_dir: Path) -> list[str]:
    """Return the nodes that ever claimed a part of a shared directory."""
    before, after = NODE_LOCK_FILE.split("{}")
    found = run_dir.glob(NODE_LOCK_FILE.format("*"))
    return [path.name.removeprefix(before).removesuffix(after) for path in found]


def is_lock(path: Path) -> bool:
    """Return whether a file is a lock file. Lock files are never deleted."""
    return path.name == LOCK_FILE or path.match(NODE_LOCK_FILE.format("*"))


@contextmanager
def kept_unclaimed(run_dir: Path) -> Generator[bool]:
    """Prevent daemons from claiming a directory, or a part of it, for the duration of a block. Write nothing.

    Yields False if a daemon holds a claim. Several processes may hold such blocks at once. A daemon that starts
    meanwhile is refused, unless it is the first one of its node.
    """
    with ExitStack() as opened:  # without a lock file no daemon ever ran there
        files = [opened.enter_context(path.open("rb")) for path in run_dir.glob("*") if is_lock(path)]
        yield all([_locks_shared(file) for file in files])


def refuse_claimed(run_dir: Path, node: str | None, *, held: Claim | None = None) -> None:
    """Raise if another daemon holds the directory. Write nothing.

    Args:
        run_dir: directory of the run.
        node: the node to start, if nodes share the directory; others may hold their parts. None: the whole directory
            is to be claimed.
        held: the caller's own claim, if it has one.

    Raises:
        RunClaimed: a daemon holds the directory or the node's part; without a node, any part.
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
    except msgspec.DecodeError:  # read between lock and write
        return None
