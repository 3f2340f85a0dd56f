"""The bus: messages over NATS JetStream. The only package that knows nats."""

from runtime.bus.bus import Bus, Events, Received, StoredMessage, StreamState
from runtime.bus.calls import Handler, Inbox
from runtime.bus.consumer import Deliveries, Delivery
from runtime.bus.errors import (
    AlreadyQueued,
    BusError,
    BusUnavailable,
    CallError,
    CallRefused,
    CallTimeout,
    Fenced,
    MessageTooLarge,
    NotServed,
    PayloadLost,
    PayloadUnreadable,
    PublishTimeout,
    SequenceMismatch,
    StreamConflict,
    StreamFull,
)
from runtime.bus.kv import Entry, KeyValues, Watch
from runtime.bus.limits import BusLimits, StreamLimits

__all__ = [
    "AlreadyQueued",
    "Bus",
    "BusError",
    "BusLimits",
    "BusUnavailable",
    "CallError",
    "CallRefused",
    "CallTimeout",
    "Deliveries",
    "Delivery",
    "Entry",
    "Events",
    "Fenced",
    "Handler",
    "Inbox",
    "KeyValues",
    "MessageTooLarge",
    "NotServed",
    "PayloadLost",
    "PayloadUnreadable",
    "PublishTimeout",
    "Received",
    "SequenceMismatch",
    "StoredMessage",
    "StreamConflict",
    "StreamFull",
    "StreamLimits",
    "StreamState",
    "Watch",
]
