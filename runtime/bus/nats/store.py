"""Publishing to JetStream: with a deadline, and with retries under one message id."""

import asyncio
import base64
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple, cast

import anyio
import msgspec

from runtime.bus.errors import (
    AlreadyQueued,
    BusError,
    BusUnavailable,
    MessageRefused,
    PublishTimeout,
    SequenceMismatch,
    StreamFull,
)
from runtime.bus.nats.connection import (
    NO_RESPONDERS,
    STATUS,
    AttemptTimeout,
    Connection,
    Disconnected,
    Headers,
    NoResponders,
    RawMessage,
)

MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_FILTER = "Nats-Expected-Last-Subject-Sequence-Subject"
SEQUENCE = "Nats-Sequence"
SUBJECT = "Nats-Subject"
TIME = "Nats-Time-Stamp"  # when the server stored a message
BEFORE = "Nats-Last-Sequence"  # in one of several answers: sequence of the answer before it, 0 for the first
PENDING = "Nats-Num-Pending"  # in such an answer: number of later messages
API = "$JS.API"
NANOSECONDS = 1_000_000_000  # JetStream's unit of time, per second

# error codes of the server
STREAM_NOT_FOUND = 10059
MESSAGE_NOT_FOUND = 10037
WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
STREAM_STORE_FAILED = 10077  # a limit of the stream; only the text says which
PER_SUBJECT_LIMIT = "per subject"
STORAGE_EXHAUSTED = frozenset({10023, 10047, STREAM_STORE_FAILED})
MESSAGE_OVER_STREAM_LIMIT = 10054
ALL_SENT = "204"  # statuses after a request for several messages
NOT_FOUND = "404"
TOO_MANY = 413
NOT_READY = 503  # HTTP-like code: JetStream is starting or lacks a resource
ELECTING = frozenset({10005, 10009, 10158})  # a cluster's servers start or elect a leader, or store an earlier attempt
TOO_MANY_AT_ONCE = 10167  # the server holds 10,000 messages or 128 MiB of this stream that it has not stored yet
STREAM_OFFLINE = 10118  # its servers are away
PROBE_S = 1.0  # for JetStream to answer
STOOD_STILL_S = 1.0  # an attempt or a pause that ends this much too late: the time does not count
HEARD_S = 3.0  # since the last of the heartbeats that the servers of a stream send once a second


def _stood_still_s(began: float, expected_s: float) -> float:
    """Seconds in which this process was stopped or its event loop blocked, if something took that much longer."""
    late_s = anyio.current_time() - began - expected_s
    return late_s if late_s > STOOD_STILL_S else 0.0


class ApiError(msgspec.Struct, frozen=True):
    """Error of a JetStream request."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class PublishAnswer(msgspec.Struct, frozen=True):
    """JetStream's answer to a publish."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class Stored(NamedTuple):
    """A message stored in a stream."""

    seq: int
    subject: str
    headers: Mapping[str, str]
    data: bytes


class ApiFailed(BusError):
    """JetStream refused an API request. Internal: callers map it."""

    def __init__(self, subject: str, error: ApiError) -> None:
        super().__init__(f"{subject}: {error.description} (code {error.code}, err_code {error.err_code})")
        self.code = error.code
        self.err_code = error.err_code


class _Envelope(msgspec.Struct, frozen=True):
    error: ApiError | None = None


class _Peer(msgspec.Struct, frozen=True):
    active: int = 0  # nanoseconds since the leader heard from it


class _StreamCluster(msgspec.Struct, frozen=True):
    leader: str = ""
    replicas: tuple[_Peer, ...] = ()  # without the leader


class _StreamInfo(msgspec.Struct, frozen=True):
    error: ApiError | None = None
    cluster: _StreamCluster = _StreamCluster()


_info_decoder = msgspec.json.Decoder(_StreamInfo)
_answer_decoder = msgspec.json.Decoder(PublishAnswer)
_envelope_decoder = msgspec.json.Decoder(_Envelope)


