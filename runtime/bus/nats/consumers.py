"""JetStream consumers: temporary ones of readers, and durable ones. Also the acknowledgements of deliveries."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from runtime.bus.errors import BusUnavailable
from runtime.bus.nats.connection import Connection, Disconnected
from runtime.bus.nats.store import API, NANOSECONDS, STREAM_NOT_FOUND, ApiFailed, api_call

ACK: Final = b"+ACK"
TERM: Final = b"+TERM"  # ends redelivery of a message that was not processed
IN_PROGRESS: Final = b"+WPI"
_NAK: Final = b"-NAK"
CONSUMER_DOES_NOT_EXIST: Final = 10149  # answer to a create request while a consumer of that name is being deleted
CONSUMER_NOT_FOUND: Final = 10014
PASSING: Final = (STREAM_NOT_FOUND, CONSUMER_DOES_NOT_EXIST)
INACTIVE_S: Final = 60  # the server removes a consumer without requests for this long; its reader creates a new one
MAX_WAITING: Final = 512  # pull requests that the server queues per consumer


class Consumer(NamedTuple):
    """A consumer that existed in one epoch of the connection."""

    name: str
    epoch: int
    num_pending: int  # messages to deliver


class ConsumerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a durable consumer."""

    durable: str
    filters: tuple[str, ...]
    ack_wait_s: float
    max_ack_pending: int
    max_batch: int = 0  # messages of one pull request; 0: any number
    max_expires_s: float = 0.0  # lifetime of one pull request; 0: any


def give_back(delay_s: float = 0.0) -> bytes:
    """Acknowledgement that requests redelivery after delay_s."""
    return _NAK + (b' {"delay": %d}' % int(delay_s * NANOSECONDS) if delay_s > 0 else b"")


async def make_reader(connection: Connection, stream: str, filters: Sequence[str], from_seq: int | None) -> Consumer:
    """Create the temporary consumer of one reader, in the server's memory.

    Args:
        connection: connection to the server.
        stream: name of the stream.
        filters: subject filters.
        from_seq: first sequence to read; None: the latest message of each subject, then all later ones.

    Raises:
        BusUnavailable: no such stream, or no server, until the deadline.
    """
    start: dict[str, Any] = {"deliver_policy": "by_start_sequence", "opt_start_seq": from_seq}
    if from_seq is None:
        start = {"deliver_policy": "last_per_subject"}
    config = start | {
        "filter_subjects": list(filters),
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": INACTIVE_S * NANOSECONDS,
    }
    return await _make(connection, f"CONSUMER.CREATE.{stream}", stream, config, f"cannot read {stream}")


async def make_durable(connection: Connection, stream: str, settings: ConsumerSettings) -> Consumer:
    """Create or find a durable consumer.

    Raises:
        BusUnavailable: no such stream, or the server refuses the consumer.
    """
    name = settings.durable
    config: dict[str, Any] = {
        "durable_name": name,
        "name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(settings.ack_wait_s * NANOSECONDS),
        "max_deliver": -1,  # no limit: a message would stay in the stream after its last delivery
        "max_ack_pending": settings.max_ack_pending,
        "max_waiting": MAX_WAITING,
        "filter_subjects": list(settings.filters),
        "replay_policy": "instant",
    }
    if settings.max_batch:
        config["max_batch"] = settings.max_batch
    if settings.max_expires_s:
        config["max_expires"] = int(settings.max_expires_s * NANOSECONDS)
    return await _make(
        connection, f"CONSUMER.CREATE.{stream}.{name}", stream, config, f"cannot consume {stream} as {name}"
    )


async def _make(connection: Connection, api: str, stream: str, config: dict[str, Any], failed: str) -> Consumer:
    deadline = connection.time() + connection.limits.publish_timeout_s
    failures = 0
    while True:
        epoch = connection.epoch
        try:
            info = await api_call(connection, api, {"stream_name": stream, "config": config})
        except ApiFailed as error:
            if error.err_code not in PASSING or not await connection.pause(deadline, failures, error):
                raise BusUnavailable(f"{failed}: {error}") from error
            failures += 1
        else:
            return Consumer(info["name"], epoch, info["num_pending"])


async def durable_names(connection: Connection, stream: str) -> list[str]:
    """Names of a stream's consumers, at most 1024."""
    return (await api_call(connection, f"CONSUMER.NAMES.{stream}"))["consumers"] or []


async def delete_durable(connection: Connection, stream: str, name: str) -> None:
    """Delete a durable consumer, if it exists."""
    try:
        await api_call(connection, f"CONSUMER.DELETE.{stream}.{name}")
    except ApiFailed as error:
        if error.err_code != CONSUMER_NOT_FOUND:
            raise


async def forget_reader(connection: Connection, stream: str, name: str) -> None:
    """Remove a reader's consumer. If the request is lost, the server removes it as inactive."""
    with anyio.move_on_after(connection.limits.drain_timeout_s, shield=True):
        try:
            subject = f"{API}.CONSUMER.DELETE.{stream}.{name}"
            await connection.send(subject, b"", reply=connection.new_inbox())
        except Disconnected:
            return
