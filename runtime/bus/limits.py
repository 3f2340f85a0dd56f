"""Every bound of the bus: of a connection, of a run's streams. None is a default of the server or the client."""

import msgspec

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_EVENT_BYTES = 8 * MIB  # half of what a reader asks for ahead, whatever the server would take


class BusLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines and buffer bounds of one connection."""

    connect_timeout_s: float = 10.0  # until the first connect gives up
    reconnect_wait_s: float = 0.1  # between attempts after a connection was lost
    ping_interval_s: int = 10  # a server silent for three pings is left
    publish_timeout_s: float = 30.0  # until a publish gives up, all its attempts together
    attempt_timeout_s: float = 5.0  # of one attempt, in case its answer was lost
    pending_bytes: int = 64 * MIB  # written by us, not yet taken by the socket
    inbox_messages: int = 65_536  # received, not yet handled, per subscription; more are dropped and counted
    inbox_bytes: int = 256 * MIB
    pull_expires_s: float = 10.0  # a pull request ends, and is renewed, after this
    pull_heartbeat_s: float = 2.0  # silence of more than twice this means that the pull is lost
    read_ahead: int = 512  # events that a reader asks for ahead of its caller
    read_ahead_bytes: int = 16 * MIB
    max_fetches: int = 64  # direct gets in flight
    max_calls: int = 64  # calls handled at the same time by one instance
    drain_timeout_s: float = 2.0  # for ending in order


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a run's streams. Event, work and data streams refuse what is over; dead letters push out the oldest."""

    event_bytes: int = GIB
    work_bytes: int = GIB
    work_messages: int = 1_000_000
    data_bytes: int = 8 * GIB
    dead_bytes: int = 64 * MIB
    kv_bytes: int = 64 * MIB
    duplicate_window_s: float = 120.0  # spares storage on retries; nothing relies on it
