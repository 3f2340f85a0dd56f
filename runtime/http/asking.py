"""Asks the rooms of other nodes for bytes, over one connection per thread and room, and remembers who does not send.

A room that sends wrong bytes, nothing at all, or not the pieces that it announces is named and left out until the
fetch ends. The fetch comes back later to one that is busy or cannot be reached. Home is left out for wrong bytes alone.
"""

import hashlib
import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import structlog

from runtime.bus.nats.certificate import NAME, client_context
from runtime.http.connections import SCHEME
from runtime.http.planning import HOME, Flags
from runtime.http.room import PIECES, RoomAddress, shown
from runtime.models.manifest import MAX_MANIFEST_BYTES, FetchFailed, Manifest, ManifestFile

log = structlog.get_logger()

T = TypeVar("T")
CONNECT_S: Final = 5.0
READ_S: Final = 10.0  # between two parts of an answer
PIECE_S: Final = 120.0  # for a piece: a node that sends a byte now and then holds nothing up
STALL_S: Final = 60.0  # without a byte from any node
GONE_S: Final = 5.0  # the same, if home has deleted the version
AGAIN_S: Final = 0.05  # after a round in which no node had the bytes
PEERS_TRIED: Final = 3  # for a manifest, before home
MISSED_S: Final = 0.2  # before the next request to a node that lacks the bytes, or is busy
FAILED_S: Final = 2.0  # before the next request to a node that cannot be reached
MAX_BUSY: Final = 5  # answers of a busy peer in succession: then it counts as one that cannot be reached
MAX_UNSENT: Final = 3  # pieces that a peer announced and did not send, in succession: then it is left out
PART_BYTES: Final = 1 << 20
REASON_CHARS: Final = 200


