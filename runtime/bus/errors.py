"""Errors of the bus, in one tree: `except BusError` catches all of them.

BusError
├── BusUnavailable        no server, no stream, or the connection closed for good
│   └── BusRefused        ... because the server rejects the login
├── PublishTimeout        a message was not confirmed within its deadline; it may still have been stored
├── MessageRefused        no reader could decode it, or its subject is invalid; nothing was sent
│   └── MessageTooLarge   ... because headers and payload exceed a limit of readers or of the server
├── StreamFull            the stream stayed full until the deadline
├── AlreadyQueued         the work stream still holds a message under this subject
├── SequenceMismatch      compare-and-set failed; another process wrote first
├── UnknownDecision       the ledger holds an event of a type that this version does not know
├── LogTrimmedAway        unread events were trimmed from the log while a reader was away or behind
├── Fenced                another instance took over; this one must stop
├── PayloadLost           no message under this sequence: purged, or never stored
│   └── PayloadUnreadable ... or a message that cannot be decoded
├── StreamConflict        an existing stream has other settings that cannot be changed
└── CallError             a call to an actor failed
    ├── CallTimeout       ... without an answer within its deadline
    ├── NotServed         ... because no process serves it
    └── CallRefused       ... because the answer is an error
"""


class BusError(Exception):
    """Base of all errors of the bus."""


class BusUnavailable(BusError):
    """No server, no stream, or the connection closed for good."""


class BusRefused(BusUnavailable):
    """The server rejects the login."""


class PublishTimeout(BusError):
    """A message was not confirmed within its deadline. It may still have been stored."""


class MessageRefused(BusError):
    """No reader could decode the message, or its subject is invalid. Nothing was sent."""


class MessageTooLarge(MessageRefused):
    """Headers and payload exceed a limit of readers or of the server. Nothing was sent."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{subject}: {size_bytes} bytes with headers; allowed: at most {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class StreamFull(BusError):
    """The stream stayed full until the deadline."""


class AlreadyQueued(BusError):
    """The work stream still holds a message under this subject. For a requeued task, this is success."""


class SequenceMismatch(BusError):
    """Compare-and-set failed: another process wrote first."""

    def __init__(self, subject: str, *, expected: int, last: int) -> None:
        super().__init__(f"{subject}: expected {expected} as the last sequence, found {last}")
        self.expected = expected
        self.last = last


class UnknownDecision(BusError):
    """The ledger holds an event of a type that this version does not know. Without it, a fold would be wrong."""


class LogTrimmedAway(BusError):
    """Unread events were trimmed from the log. The reader must start again from the newest snapshot."""


class Fenced(BusError):
    """Another instance took over; this one must stop (EXIT_FENCED)."""


class PayloadLost(BusError):
    """The data stream has no usable message under this sequence: purged, or never stored."""


class PayloadUnreadable(PayloadLost):
    """The message under this sequence cannot be used."""


class StreamConflict(BusError):
    """An existing stream has other settings that cannot be changed."""


class CallError(BusError):
    """A call to an actor failed."""


class CallTimeout(CallError):
    """No answer within the deadline."""


class NotServed(CallError):
    """No process serves this subject."""


class CallRefused(CallError):
    """The actor answered with an error."""
