"""Fetches weight versions and other files from the rooms of other nodes, piece by piece, on some threads.

Each piece is compared with its sum before it is stored, so a stored piece is right, whichever node sent it. A node that
sends wrong bytes is named and left out. What was stored before a crash, or from a node that died, is kept. A request
goes to peers before home: each piece leaves home once or a few times, and then spreads between the others.
"""

import hashlib
import http.client
import os
import random
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import structlog

from runtime.bus.nats.certificate import NAME, client_context
from runtime.http.connections import SCHEME
from runtime.http.room import Offered, Room, RoomAddress, shown
from runtime.models.delta import Version
from runtime.models.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
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

T = TypeVar("T")
STREAMS: Final = 4  # pieces that are fetched at a time
PEERS_TRIED: Final = 3  # before home
CONNECT_S: Final = 5.0
READ_S: Final = 10.0  # between two parts of an answer
PIECE_S: Final = 120.0  # for a piece: a node that sends a byte now and then holds nothing up
STALL_S: Final = 60.0  # without a byte from any node
GONE_S: Final = 5.0  # the same, if home has deleted the version
AGAIN_S: Final = 0.05  # after a round in which no node had the piece
MISSED_S: Final = 0.2  # before the next request to a node that lacks a piece, or is busy
FAILED_S: Final = 2.0  # before the next request to a node that cannot be reached
KEEP_VERSIONS: Final = 2
PART_BYTES: Final = 1 << 20
REASON_CHARS: Final = 200


class _Missed(Exception):
    """A node answered that it does not send the bytes now."""


_Piece = tuple[ManifestFile, int]  # and its index


class _Wanted(NamedTuple):
    """What is to be fetched: its manifest, and that as it was published."""

    digest: str
    manifest: Manifest
    content: bytes


