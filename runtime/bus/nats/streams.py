"""The streams and the KV bucket of a run: created or updated, with explicit limits."""

from typing import Any, Final

import msgspec
import structlog

from messages import Plane
from messages.subjects import STORED_PLANES, bucket_of, plane_filter, stream_of
from runtime.bus.errors import BusError, StreamConflict
from runtime.bus.limits import StreamLimits
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.store import NANOSECONDS, STREAM_NOT_FOUND, ApiFailed, api_call

log = structlog.get_logger()

MESSAGE_GONE: Final = frozenset({10037, 10043, 10057})  # error codes for a sequence that holds no message
MARKERS_S: Final = 365 * 86_400  # lifetime of the mark that the server leaves in place of an expired key
MAX_CONSUMERS: Final = 1024
_FIXED: Final = ("retention", "storage")  # the server refuses to change these


class StreamState(msgspec.Struct, frozen=True):
    """State of a stream."""

    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    created: str = ""  # creation time in nanoseconds; tells a recreated stream from its predecessor
    max_bytes: int = -1  # byte limit; -1: none

    @property
    def used(self) -> float:
        """Used share of its byte limit."""
        return self.bytes / self.max_bytes if self.max_bytes > 0 else 0.0


async def state_of(connection: Connection, stream: str) -> StreamState:
    """Current state of a stream."""
    info = await api_call(connection, f"STREAM.INFO.{stream}")
    more = {"max_bytes": info["config"]["max_bytes"], "created": info["created"]}
    return msgspec.convert({**info["state"], **more}, StreamState)


def stream_names(run: str) -> list[str]:
    """Names of a run's streams, the bucket's first."""
    return [f"KV_{bucket_of(run)}", *(stream_of(run, plane) for plane in STORED_PLANES)]


async def found_streams(connection: Connection, run: str) -> dict[str, StreamState]:
    """State of a run's existing streams, by name."""
    found: dict[str, StreamState] = {}
    for name in stream_names(run):
        try:
            found[name] = await state_of(connection, name)
        except ApiFailed as error:
            if error.err_code != STREAM_NOT_FOUND:
                raise
    return found


async def delete_streams(connection: Connection, run: str) -> None:
    """Delete a run's existing streams and their consumers.

    Deletes the bucket first: an interruption leaves streams without a run, never a run without some of its streams.
    """
    for name in stream_names(run):
        await delete_stream(connection, name)


async def delete_stream(connection: Connection, name: str) -> None:
    """Delete a stream, if it exists."""
    try:
        await api_call(connection, f"STREAM.DELETE.{name}")
    except ApiFailed as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
    else:
        log.info("stream_deleted", stream=name)


async def purge(connection: Connection, stream: str, *, below_seq: int) -> None:
    """Delete the messages of a stream below a sequence."""
    await api_call(connection, f"STREAM.PURGE.{stream}", {"seq": below_seq})


async def purge_subjects(connection: Connection, stream: str, subject_filter: str) -> None:
    """Delete the messages of a stream under a subject filter."""
    await api_call(connection, f"STREAM.PURGE.{stream}", {"filter": subject_filter})


async def delete_message(connection: Connection, stream: str, seq: int) -> None:
    """Delete one message of a stream, if the stream still holds it."""
    try:
        await api_call(connection, f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
    except ApiFailed as error:
        if error.err_code not in MESSAGE_GONE:
            raise


async def widen(connection: Connection, stream: str, *, to_bytes: int) -> None:
    """Raise the byte limit of a stream, unless it is that high."""
    config = (await api_call(connection, f"STREAM.INFO.{stream}"))["config"]
    if config["max_bytes"] < to_bytes:
        await api_call(connection, f"STREAM.UPDATE.{stream}", config | {"max_bytes": to_bytes})
        log.info("stream_widened", stream=stream, max_bytes=to_bytes)


def stream_configs(run: str, limits: StreamLimits) -> list[dict[str, Any]]:
    """JetStream API configurations of a run's streams."""
    event, work, data, dead = (
        _stream(run, plane, limits, size)
        for plane, size in (
            (Plane.EVENT, limits.event_bytes),
            (Plane.WORK, limits.work_bytes),
            (Plane.DATA, limits.data_bytes),
            (Plane.DEAD, limits.dead_bytes),
        )
    )
    # one message per subject: a task is refused while it is still queued
    work |= {"retention": "workqueue", "max_msgs": limits.work_messages}
    work |= {"max_msgs_per_subject": 1, "discard_new_per_subject": True}
    dead |= {"discard": "old"}
    return [event, work, data, dead, _bucket(run, limits)]


def _stream(run: str, plane: Plane, limits: StreamLimits, max_bytes: int) -> dict[str, Any]:
    return _config(stream_of(run, plane), [plane_filter(run, plane)], limits, max_bytes)


def _bucket(run: str, limits: StreamLimits) -> dict[str, Any]:
    bucket = bucket_of(run)
    config = _config(f"KV_{bucket}", [f"$KV.{bucket}.>"], limits, limits.kv_bytes)
    return (
        config
        | {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True, "deny_delete": True, "allow_msg_ttl": True}
        | {"subject_delete_marker_ttl": MARKERS_S * NANOSECONDS}
    )


def _config(name: str, subjects: list[str], limits: StreamLimits, max_bytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",
        "discard": "new",  # a full stream makes writers wait; it drops nothing
        "discard_new_per_subject": False,
        "max_bytes": max_bytes,
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,  # the server's max_payload bounds it
        "max_age": 0,
        "max_consumers": MAX_CONSUMERS,
        "num_replicas": limits.replicas,
        "duplicate_window": int(limits.duplicate_window_s * NANOSECONDS),
        "allow_direct": True,
    }


async def ensure_streams(connection: Connection, run: str, limits: StreamLimits) -> None:
    """Create a run's streams, or update their limits. Idempotent and safe to run concurrently.

    Raises:
        StreamConflict: a stream of this name exists with other settings that cannot be changed.
        BusError: the server refuses, for example because its storage limit is below the sum of the streams.
    """
    for config in stream_configs(run, limits):
        try:
            await _ensure_stream(connection, config)
        except ApiFailed as error:
            raise BusError(f"stream {config['name']}: {error}") from error


async def _ensure_stream(connection: Connection, wanted: dict[str, Any]) -> None:
    name = wanted["name"]
    try:
        found = await api_call(connection, f"STREAM.INFO.{name}")
    except ApiFailed as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        await api_call(connection, f"STREAM.CREATE.{name}", wanted)
        log.info("stream_created", stream=name, max_bytes=wanted["max_bytes"])
        return
    changes = {key: value for key, value in wanted.items() if found["config"].get(key, _absent(value)) != value}
    if not changes:
        return
    for key in _FIXED:
        if key in changes:
            raise StreamConflict(f"stream {name}: {key} is {found['config'].get(key)!r}, expected {wanted[key]!r}")
    await api_call(connection, f"STREAM.UPDATE.{name}", found["config"] | wanted)
    log.info("stream_updated", stream=name, changes=sorted(changes))


def _absent(value: Any) -> Any:
    """Value of a key that the server omits: the zero value of its type, or None for a list."""
    return type(value)() if not isinstance(value, list) else None
