"""What can go wrong on the bus. One tree: `except BusError` catches all of it.

BusError
├── BusUnavailable        no server, no stream, or the connection closed for good
│   └── BusRefused        ... since the server does not take the login
├── PublishTimeout        a message was not confirmed within its deadline; it may still have been stored
├── MessageRefused        no reader could use it, or no subject has this form; nothing was sent
│   └── MessageTooLarge   ... since headers and payload exceed what a reader or the server takes
├── StreamFull            the stream stayed full until the deadline
├── AlreadyQueued         the work stream still holds a message under this subject
├── SequenceMismatch      compare-and-set failed; someone else wrote first
├── UnknownDecision       the ledger holds an event of a type that this version does not know
├── LogTrimmedAway        events that a reader had yet to read were trimmed from the log while it was away or behind
├── Fenced                another instance took over; this one must stop
├── PayloadLost           no message under this sequence: purged, or never stored
│   └── PayloadUnreadable ... or there is one that cannot be decoded
├── StreamConflict        an existing stream differs in a way that cannot be changed
└── CallError             a question to an actor was not answered
    ├── CallTimeout       ... within its deadline
    ├── NotServed         ... since nobody serves it
    └── CallRefused       ... but with an error
"""


class BusError(Exception):
    """Base of all errors of the bus."""


class BusUnavailable(BusError):
    """No server, no stream, or the connection closed for good."""


class BusRefused(BusUnavailable):
    """The server does not take the login that it was given."""


class PublishTimeout(BusError):
    """A message was not confirmed within its deadline. It may still have been stored."""


class MessageRefused(BusError):
    """A message that no reader could use, or whose subject has no valid form. Nothing was sent."""


class MessageTooLarge(MessageRefused):
    """Headers and payload exceed what a reader or the server takes. Nothing was sent."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{subject}: {size_bytes} bytes with headers, {limit_bytes} are taken")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class StreamFull(BusError):
    """The stream stayed full until the deadline."""


class AlreadyQueued(BusError):
    """The work stream still holds a message under this subject. For a task put again, that is success."""


class SequenceMismatch(BusError):
    """Compare-and-set failed: someone else wrote first."""

    def __init__(self, subject: str, *, expected: int, last: int) -> None:
        super().__init__(f"{subject}: expected {expected} as the last sequence, found {last}")
        self.expected = expected
        self.last = last


class UnknownDecision(BusError):
    """The ledger holds an event of a type that this version does not know: what is folded without it would be false."""


class LogTrimmedAway(BusError):
    """Events that a reader had yet to read were trimmed away: it is to start again from the newest snapshot."""


class Fenced(BusError):
    """Another instance took over; this one must stop (exit code 3)."""


class PayloadLost(BusError):
    """The data stream has no usable message under this sequence: purged, or never stored."""


class PayloadUnreadable(PayloadLost):
    """There is a message under this sequence, but not one that can be used. It was dead-lettered."""


class StreamConflict(BusError):
    """A stream exists with settings that differ in a way that cannot be changed."""


class CallError(BusError):
    """A question to an actor was not answered."""


class CallTimeout(CallError):
    """No answer within the deadline."""


class NotServed(CallError):
    """Nobody serves this subject."""


class CallRefused(CallError):
    """The actor answered with an error."""