class _Missed(Exception):
    """A node answered that it does not send the bytes now."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"it answered {status}: {text}")
        self.is_absent = status == http.HTTPStatus.NOT_FOUND


class Asking:
    """What one fetch knows of the rooms, and its connections to them.

    Args:
        known: returns the rooms of the other nodes, as known now.
        show: prints a line for the user.
    """

    def __init__(self, known: Callable[[], Sequence[RoomAddress]], show: Callable[[str], None]) -> None:
        self.bytes_from = Counter[str]()
        self.is_stopped = False
        self._known = known
        self._show = show
        self._moved = time.monotonic()  # when bytes came last
        self._left_out: dict[str, str] = {}  # by the secret of a room's start: what was wrong
        self._away: dict[str, float] = {}  # until when, by the secret
        self._resting: dict[str, float] = {}  # the same, of a room that answers
        self._num_busy = Counter[str]()  # in succession, by the secret
        self._num_unsent = Counter[str]()
        self._said: dict[str, str] = {}  # by node: why it did not send bytes last
        self._has_wrong_home = False
        self._is_gone = False  # home answered last that it does not have the bytes
        self._opened: list[http.client.HTTPConnection] = []
        self._local = threading.local()

    def stop(self) -> None:
        """Fail: the caller is not interested any more."""
        self.is_stopped = True

    def close(self) -> None:
        """Close all connections."""
        for connection in self._opened:
            connection.close()

    def able(self) -> dict[str, RoomAddress]:
        """Return the rooms that can be reached, as far as known, by node; home is HOME."""
        now = time.monotonic()
        return {
            HOME if each.is_home else each.node: each
            for each in self._known()
            if each.secret not in self._left_out and self._away.get(each.secret, 0.0) <= now
        }

    def is_ready(self, room: RoomAddress) -> bool:
        """Whether a room may be asked again."""
        return self._resting.get(room.secret, 0.0) <= time.monotonic()

    def manifest(self, digest: str, read: Callable[[bytes], T]) -> T:
        """Ask some peers for a manifest, in any order, then home, until one sends the right one.

        Args:
            digest: of the manifest.
            read: reads it; raises ValueError if it is wrong.

        Raises:
            FetchFailed: no room has sent anything for STALL_S, or all sent wrong bytes.
        """
        found: list[T] = []
        while True:
            rooms = [each for each in self.able().values() if self.is_ready(each)]
            peers, homes = [each for each in rooms if not each.is_home], [each for each in rooms if each.is_home]
            for room in (*random.sample(peers, min(PEERS_TRIED, len(peers))), *homes):
                if self._tried(
                    room, "the manifest", lambda room=room: found.append(read(bytes(self._ask(room, digest))))
                ):
                    return found[0]
            self.check("the manifest")
            time.sleep(AGAIN_S)

    def piece(self, room: RoomAddress, manifest: Manifest, file: ManifestFile, piece: int) -> memoryview | None:
        """Ask one room for a piece; return its bytes, as announced. None: it did not send them."""
        size, found = manifest.size_of(file, piece), list[memoryview]()

        def asked() -> None:
            content = self._ask(room, file.digest, (piece * manifest.piece_bytes, size))
            if (digest := hashlib.sha256(content).hexdigest()) != file.pieces[piece]:
                raise ValueError(f"its sha256 is {digest}, expected {file.pieces[piece]}")
            found.append(content)

        if self._tried(room, f"piece {piece} of {file.name} of {manifest.shown}", asked, is_announced=not room.is_home):
            self.bytes_from[room.node] += size
        return found[0] if found else None

    def held(self, room: RoomAddress, digest: str, num_pieces: int) -> Flags | None:
        """Ask a peer which pieces of a manifest's files it has. None: it did not say."""
        found: list[Flags] = []

        def asked() -> None:
            try:
                content = np.frombuffer(self._ask(room, digest + PIECES, moves=False), dtype=np.uint8)
            except _Missed:  # it does not fetch this
                return
            if len(content) != -(-num_pieces // 8):
                raise ValueError(f"{len(content)} bytes do not have {num_pieces} bits")
            found.append(np.unpackbits(content, count=num_pieces).astype(np.bool_))

        self._tried(room, "what it has", asked)
        return found[0] if found else None

    def check(self, what: str) -> None:
        """Raise FetchFailed if no room has sent anything for STALL_S, all sent wrong bytes, or the caller has left."""
        if self.is_stopped:
            raise FetchFailed("the fetch was stopped")
        stalled_s, known = time.monotonic() - self._moved, self._known()
        are_all_wrong = bool(known) and all(each.secret in self._left_out for each in known)
        if stalled_s > (GONE_S if self._is_gone else STALL_S) or are_all_wrong:
            reasons = "; ".join(f"{node}: {why}" for node, why in sorted(self._said.items()))
            message = f"{what} did not come from any node for {stalled_s:.0f} s: {reasons or 'no node has a room'}"
            raise FetchFailed(message, unusable=self._has_wrong_home)

    def _tried(self, room: RoomAddress, what: str, ask: Callable[[], object], *, is_announced: bool = False) -> bool:
        """Ask a room. Return whether it sent the bytes; if it did not, note what that makes of it.

        Args:
            room: the room.
            what: names the bytes in messages.
            ask: asks, and raises ValueError if the bytes are wrong.
            is_announced: the room has said that it has the bytes.
        """
        try:
            ask()
        except _Missed as error:
            self._note_missed(room, what, error, is_announced=is_announced)
        except TimeoutError as error:
            self._drop(room)
            if room.is_home:
                self._rest(self._away, room, FAILED_S, f"TimeoutError: {error}")
            else:
                self._leave_out(room, "was silent", f"{what}: {error}")
        except (OSError, http.client.HTTPException) as error:  # also a certificate that is not the room's
            self._drop(room)
            self._rest(self._away, room, FAILED_S, f"{type(error).__name__}: {error}")
        except ValueError as error:
            self._has_wrong_home |= room.is_home
            self._leave_out(room, "sent wrong bytes", f"{what}: {error}")
        else:
            del self._num_busy[room.secret], self._num_unsent[room.secret]
            return True
        return False

    def _note_missed(self, room: RoomAddress, what: str, error: _Missed, *, is_announced: bool) -> None:
        counted = self._num_unsent if error.is_absent else self._num_busy
        counted[room.secret] += 1
        if is_announced and self._num_unsent[room.secret] >= MAX_UNSENT:
            self._leave_out(room, "announced pieces that it does not send", f"{what}: {error}")
        elif is_announced and self._num_busy[room.secret] >= MAX_BUSY:
            del self._num_busy[room.secret]
            self._rest(self._away, room, FAILED_S, str(error))
        else:
            self._rest(self._resting, room, MISSED_S, str(error))

    def _leave_out(self, room: RoomAddress, what: str, why: str) -> None:
        """Ask a room no more until the fetch ends."""
        if room.secret in self._left_out:
            return
        self._left_out[room.secret] = self._said[shown(room)] = f"{what}: {why}"
        self._drop(room)
        log.error("source_left_out", node=room.node, host=room.host, port=room.port, reason=f"{what}: {why}")
        self._show(f"{shown(room)} {what} and is left out: {why}")

    def _rest(self, until: dict[str, float], room: RoomAddress, seconds: float, why: str) -> None:
        until[room.secret] = time.monotonic() + seconds
        self._said[shown(room)] = why[:REASON_CHARS]

    def _ask(
        self, room: RoomAddress, path: str, part: tuple[int, int] | None = None, *, moves: bool = True
    ) -> memoryview:
        """Return the bytes of a path.

        Args:
            room: the room.
            path: after the first slash.
            part: first byte and number of bytes; None: all.
            moves: they are what is fetched, so the fetch does not stall.
        """
        headers = {"Authorization": f"{SCHEME}{room.secret}"}
        if part is not None:
            headers["Range"] = f"bytes={part[0]}-{part[0] + part[1] - 1}"
        connection = self._connection(room)
        connection.request("GET", f"/{path}", headers=headers)
        response = connection.getresponse()
        size = int(response.headers.get("Content-Length") or 0)
        if response.status != (200 if part is None else 206):
            text = response.read(REASON_CHARS).decode(errors="replace").strip()
            if size > REASON_CHARS:
                self._drop(room)
            if room.is_home:
                self._is_gone = response.status == http.HTTPStatus.NOT_FOUND
            raise _Missed(response.status, text)
        if size != part[1] if part is not None else size > MAX_MANIFEST_BYTES:
            raise ValueError(f"it sent {size} bytes" + (f", expected {part[1]}" if part else ""))
        return self._read(response, size, moves=moves)

    def _read(self, response: http.client.HTTPResponse, size: int, *, moves: bool) -> memoryview:
        content, filled, ends = memoryview(bytearray(size)), 0, time.monotonic() + PIECE_S
        while filled < size:
            number = response.readinto(content[filled : filled + PART_BYTES])
            if not number:
                raise ConnectionError("it closed the connection in the middle of an answer")
            filled += number
            now = time.monotonic()
            if moves:
                self._moved = now
            if now > ends:
                raise TimeoutError(f"it sent {filled} of {size} bytes in {PIECE_S:g} s")
        response.read()  # the connection is free for the next request
        return content.toreadonly()

    def _connection(self, room: RoomAddress) -> http.client.HTTPConnection:
        known: dict[str, http.client.HTTPConnection] = self._local.__dict__.setdefault("connections", {})
        if room.secret not in known:
            plain = socket.create_connection((room.host, room.port), timeout=CONNECT_S)
            try:
                secured = client_context(room.certificate).wrap_socket(plain, server_hostname=NAME)
            except BaseException:
                plain.close()
                raise
            secured.settimeout(READ_S)
            known[room.secret] = connection = http.client.HTTPConnection(room.host, room.port)
            connection.sock = secured
            connection.auto_open = 0  # it would connect again without TLS
            self._opened.append(connection)
        return known[room.secret]

    def _drop(self, room: RoomAddress) -> None:
        known: dict[str, http.client.HTTPConnection] = self._local.__dict__.setdefault("connections", {})
        connection = known.pop(room.secret, None)
        if connection is not None:
            connection.close()
