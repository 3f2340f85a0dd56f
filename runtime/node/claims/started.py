"""Notes in the user's state directory: the run directories in which this user started a run on this machine.

A run directory is opened as the user's own because of such a note, wherever it lies. There is one small file for each
directory, so that starts at the same time write different ones.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from runtime.node.claims.run_id import RunMismatch, id_in
from runtime.util.files import user_state, write_atomically
from runtime.util.secrets import make_private, read_private

NOTES: Final = "runs"
MOST: Final = 1000  # notes; beyond, the oldest are removed
SUFFIX: Final = ".json"
TIMEOUT_S: Final = 5.0  # a home on a network disk may hang

log = structlog.get_logger()


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its directory.

    The number of the disk is left out: that of a network disk changes whenever it is mounted. The run id, which no
    stranger knows, is not repeated on another disk.
    """

    directory: str
    inode: int
    run_id: str


async def note_start(run_dir: Path, run_id: str) -> None:
    """Note that this user started a run in a directory. If that fails, a line in the log says why."""
    try:
        with anyio.fail_after(TIMEOUT_S):
            await anyio.to_thread.run_sync(_note, run_dir, run_id, abandon_on_cancel=True)
    except OSError as error:  # a TimeoutError is one
        log.warning("start_not_noted", reason=str(error) or f"no answer within {TIMEOUT_S:g} s")


def was_started_here(run_dir: Path) -> bool:
    """Return whether this user started the run of a directory on this machine.

    A copy of the directory is another one, and so is a directory that was moved, or replaced.
    """
    place = os.path.realpath(run_dir)
    try:
        path = _path_of(place)
        note = _noted(path)
        stored = None if note is None else id_in(Path(place))
        is_private = path.parent.stat().st_uid == path.stat().st_uid == os.geteuid()
        return is_private and note == _Note(
            directory=place, inode=os.stat(place).st_ino, run_id="" if stored is None else stored.id
        )
    except (OSError, RunMismatch):
        return False


def _note(run_dir: Path, run_id: str) -> None:
    """Write a note, and remove those that are of no use any more.

    Raises:
        OSError: the user's state directory cannot be written, or belongs to another user.
    """
    place = os.path.realpath(run_dir)
    note, path = _Note(directory=place, inode=os.stat(place).st_ino, run_id=run_id), _path_of(place)
    make_private(path.parent)
    if path.parent.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path.parent} belongs to another user")
    write_atomically(path, msgspec.json.encode(note) + b"\n")
    _remove_useless(path.parent)


def _path_of(directory: str) -> Path:
    return user_state(NOTES) / f"{hashlib.sha256(os.fsencode(directory)).hexdigest()}{SUFFIX}"


def _noted(path: Path) -> _Note | None:
    """Read a note; None: there is none, it is damaged, or others may read or write it."""
    try:
        return msgspec.json.decode(read_private(path), type=_Note)
    except (OSError, ValueError):  # a DecodeError is a ValueError
        return None


def _remove_useless(notes: Path) -> None:
    """Remove notes of directories that were deleted, and the oldest ones beyond the bound."""
    by_age = sorted(_with_times(notes), reverse=True)
    for place, (_, path) in enumerate(by_age):
        if place >= MOST or _is_of_a_deleted_directory(_noted(path)):
            with suppress(OSError):  # another start was faster
                path.unlink()


def _with_times(notes: Path) -> Iterator[tuple[float, Path]]:
    for path in notes.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # another start removed it
            yield path.stat().st_mtime, path


def _is_of_a_deleted_directory(note: _Note | None) -> bool:
    """Whether a directory is gone from its parent. If that is missing too, its disk may not be mounted now."""
    if note is None:
        return True
    directory = Path(note.directory)
    return directory.parent.exists() and not directory.exists()