async def api_call(connection: Connection, name: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call the JetStream API, with retries until it answers. Only for idempotent requests.

    Raises:
        ApiFailed: JetStream refused.
        BusUnavailable: no answer.
    """
    subject = f"{API}.{name}"
    payload = msgspec.json.encode(request) if request is not None else b""
    deadline = connection.time() + connection.limits.publish_timeout_s
    failures, failed = 0, None
    while True:
        try:
            answer = await connection.retry(subject, payload, None, max(0.001, deadline - connection.time()))
        except BusUnavailable as error:
            raise failed or error from error  # an earlier error says more than a last attempt that ran out of time
        error = _envelope_decoder.decode(answer.data).error
        if error is None:
            return cast("dict[str, Any]", msgspec.json.decode(answer.data))
        failed = ApiFailed(subject, error)
        if not _may_pass(error) or not await connection.pause(deadline, failures, failed):
            raise failed
        failures += 1


async def is_in_service(connection: Connection, stream: str) -> bool:
    """Whether a stream can store: it has a leader, which hears from a majority of the stream's servers.

    A leader notices only after 10 to 20 s that it has lost the others, and answers until then.
    """
    try:
        answer = await connection.request(f"{API}.STREAM.INFO.{stream}", b"", None, PROBE_S)
    except (Disconnected, AttemptTimeout, NoResponders):
        return False
    info = _info_decoder.decode(answer.data)
    if info.error is not None:
        return info.error.code != NOT_READY and info.error.err_code != STREAM_OFFLINE
    heard = [peer for peer in info.cluster.replicas if peer.active < HEARD_S * NANOSECONDS]
    return bool(info.cluster.leader) and len(heard) >= (1 + len(info.cluster.replicas)) // 2


def _may_pass(error: ApiError) -> bool:
    return error.code == NOT_READY or error.err_code in ELECTING or error.err_code == TOO_MANY_AT_ONCE


class Store:
    """Publishes to streams on one connection, and reads single messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._limits = connection.limits
        self._source = connection.unique()
        self._numbers = count(1)

    def new_id(self, subject: str) -> str:
        """A unique id of one publish. It includes the subject, so that ids of different subjects never collide."""
        return f"{subject}:{self._source}:{next(self._numbers)}"

    async def put(
        self, subject: str, payload: bytes, headers: Headers, *, expected_last: int | None = None, within: str = ""
    ) -> int:
        """Store a message; return its stream sequence. Adds the message id to `headers`.

        Stored at least once within the deadline. The server detects a retry after a lost answer by its id, as long as
        it remembers the id.

        Args:
            subject: subject of the message.
            payload: encoded message.
            headers: headers of the message.
            expected_last: required last sequence of the subject; 0: none; None: any.
            within: subject filter for `expected_last`, if wider than the subject.

        Raises:
            MessageRefused: the message is too large. Nothing was sent.
            AlreadyQueued: the work stream still holds a message under this subject.
            SequenceMismatch: the last sequence is another.
            StreamFull: the stream stays full until the deadline.
            PublishTimeout: no confirmation until the deadline.
            BusUnavailable: no stream takes the subject.
        """
        headers.setdefault(MESSAGE_ID, self.new_id(subject))
        if expected_last is not None:
            headers[EXPECTED_LAST] = str(expected_last)
        if within:
            headers[EXPECTED_LAST_FILTER] = within
        connection = self._connection
        connection.check_size(subject, payload, headers)
        deadline = connection.time() + self._limits.publish_timeout_s
        failures = 0
        failure: BusError | None = None
        while True:
            attempt_s, began = connection.attempt_time(deadline, failures), anyio.current_time()
            try:
                answer = await connection.request(subject, payload, headers, attempt_s)
            except (Disconnected, AttemptTimeout, NoResponders) as error:
                deadline += _stood_still_s(began, attempt_s)
                if failure is None or connection.time() < deadline:
                    failure = error  # at the deadline it may have had 1 ms: the failure before says why
            else:
                response = _answer_decoder.decode(answer.data)
                if response.error is None:
                    connection.counters.published += 1
                    return response.seq
                sequence = await self._settle(subject, response.stream, response.error, headers, failures > 0)
                if sequence:
                    return sequence
                failure = ApiFailed(subject, response.error)
            connection.counters.publish_retries += 1
            paused = anyio.current_time()
            if not await connection.pause(deadline, failures, failure):
                raise self._give_up(subject, failure) from failure
            if isinstance(failure, AttemptTimeout):  # such a pause takes no time
                deadline += _stood_still_s(paused, 0.0)
            failures += 1

    async def _settle(self, subject: str, stream: str, error: ApiError, headers: Headers, may_be_ours: bool) -> int:
        """Raise a final error, return the sequence if an earlier attempt was stored, or return 0 to retry."""
        if error.err_code in WRONG_LAST_SEQUENCE:
            # the server compares before it checks for duplicates: after a lost answer, the last message may be this one
            last, last_id = await self.last_of(stream, headers.get(EXPECTED_LAST_FILTER, subject))
            if may_be_ours and last_id == headers[MESSAGE_ID]:
                return last
            raise SequenceMismatch(subject, expected=int(headers[EXPECTED_LAST]), last=last)
        if error.err_code == STREAM_STORE_FAILED and PER_SUBJECT_LIMIT in error.description:
            if may_be_ours:
                last, last_id = await self.last_of(stream, subject)
                if last_id == headers[MESSAGE_ID]:
                    return last
            raise AlreadyQueued(subject)
        if error.err_code == MESSAGE_OVER_STREAM_LIMIT:
            raise MessageRefused(f"{subject}: larger than its stream allows: {error.description}")
        if not _may_pass(error) and error.err_code not in STORAGE_EXHAUSTED:
            raise ApiFailed(subject, error)
        return 0

    async def last_of(self, stream: str, subject_filter: str) -> tuple[int, str]:
        """Sequence and message id of the last message under a filter; (0, "") if there is none."""
        stored = await self.last(stream, subject_filter)
        return (0, "") if stored is None else (stored.seq, stored.headers.get(MESSAGE_ID, ""))

    async def last(self, stream: str, subject_filter: str) -> Stored | None:
        """The last message under a filter; None if there is none.

        Raises:
            BusUnavailable: no server until the deadline.
        """
        request = {"last_by_subj": subject_filter}
        if self._connection.is_clustered:  # a direct get may be answered by a server that holds an earlier one
            return await self._get_from_leader(stream, request)
        return await self._get(stream, msgspec.json.encode(request))

    async def last_of_each(self, stream: str, subject_filter: str) -> list[Stored]:
        """The last message of each subject under a filter, by sequence. One round trip; at most 1024 subjects.

        Raises:
            ApiFailed: the server refuses, for example because too many subjects match.
            BusUnavailable: no server until the deadline.
        """
        return await self._several(stream, {"multi_last": [subject_filter]})

    async def after(self, stream: str, from_seq: int, *, batch: int, max_bytes: int) -> list[Stored]:
        """The messages from a sequence on, in order and without gaps between them; none if there is none yet.

        It takes no consumer: the login needs no other right than to read the stored messages.

        Raises:
            ApiFailed: the server refuses.
            BusUnavailable: no server until the deadline.
        """
        found = await self._several(stream, {"seq": from_seq, "batch": batch, "max_bytes": max_bytes})
        before = 0
        for position, stored in enumerate(found):
            if int(stored.headers.get(BEFORE, 0)) != before:  # one was lost on the way
                return found[:position]
            before = stored.seq
        return found

    async def _several(self, stream: str, request: dict[str, Any]) -> list[Stored]:
        """The answers to a request for several messages, by sequence."""
        payload, connection = msgspec.json.encode(request), self._connection
        deadline, failures = connection.time() + self._limits.publish_timeout_s, 0
        while True:
            answers = _Answers()
            inbox = connection.new_inbox()
            listener = await connection.subscribe(inbox, answers.on_message)
            try:
                if not connection.is_connected:
                    raise Disconnected("not connected")
                await connection.send(f"{API}.DIRECT.GET.{stream}", payload, reply=inbox)
                with anyio.move_on_after(connection.attempt_time(deadline, failures)):
                    await answers.complete.wait()
                found = answers.found()
            except (Disconnected, AttemptTimeout, NoResponders) as error:
                if not await connection.pause(deadline, failures, error):
                    raise BusUnavailable(f"{stream}, {request}: {error!r}; {connection.last_error}") from error
                failures += 1
            else:
                return found
            finally:
                await listener.stop()

    async def get(self, stream: str, seq: int) -> Stored | None:
        """The message with a sequence; None if there is none.

        Raises:
            BusUnavailable: no server until the deadline.
        """
        found = await self._get(stream, b'{"seq":%d}' % seq)
        if found is None and self._connection.is_clustered:  # the server that answered may not have it yet
            return await self._get_from_leader(stream, {"seq": seq})
        return found

    async def get_by_subject(self, stream: str, subject: str) -> Stored | None:
        """The last message of a subject, named in the request's own subject; None if there is none.

        Raises:
            BusUnavailable: no server until the deadline.
        """
        found = await self._get(f"{stream}.{subject}", b"")
        if found is None and self._connection.is_clustered:
            return await self._get_from_leader(stream, {"last_by_subj": subject})
        return found

    async def _get(self, place: str, request: bytes) -> Stored | None:
        raw = await self._connection.retry(f"{API}.DIRECT.GET.{place}", request, None, self._limits.publish_timeout_s)
        headers = raw.headers or {}
        return None if headers.get(STATUS) is not None else _stored(raw)

    async def _get_from_leader(self, stream: str, request: dict[str, Any]) -> Stored | None:
        try:
            answer = await api_call(self._connection, f"STREAM.MSG.GET.{stream}", request)
        except ApiFailed as error:
            if error.err_code == MESSAGE_NOT_FOUND:
                return None
            raise
        return _of_leader(answer["message"])

    def _give_up(self, subject: str, failure: BusError) -> BusError:
        seconds = f"within {self._limits.publish_timeout_s:g} s"
        if isinstance(failure, NoResponders):
            return BusUnavailable(f"{subject}: no stream accepted it {seconds}")
        if isinstance(failure, ApiFailed) and failure.err_code in STORAGE_EXHAUSTED:
            return StreamFull(f"{failure}, not resolved {seconds}")
        return PublishTimeout(f"{subject}: not confirmed {seconds}: {failure!r}; {self._connection.last_error}")


def _stored(raw: RawMessage) -> Stored:
    headers = raw.headers or {}
    return Stored(int(headers.get(SEQUENCE, 0)), headers.get(SUBJECT, ""), headers, raw.data)


def _of_leader(message: dict[str, Any]) -> Stored:
    """Read the leader's answer to a get, which is JSON."""
    _, _, lines = base64.b64decode(message.get("hdrs", "")).decode(errors="replace").partition("\r\n")
    headers = dict(line.split(": ", 1) for line in lines.split("\r\n") if ": " in line)
    headers[TIME] = message["time"]
    return Stored(message["seq"], message["subject"], headers, base64.b64decode(message.get("data", "")))


class _Answers:
    """Collects the answers to one request for several messages. A status message marks their end."""

    def __init__(self) -> None:
        self.complete = asyncio.Event()
        self._stored: list[Stored] = []
        self._status = ""
        self._description = ""

    def on_message(self, raw: RawMessage) -> None:
        headers = raw.headers or {}
        status = headers.get(STATUS)
        if status is None:
            self._stored.append(_stored(raw))
            return
        self._status, self._description = status, headers.get("Description", "")
        self.complete.set()

    def found(self) -> list[Stored]:
        """The messages by sequence.

        Raises:
            AttemptTimeout: they are not complete.
            NoResponders: no such stream, or JetStream is starting.
            ApiFailed: the server refuses.
        """
        match self._status:
            case "":
                raise AttemptTimeout("no answer")
            case _ if self._status == NO_RESPONDERS:
                raise NoResponders("no such stream")
            case _ if self._status in (ALL_SENT, NOT_FOUND):
                return sorted(self._stored, key=lambda stored: stored.seq)
            case _:
                raise ApiFailed("DIRECT.GET", ApiError(code=int(self._status), description=self._description))
