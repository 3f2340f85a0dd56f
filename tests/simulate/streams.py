"""Streams of a simulated JetStream server: what they store, refuse, replace and forget."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from tests.simulate.subjects import Filter

NANOSECONDS: Final = 1_000_000_000
TTL: Final = "Nats-TTL"
MESSAGE_ID: Final = "Nats-Msg-Id"
EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_WITHIN: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
FRAME_BYTES: Final = 34  # of a message in a file: length, sequence, time, subject's length, checksum


class Message(NamedTuple):
    """A stored message."""

    seq: int
    subject: str
    headers: dict[str, str] | None
    data: bytes
    time_s: float  # Unix time of the server
    size: int


class Refused(Exception):
    """The server answers a request with an error."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.answer = {"code": code, "err_code": err_code, "description": description}


class Follower(Protocol):
    """A consumer of a stream."""

    def stored(self, message: Message) -> None: ...
    def removed(self, message: Message) -> None: ...


def size_of(subject: str, headers: dict[str, str] | None, data: bytes) -> int:
    """Bytes that a message takes in a stream's files."""
    size = FRAME_BYTES + len(subject) + len(data)
    if headers:
        size += 12 + sum(len(name) + len(value) + 4 for name, value in headers.items())
    return size


class Stream:
    """One stream.

    Args:
        config: of the JetStream API.
        now: returns the server's Unix time.
        expire_in: has a message expire after so many seconds.
    """

    def __init__(
        self, config: dict[str, Any], now: Callable[[], float], expire_in: Callable[[float, int], None]
    ) -> None:
        self.config = config
        self.created_s = now()
        self.name: str = config["name"]
        self.captures = [Filter(pattern) for pattern in config["subjects"]]
        self.messages: dict[int, Message] = {}
        self.first_seq = 0
        self.last_seq = 0
        self.num_bytes = 0
        self.followers: dict[str, Follower] = {}
        self.is_full = False  # whether it refuses new messages, whatever it holds
        self._of_subject: dict[str, dict[int, None]] = {}
        self._last: dict[str, int] = {}  # last sequence of wide filters that were asked for
        self._filters: dict[str, Filter] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._now = now
        self._expire_in = expire_in

    @property
    def state(self) -> dict[str, Any]:
        return {
            "messages": len(self.messages),
            "bytes": self.num_bytes,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "consumer_count": len(self.followers),
        }

    def store(self, subject: str, headers: dict[str, str] | None, data: bytes) -> tuple[int, bool]:
        """Store a message; return its sequence, and whether it was stored before under the same id.

        Raises:
            Refused: a limit, or another last sequence than expected.
        """
        now, headers = self._now(), headers or {}
        message_id = headers.get(MESSAGE_ID)
        if EXPECTED in headers:
            last = self.last_of(headers.get(EXPECTED_WITHIN, subject))
            if last != int(headers[EXPECTED]):
                raise Refused(400, 10071, f"wrong last sequence: {last}")
        if message_id is not None and message_id in self._ids:
            seq, then = self._ids[message_id]
            if now - then <= self.config["duplicate_window"] / NANOSECONDS:
                return seq, True
        size, config = size_of(subject, headers, data), self.config
        of_subject = self._of_subject.get(subject)
        per_subject = config["max_msgs_per_subject"]
        replaces = per_subject > 0 and of_subject is not None and len(of_subject) >= per_subject
        if replaces and config["discard_new_per_subject"]:
            raise Refused(503, 10077, "maximum messages per subject exceeded")
        self._make_room(size, replaced=next(iter(of_subject or ()), 0) if replaces else 0)
        if replaces:
            self.remove(next(iter(of_subject or ())))
        seq = self.last_seq = self.last_seq + 1
        message = Message(seq, subject, headers, data, now, size)
        if not self.messages:
            self.first_seq = seq
        self.messages[seq] = message
        self.num_bytes += size
        self._of_subject.setdefault(subject, {})[seq] = None
        for pattern, wide in self._filters.items():
            if wide.matches(subject):
                self._last[pattern] = seq
        if message_id is not None:
            self._ids[message_id] = seq, now
        if TTL in headers:
            self._expire_in(float(headers[TTL].removesuffix("s")), seq)
        for follower in tuple(self.followers.values()):
            follower.stored(message)
        return seq, False

    def _make_room(self, size: int, *, replaced: int) -> None:
        config = self.config
        freed = self.messages[replaced].size if replaced else 0
        while 0 < config["max_bytes"] < self.num_bytes + size - freed or self.is_full:
            if config["discard"] == "new" or not self.messages:
                raise Refused(503, 10077, "maximum bytes exceeded")
            self.remove(self.first_seq)
        if 0 < config["max_msgs"] <= len(self.messages) - bool(replaced):
            raise Refused(503, 10077, "maximum messages exceeded")

    def remove(self, seq: int) -> bool:
        """Remove a message; whether there was one."""
        message = self.messages.pop(seq, None)
        if message is None:
            return False
        self.num_bytes -= message.size
        of_subject = self._of_subject[message.subject]
        del of_subject[seq]
        if not of_subject:
            del self._of_subject[message.subject]
        for pattern in [pattern for pattern, last in self._last.items() if last == seq]:
            del self._last[pattern], self._filters[pattern]
        if seq == self.first_seq:
            self.first_seq = next(iter(self.messages), self.last_seq + 1)
        for follower in tuple(self.followers.values()):
            follower.removed(message)
        return True

    def purge(self, *, below_seq: int | None = None, subject_filter: str | None = None) -> int:
        """Remove the messages below a sequence, or under a filter, or all; return their number."""
        passes = None if subject_filter is None else Filter(subject_filter)
        doomed = []
        for seq, message in self.messages.items():
            if below_seq is not None and seq >= below_seq:
                break
            if passes is None or passes.matches(message.subject):
                doomed.append(seq)
        for seq in doomed:
            self.remove(seq)
        if below_seq is not None and below_seq > self.last_seq + 1 and passes is None:
            self.last_seq = below_seq - 1
        if not self.messages:
            self.first_seq = self.last_seq + 1
        return len(doomed)

    def expire(self, seq: int) -> None:
        """End the lifetime of a message. A mark takes its place if it was the last of its subject."""
        message = self.messages.get(seq)
        if message is None:
            return
        self.remove(seq)
        if self.config.get("subject_delete_marker_ttl") and message.subject not in self._of_subject:
            self.store(message.subject, {"Nats-Marker-Reason": "MaxAge"}, b"")

    def last_of(self, pattern: str) -> int:
        """Last sequence under a filter; 0: none."""
        if "*" not in pattern and ">" not in pattern:
            return next(reversed(self._of_subject[pattern]), 0) if pattern in self._of_subject else 0
        if pattern not in self._last:
            wide = Filter(pattern)
            lasts = (next(reversed(seqs)) for name, seqs in self._of_subject.items() if wide.matches(name))
            last = max(lasts, default=0)
            if not last:
                return 0
            self._filters[pattern], self._last[pattern] = wide, last
        return self._last[pattern]

    def last_of_each(self, patterns: list[str]) -> list[Message]:
        """The last message of each subject under the filters, by sequence."""
        wanted = [Filter(pattern) for pattern in patterns]
        seqs = [
            next(reversed(of))
            for subject, of in self._of_subject.items()
            if any(each.matches(subject) for each in wanted)
        ]
        return [self.messages[seq] for seq in sorted(seqs)]

    def from_seq(self, seq: int) -> Iterator[Message]:
        """The messages from a sequence on."""
        return (message for number, message in self.messages.items() if number >= seq)
