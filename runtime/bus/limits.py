"""Limits of the bus: of a connection, and of a run's streams. No limit is left to a default of server or client."""

import msgspec

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_EVENT_BYTES = 8 * MIB  # half of a reader's read-ahead, whatever the server's limit


class BusLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines and buffer bounds of one connection."""

    connect_timeout_s: float = 10.0  # of the first connect
    reconnect_wait_s: float = 0.1  # between reconnect attempts
    ping_interval_s: int = 10
    max_pings: int = 3  # unanswered ones that end the connection
    outage_s: float = 0.0  # of a lost connection: such seconds do not count against the deadlines of publishing
    publish_timeout_s: float = 30.0  # of a publish, over all its attempts
    attempt_timeout_s: float = 5.0  # of one attempt, in case its answer is lost
    pending_bytes: int = 64 * MIB  # sent by this process, not yet taken by the socket
    inbox_messages: int = 65_536  # received and not yet handled, per subscription; more are dropped and counted
    inbox_bytes: int = 256 * MIB
    pull_expires_s: float = 10.0  # lifetime of a pull request, which is then renewed
    pull_heartbeat_s: float = 2.0  # silence of more than twice this long means that the pull is lost
    read_ahead: int = 512  # events that a reader requests ahead of its caller
    read_ahead_bytes: int = 16 * MIB
    max_fetches: int = 64  # concurrent direct gets
    max_calls: int = 64  # concurrent calls of one instance
    drain_timeout_s: float = 2.0  # for an orderly shutdown


def over_network(limits: BusLimits, outage_s: float) -> BusLimits:
    """Limits of a connection to a server that may be out of reach for `outage_s` seconds; 0: unchanged.

    A lost network is noticed within 8 s, so that the connection is made anew. Otherwise it would wait for packets that
    the kernel sends again ever more rarely.
    """
    if outage_s == 0.0:
        return limits
    return msgspec.structs.replace(
        limits,
        outage_s=outage_s,
        ping_interval_s=2,
        max_pings=2,
    )


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a run's streams. Full event, work and data streams refuse messages; dead letters replace the oldest."""

    event_bytes: int = GIB
    work_bytes: int = GIB
    work_messages: int = 1_000_000
    data_bytes: int = 8 * GIB
    dead_bytes: int = 64 * MIB
    kv_bytes: int = 64 * MIB
    replicas: int = 1  # servers that hold each stream
    duplicate_window_s: float = 120.0  # saves storage on retries; correctness does not depend on it