class Fetcher:
    """The versions that a node has fetched, and seeds to others.

    Args:
        root: directory of the versions, of this node alone.
        room: of this node: it serves what was verified.
        known: returns the rooms of the other nodes, as known now.
        show: prints a line for the user.
    """

    def __init__(
        self, root: Path, room: Room, known: Callable[[], Sequence[RoomAddress]], show: Callable[[str], None]
    ) -> None:
        self.root = root
        self._room = room
        self._known = known
        self._show = show
        self._active: set[_Asking] = set()
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
    def _asking_rooms(self) -> Generator["_Asking"]:
        asking = _Asking(self._known, self._show)
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

    def _wanted(self, digest: str, asking: "_Asking") -> _Wanted:
        for _, place in versions_in(self.root):
            if (found := _manifest_at(place, digest)) is not None:
                return found
        return self._asked(digest, asking)

    def _asked(self, digest: str, asking: "_Asking") -> _Wanted:
        return asking.until_right(
            "the manifest", digest, lambda content: _Wanted(digest, manifest_in(content, digest), content)
        )

    def _complete(self, place: Path, wanted: _Wanted, asking: "_Asking", *, verifies: bool) -> None:
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
        self._room.offer(
            {
                file.digest: Offered(partial / file.name, file.size_bytes, manifest.piece_bytes, there[file.name])
                for file in manifest.files
            }
        )
        todo = [(file, piece) for file in manifest.files for piece in _absent(file, there)]
        random.shuffle(todo)  # nodes that begin together fetch different pieces first, and then each other's

        def fetch(each: _Piece) -> None:
            file, piece = each
            content = asking.piece(manifest, file, piece)
            opened = os.open(partial / file.name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(opened, content, piece * manifest.piece_bytes)
            finally:
                os.close(opened)
            there[file.name].add(piece)

        with ThreadPoolExecutor(max_workers=STREAMS, thread_name_prefix="fetch") as executor:
            for _ in executor.map(asking.unless_failed(fetch), todo):
                pass
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


def offers_of(place: Path, digest: str, manifest: Manifest) -> dict[str, Offered]:
    """Return what a room offers of a complete version."""
    size_bytes = (place / MANIFEST).stat().st_size
    files = {file.digest: Offered(place / file.name, file.size_bytes) for file in manifest.files}
    return {digest: Offered(place / MANIFEST, size_bytes), **files}


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


class _Asking:
    """Asks rooms for bytes until one sends the right ones, or none sends anything for a while."""

    def __init__(self, known: Callable[[], Sequence[RoomAddress]], show: Callable[[str], None]) -> None:
        self.bytes_from = Counter[str]()
        self._known = known
        self._show = show
        self._moved = time.monotonic()  # when bytes came last
        self._failed = self._is_stopped = False
        self._left_out: dict[str, str] = {}  # by the secret of a room's start: what was wrong
        self._resting: dict[str, float] = {}  # until when, by the secret
        self._said: dict[str, str] = {}  # by node: why it did not send bytes last
        self._has_wrong_home = False
        self._is_gone = False  # home answered last that it does not have the bytes
        self._opened: list[http.client.HTTPConnection] = []
        self._local = threading.local()

    def stop(self) -> None:
        """Fail: the caller is not interested any more."""
        self._is_stopped = self._failed = True

    def close(self) -> None:
        """Close all connections."""
        for connection in self._opened:
            connection.close()

    def unless_failed(self, call: "Callable[[_Piece], None]") -> "Callable[[_Piece], None]":
        """Return a call that does nothing once another one has failed."""

        def called(each: _Piece) -> None:
            if self._is_stopped:
                raise FetchFailed("the fetch was stopped")
            if self._failed:
                return
            try:
                call(each)
            except BaseException:
                self._failed = True
                raise

        return called

    def piece(self, manifest: Manifest, file: ManifestFile, piece: int) -> bytes:
        """Return the bytes of a piece, as announced."""
        begin, size = piece * manifest.piece_bytes, manifest.size_of(file, piece)

        def compared(content: bytes) -> bytes:
            found = hashlib.sha256(content).hexdigest()
            if found != file.pieces[piece]:
                raise ValueError(f"its sha256 is {found}, expected {file.pieces[piece]}")
            return content

        what = f"piece {piece} of {file.name} of {manifest.shown}"
        return self.until_right(what, file.digest, compared, (begin, size))

    def until_right(self, what: str, digest: str, read: Callable[[bytes], T], part: tuple[int, int] | None = None) -> T:
        """Ask one room after another.

        Args:
            what: names the bytes in messages.
            digest: path of the bytes.
            read: reads the bytes; raises ValueError if they are wrong.
            part: first byte and number of bytes; None: all.

        Raises:
            FetchFailed: no room has sent anything for STALL_S, or all sent wrong bytes.
        """
        while True:
            for source in self._sources():
                try:
                    content = self._ask(source, digest, part)
                    found = read(content)
                except _Missed as error:
                    self._rest(source, MISSED_S, str(error))
                except (OSError, http.client.HTTPException) as error:  # also a certificate that is not the room's
                    self._drop(source)
                    self._rest(source, FAILED_S, f"{type(error).__name__}: {error}")
                except ValueError as error:
                    self._leave_out(source, f"{what}: {error}")
                else:
                    self.bytes_from[source.node] += len(content)
                    return found
            stalled_s = time.monotonic() - self._moved
            limit_s = GONE_S if self._is_gone else STALL_S
            if self._failed or stalled_s > limit_s or self._are_all_wrong():
                reasons = "; ".join(f"{node}: {why}" for node, why in sorted(self._said.items()))
                message = f"{what} did not come from any node for {stalled_s:.0f} s: {reasons or 'no node has a room'}"
                raise FetchFailed(message, unusable=self._has_wrong_home)
            time.sleep(AGAIN_S)

    def _sources(self) -> list[RoomAddress]:
        """Return some peers in any order, then home."""
        now = time.monotonic()
        able = [
            each
            for each in self._known()
            if each.secret not in self._left_out and self._resting.get(each.secret, 0.0) <= now
        ]
        peers = [each for each in able if not each.is_home]
        return [*random.sample(peers, min(PEERS_TRIED, len(peers))), *(each for each in able if each.is_home)]

    def _are_all_wrong(self) -> bool:
        known = self._known()
        return bool(known) and all(each.secret in self._left_out for each in known)

    def _leave_out(self, source: RoomAddress, why: str) -> None:
        """Ask a room no more: it sent wrong bytes."""
        if source.secret in self._left_out:
            return
        self._left_out[source.secret] = self._said[shown(source)] = f"sent wrong bytes: {why}"
        self._has_wrong_home |= source.is_home
        self._drop(source)
        log.error("source_left_out", node=source.node, host=source.host, port=source.port, reason=why)
        self._show(f"{shown(source)} sent wrong bytes and is left out: {why}")

    def _rest(self, source: RoomAddress, seconds: float, why: str) -> None:
        self._resting[source.secret] = time.monotonic() + seconds
        self._said[shown(source)] = why[:REASON_CHARS]

    def _ask(self, source: RoomAddress, digest: str, part: tuple[int, int] | None) -> bytes:
        headers = {"Authorization": f"{SCHEME}{source.secret}"}
        if part is not None:
            headers["Range"] = f"bytes={part[0]}-{part[0] + part[1] - 1}"
        connection = self._connection(source)
        connection.request("GET", f"/{digest}", headers=headers)
        response = connection.getresponse()
        size = int(response.headers.get("Content-Length") or 0)
        if response.status != (200 if part is None else 206):
            text = response.read(REASON_CHARS).decode(errors="replace").strip()
            if size > REASON_CHARS:
                self._drop(source)
            if source.is_home:
                self._is_gone = response.status == http.HTTPStatus.NOT_FOUND
            raise _Missed(f"it answered {response.status}: {text}")
        if size != part[1] if part is not None else size > MAX_MANIFEST_BYTES:
            raise ValueError(f"it sent {size} bytes" + (f", expected {part[1]}" if part else ""))
        return self._read(response, size)

    def _read(self, response: http.client.HTTPResponse, size: int) -> bytes:
        content, filled, ends = memoryview(bytearray(size)), 0, time.monotonic() + PIECE_S
        while filled < size:
            number = response.readinto(content[filled : filled + PART_BYTES])
            if not number:
                raise ConnectionError("it closed the connection in the middle of an answer")
            filled += number
            self._moved = time.monotonic()
            if self._moved > ends:
                raise TimeoutError(f"it sent {filled} of {size} bytes in {PIECE_S:g} s")
        response.read()  # the connection is free for the next request
        return bytes(content)

    def _connection(self, source: RoomAddress) -> http.client.HTTPConnection:
        known: dict[str, http.client.HTTPConnection] = self._local.__dict__.setdefault("connections", {})
        if source.secret not in known:
            plain = socket.create_connection((source.host, source.port), timeout=CONNECT_S)
            try:
                secured = client_context(source.certificate).wrap_socket(plain, server_hostname=NAME)
            except BaseException:
                plain.close()
                raise
            secured.settimeout(READ_S)
            known[source.secret] = connection = http.client.HTTPConnection(source.host, source.port)
            connection.sock = secured
            connection.auto_open = 0  # it would connect again without TLS
            self._opened.append(connection)
        return known[source.secret]

    def _drop(self, source: RoomAddress) -> None:
        known: dict[str, http.client.HTTPConnection] = self._local.__dict__.setdefault("connections", {})
        connection = known.pop(source.secret, None)
        if connection is not None:
            connection.close()


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
