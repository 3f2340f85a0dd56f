"""Fetches weight versions and other files from the rooms of other nodes, piece by piece, on some threads.

Each piece is compared with its sum before it is stored, so a stored piece is right, whichever node sent it. What was
stored before a crash, or from a node that died, is kept. Which piece comes from which node: `planning`.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Condition, Lock
from typing import Final, NamedTuple

import numpy as np
import structlog

from runtime.http.asking import Asking
from runtime.http.planning import HOME, Flags, Plan, Request
from runtime.http.room import Offered, Room, RoomAddress
from runtime.models.delta import Version
from runtime.models.manifest import (
    MANIFEST,
    FetchFailed,
    Manifest,
    ManifestFile,
    manifest_in,
    read_manifest,
    verified_pieces,
)
from runtime.models.versions import name_of, needed_for, on_disk, versions_in
from runtime.util.disk import free_bytes, no_space
from runtime.util.files import begin_directory, complete_directory, hidden_name, write_atomically

log = structlog.get_logger()

STREAMS: Final = 4  # pieces that are fetched at a time
LOOK_S: Final = 0.1  # between two questions to a peer which pieces it has
LOOK_EACH_S: Final = 0.02  # the same, for each peer: with many peers it takes longer
WAIT_S: Final = 0.05  # for another piece at a peer
KEEP_VERSIONS: Final = 2


class _Wanted(NamedTuple):
    """What is to be fetched: its manifest, and that as it was published."""

    digest: str
    manifest: Manifest
    content: bytes


class Fetcher:
    """The versions that a node has fetched, and seeds to others.

    Args:
        root: directory of the versions, of this node alone.
        node: this node.
        room: of this node: it serves what was verified.
        known: returns the rooms of the other nodes, as known now.
        show: prints a line for the user.
    """

    def __init__(
        self,
        root: Path,
        node: str,
        room: Room,
        known: Callable[[], Sequence[RoomAddress]],
        show: Callable[[str], None],
    ) -> None:
        self.root = root
        self._node = node
        self._room = room
        self._known = known
        self._show = show
        self._active: set[Asking] = set()
        for place in (*(place for _, place in versions_in(root)), *root.glob("files/[!.]*")):
            self._seed(place)

    @property
    def num_active(self) -> int:
        """Fetches in progress."""
        return len(self._active)

    def stop(self) -> None:
        """End fetches in progress: they raise FetchFailed. Safe to call from any thread."""
        for asking in [*self._active]:
            asking.stop()

    @contextmanager
    def _asking_rooms(self) -> Generator[Asking]:
        asking = Asking(self._known, self._show)
        self._active.add(asking)
        try:
            yield asking
        finally:
            self._active.discard(asking)
            asking.close()

    def fetch(self, digest: str, *, held: Collection[Version] = (), verifies: bool = False) -> Path:
        """Return the directory of a version; fetch it, and what its deltas begin from. One call at a time.

        Args:
            digest: of its manifest, as announced.
            held: versions that deltas may begin from; they are not fetched.
            verifies: compare all bytes that are here already, too.

        Raises:
            FetchFailed: no node sent a part of it.
            OSError: it cannot be stored.
        """
        with self._asking_rooms() as asking:
            self.root.mkdir(parents=True, exist_ok=True)
            chain = [self._wanted(digest, asking)]
            while (first := chain[-1].manifest).base and first.base_version not in held:
                chain.append(self._wanted(first.base, asking))
            for wanted in reversed(chain):
                self._complete(self._place_of(wanted), wanted, asking, verifies=verifies)
            if (version := chain[0].manifest.version) is not None:
                self._forget_old(version)
            return self._place_of(chain[0])

    def fetch_files(self, digest: str, place: Path) -> Path:
        """Return a directory with the files of a manifest; fetch what it lacks. One call at a time.

        Args:
            digest: of the manifest, as announced.
            place: the directory. It gets this name once it is complete.

        Raises:
            FetchFailed: no node sent a part of it.
            OSError: it cannot be stored.
        """
        with self._asking_rooms() as asking:
            place.parent.mkdir(parents=True, exist_ok=True)
            there = (_manifest_at(each, digest) for each in (place, hidden_name(place)))
            wanted = next((found for found in there if found is not None), None)
            self._complete(place, wanted or self._asked(digest, asking), asking, verifies=False)
            return place

    def _place_of(self, wanted: _Wanted) -> Path:
        if (version := wanted.manifest.version) is None:
            raise FetchFailed(f"the manifest {wanted.digest} is not of a version", unusable=True)
        return self.root / name_of(version.number)

    def _wanted(self, digest: str, asking: Asking) -> _Wanted:
        for _, place in versions_in(self.root):
            if (found := _manifest_at(place, digest)) is not None:
                return found
        return self._asked(digest, asking)

    def _asked(self, digest: str, asking: Asking) -> _Wanted:
        return asking.manifest(digest, lambda content: _Wanted(digest, manifest_in(content, digest), content))

    def _complete(self, place: Path, wanted: _Wanted, asking: Asking, *, verifies: bool) -> None:
        """Have a version, or other files, complete on the disk, and serve them."""
        manifest = wanted.manifest
        if place.exists():
            if _digest_in(place) == wanted.digest and not (verifies and _lacks(place, manifest)):
                self._seed(place)
                return
            shutil.rmtree(place)
        begin, partial = time.perf_counter(), _begun(place, wanted)
        there = verified_pieces(partial, manifest)
        needed = sum(manifest.size_of(file, each) for file in manifest.files for each in _absent(file, there))
        if needed > free_bytes(partial):
            raise no_space(place, needed)
        pieces = _Pieces(partial, wanted, there, self._node)
        self._room.offer(pieces.offers())
        pieces.fetch(asking)
        complete_directory(partial, place)
        self._seed(place)
        took_s = time.perf_counter() - begin
        event = "files_fetched" if manifest.version is None else "weights_fetched"
        of = {"title": manifest.title} if manifest.version is None else {"weight_version": manifest.version.number}
        log.info(event, took_s=took_s, bytes_from=dict(asking.bytes_from), **of)

    def _seed(self, place: Path) -> None:
        try:
            digest, manifest = read_manifest(place)
        except (OSError, ValueError):
            return
        self._room.offer(offers_of(place, digest, manifest))

    def _forget_old(self, wanted: Version) -> None:
        kept = {number for number, _ in versions_in(self.root)[-KEEP_VERSIONS:]} | {wanted.number}
        try:
            kept |= needed_for(wanted, on_disk(self.root))
        except ValueError:  # its deltas begin from a copy
            pass
        for number, place in versions_in(self.root):
            if number not in kept:
                try:
                    self._room.withdraw([*offers_of(place, *read_manifest(place))])
                except (OSError, ValueError):
                    pass
                shutil.rmtree(place, ignore_errors=True)


class _Pieces:
    """The pieces of one fetch: fetches what is missing, on some threads, and offers what is there.

    Args:
        directory: of the files, which have their sizes already.
        wanted: what is fetched.
        there: indices of the pieces that are there, by the name of their file.
        node: this node.
    """

    def __init__(self, directory: Path, wanted: _Wanted, there: Mapping[str, set[int]], node: str) -> None:
        self._directory = directory
        self._wanted = wanted
        self._there = there
        self._pieces = [(file, piece) for file in wanted.manifest.files for piece in range(len(file.pieces))]
        has_P = np.array([piece in there[file.name] for file, piece in self._pieces], dtype=np.bool_)
        self._plan = Plan([file.pieces[piece] for file, piece in self._pieces], has_P, node, Random())
        self._changed = Condition()
        self._looking = Lock()
        self._looked: dict[str, float] = {}  # when a peer last said what it has, by its secret
        self._has_failed = False

    def offers(self) -> dict[str, Offered]:
        """Return what a room offers of the files while they are fetched: the pieces that are there."""
        directory, (digest, manifest, content) = self._directory, self._wanted
        held = Offered(directory / MANIFEST, len(content), held=lambda: _bits(self._plan.has_P))
        files = {
            file.digest: Offered(
                directory / file.name, file.size_bytes, manifest.piece_bytes, pieces=self._there[file.name]
            )
            for file in manifest.files
        }
        return {digest: held, **files}

    def fetch(self, asking: Asking) -> None:
        """Fetch all missing pieces.

        Raises:
            FetchFailed: no node sent one of them.
            OSError: one cannot be stored.
        """
        if self._plan.is_complete:
            return
        with ThreadPoolExecutor(max_workers=STREAMS, thread_name_prefix="fetch") as executor:
            for _ in executor.map(self._work, [asking] * STREAMS):
                pass

    def _work(self, asking: Asking) -> None:
        try:
            while not self._has_failed and not self._plan.is_complete:
                self._look(asking)
                rooms = asking.able()
                with self._changed:
                    ready = [name for name, room in rooms.items() if asking.is_ready(room)]
                    request = self._plan.choose(time.monotonic(), [name for name in rooms if name != HOME], ready)
                    if request is None:
                        asking.check(self._shown(self._plan.first_missing))
                        self._changed.wait(WAIT_S)
                        continue
                self._carry_out(request, rooms[request.peer], asking)
        except BaseException:
            self._has_failed = True
            raise

    def _carry_out(self, request: Request, room: RoomAddress, asking: Asking) -> None:
        begin, (file, piece) = time.monotonic(), self._pieces[request.piece]
        content = asking.piece(room, self._wanted.manifest, file, piece)
        if content is not None:
            opened = os.open(self._directory / file.name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(opened, content, piece * self._wanted.manifest.piece_bytes)
            finally:
                os.close(opened)
            self._there[file.name].add(piece)
        with self._changed:
            if content is None:
                self._plan.note_failed(request)
            else:
                self._plan.note_got(request, time.monotonic() - begin)
            self._changed.notify_all()

    def _look(self, asking: Asking) -> None:
        """Ask peers which pieces they have, unless another thread does, or they have just answered."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            rooms = asking.able()
            every_s = max(LOOK_S, LOOK_EACH_S * len(rooms))
            for name, room in rooms.items():
                is_due = time.monotonic() - self._looked.get(room.secret, -every_s) >= every_s
                if room.is_home or not is_due or not self._plan.needs(name):
                    continue
                held_P = asking.held(room, self._wanted.digest, len(self._pieces))
                self._looked[room.secret] = time.monotonic()
                with self._changed:
                    self._plan.note_held(name, held_P, time.monotonic())
                    self._changed.notify_all()
        finally:
            self._looking.release()

    def _shown(self, number: int) -> str:
        file, piece = self._pieces[number]
        return f"piece {piece} of {file.name} of {self._wanted.manifest.shown}"


def offers_of(place: Path, digest: str, manifest: Manifest, name: str = MANIFEST) -> dict[str, Offered]:
    """Return what a room offers of complete files.

    Args:
        place: directory of the files.
        digest: of their manifest.
        manifest: the manifest.
        name: of the manifest's file.
    """
    size_bytes = (place / name).stat().st_size
    files = {file.digest: Offered(place / file.name, file.size_bytes) for file in manifest.files}
    held = _bits(np.ones(sum(len(file.pieces) for file in manifest.files), dtype=np.bool_))
    return {digest: Offered(place / name, size_bytes, held=lambda: held), **files}


class Published:
    """The versions that the trainer of this node publishes, for the node's room.

    Args:
        roots: directories of versions.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._known: dict[Path, dict[str, Offered]] = {}

    def look(self) -> dict[str, Offered]:
        """Return all that is published now."""
        places = [place for root in self._roots for _, place in versions_in(root)]
        for gone in self._known.keys() - {*places}:
            del self._known[gone]
        for place in places:
            if place not in self._known:
                try:
                    self._known[place] = offers_of(place, *read_manifest(place))
                except (OSError, ValueError):  # it is being deleted, or of a start without a manifest
                    continue
        return {digest: offered for each in self._known.values() for digest, offered in each.items()}


def _begun(place: Path, wanted: _Wanted) -> Path:
    """Return the hidden directory of a version with files of the right sizes; keep what a crash left of it."""
    partial = hidden_name(place)
    if _digest_in(partial) != wanted.digest:
        begin_directory(place)
    for file in wanted.manifest.files:
        (partial / file.name).parent.mkdir(parents=True, exist_ok=True)
        with (partial / file.name).open("ab") as opened:
            opened.truncate(file.size_bytes)
    write_atomically(partial / MANIFEST, wanted.content)
    return partial


def _manifest_at(place: Path, digest: str) -> _Wanted | None:
    """Return the manifest in a directory, if it is that of a digest."""
    try:
        content = (place / MANIFEST).read_bytes()
        return _Wanted(digest, manifest_in(content, digest), content)
    except (OSError, ValueError):  # another one
        return None


def _bits(has_P: Flags) -> bytes:
    """Return a bit for each piece."""
    return np.packbits(has_P).tobytes()


def _absent(file: ManifestFile, there: Mapping[str, Collection[int]]) -> list[int]:
    """Return the indices of the pieces that are not there."""
    return [piece for piece in range(len(file.pieces)) if piece not in there[file.name]]


def _digest_in(place: Path) -> str:
    """Return the digest of the manifest in a directory; "" if it has none."""
    try:
        return hashlib.sha256((place / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return ""


def _lacks(place: Path, manifest: Manifest) -> bool:
    there = verified_pieces(place, manifest)
    return any(len(there[file.name]) != len(file.pieces) for file in manifest.files)
