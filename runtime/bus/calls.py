"""The call plane: calls to one actor instance, and small answers to an inbox."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Generic

import structlog
from anyio.abc import TaskGroup

from messages import CallFailed, DecodeError, EncodeError, Message, MessageT, decode, decode_as, encode
from messages.codec import CONTENT_TYPE_HEADER, JSON, MSGPACK
from messages.plain import clipped
from messages.subjects import call_subject, is_inbox
from runtime.bus.background import task_group
from runtime.bus.dead import DeadLetters
from runtime.bus.errors import CallRefused, CallTimeout, MessageRefused, MessageTooLarge, NotServed
from runtime.bus.nats.connection import AttemptTimeout, Connection, Disconnected, NoResponders, RawMessage
from runtime.bus.wire import to_wire

log = structlog.get_logger()

REASON_CHARS: Final = 1000  # bound of a handler's error text
MAX_ANSWERS: Final = 4096  # of an inbox
ABSENCE_S: Final = 0.5  # time that an instance may need to reconnect after a restart of the server
Handler = Callable[[Any], Awaitable[Message]]


async def ask(connection: Connection, run: str, instance: str, request: Message, timeout_s: float) -> Message:
    """Call one instance once.

    Raises:
        CallTimeout: no answer in time, or the connection was lost; the call may have been handled.
        NotServed: no process serves this request for this instance.
        CallRefused: the answer is an error, or unreadable.
        MessageRefused: nothing was sent.
    """
    subject = call_subject(run, instance, type(request).topic)
    encoded = to_wire(request)
    connection.check_size(subject, encoded.payload, encoded.headers)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    if not connection.is_connected and not await connection.wait_connected(timeout_s):
        raise CallTimeout(f"{subject}: not connected within {timeout_s:g} s")
    absent_until = connection.time() + min(deadline - loop.time(), ABSENCE_S)
    failures = 0
    while True:
        try:
            remaining_s = max(0.001, deadline - loop.time())
            raw = await connection.request(subject, encoded.payload, encoded.headers, remaining_s)
            break
        except NoResponders as error:
            if not await connection.pause(absent_until, failures, error):
                raise NotServed(subject) from None
            failures += 1
        except (AttemptTimeout, Disconnected) as error:
            raise CallTimeout(f"{subject}: {error} within {timeout_s:g} s") from error
    try:
        answer = decode(raw.data, raw.headers)
    except DecodeError as error:
        raise CallRefused(f"{subject}: unreadable answer: {error}") from error
    if isinstance(answer, CallFailed):
        raise CallRefused(f"{subject}: {answer.reason}")
    return answer


class CallServer:
    """Answers calls to one instance."""

    def __init__(
        self,
        connection: Connection,
        dead_letters: DeadLetters,
        run: str,
        handlers: Mapping[type[Message], Handler],
        group: TaskGroup,
    ) -> None:
        self._connection = connection
        self._run = run
        self._dead_letters = dead_letters
        self._handlers = dict(handlers)
        self._group = group
        self._num_active = 0

    def on_message(self, raw: RawMessage) -> None:
        self._num_active += 1
        self._group.start_soon(self._answer, raw)

    async def _answer(self, raw: RawMessage) -> None:
        try:
            if raw.reply and not is_inbox(self._run, raw.reply):
                await self._bury(raw, f"reply subject {clipped(raw.reply, 80)!r} is not an inbox of this run")
                return
            if self._num_active > self._connection.limits.max_calls:
                answer: Message = CallFailed(
                    reason=f"busy: {self._connection.limits.max_calls} calls are in progress already"
                )
            else:
                answer = await self._handle(raw)
            await self._reply(raw, answer)
        finally:
            self._num_active -= 1

    async def _handle(self, raw: RawMessage) -> Message:
        try:
            request = decode(raw.data, raw.headers)
            handler = self._handlers.get(type(request))
            if handler is None:
                raise DecodeError(f"{type(request).__name__} is not a request that this process serves")
        except DecodeError as error:
            await self._bury(raw, str(error))
            return CallFailed(reason=str(error))
        try:
            return await handler(request)
        except Exception as error:  # the caller gets the handler's error; the server goes on
            log.exception("call_failed", subject=raw.subject)
            return CallFailed(reason=clipped(repr(error), REASON_CHARS))

    async def _bury(self, raw: RawMessage, reason: str) -> None:
        await self._dead_letters.bury(
            f"call.{self._connection.unique()}",
            subject=raw.subject,
            reason=reason,
            headers=raw.headers,
            payload=raw.data,
        )

    async def _reply(self, raw: RawMessage, answer: Message) -> None:
        if not raw.reply:
            return
        asked_in = (raw.headers or {}).get(CONTENT_TYPE_HEADER)
        try:
            encoded = encode(answer, content_type=asked_in if asked_in in (JSON, MSGPACK) else None)
        except EncodeError as error:
            encoded = encode(CallFailed(reason=str(error)))
        try:
            await self._connection.send(raw.reply, encoded.payload, encoded.headers)
        except MessageTooLarge as error:
            encoded = encode(CallFailed(reason=str(error)))
            await self._connection.send(raw.reply, encoded.payload, encoded.headers)
        except (MessageRefused, Disconnected) as error:  # the reply subject may be invalid
            log.warning("call_answer_dropped", subject=raw.subject, error=str(error))


@asynccontextmanager
async def serve(
    connection: Connection,
    dead_letters: DeadLetters,
    run: str,
    instance: str,
    handlers: Mapping[type[Message], Handler],
) -> AsyncGenerator[None, None]:
    """Answer calls to an instance for the duration of a block."""
    async with task_group() as group:
        server = CallServer(connection, dead_letters, run, handlers, group)
        subjects = {call_subject(run, instance, message_type.topic) for message_type in handlers}
        listeners = [await connection.subscribe(subject, server.on_message) for subject in sorted(subjects)]
        try:
            yield
        finally:
            for listener in listeners:
                await listener.stop()


class Inbox(Generic[MessageT]):
    """A private subject for answers of one type. When `bound` answers wait, it drops and counts new ones."""

    def __init__(
        self,
        connection: Connection,
        dead_letters: DeadLetters,
        message_type: type[MessageT],
        bound: int = MAX_ANSWERS,
        *,
        subject: str = "",
    ) -> None:
        self.subject = subject or connection.new_inbox()
        self._connection = connection
        self._dead_letters = dead_letters
        self._type = message_type
        self._bound = bound
        self._buffer: deque[RawMessage] = deque()
        self._arrived = asyncio.Event()

    def on_message(self, raw: RawMessage) -> None:
        if len(self._buffer) >= self._bound:
            self._connection.counters.slow_consumer_drops += 1
            return
        self._buffer.append(raw)
        self._arrived.set()

    async def next(self, timeout_s: float | None = None) -> MessageT | None:
        """The next answer, or None after timeout_s."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            if not self._buffer and not await self._wait(deadline):
                return None
            raw = self._buffer.popleft()
            try:
                message = decode_as(self._type, raw.data, raw.headers)
                self._check(message, raw.subject)
            except DecodeError as error:
                await self._refuse(raw, str(error))
                continue
            return message

    def _check(self, message: MessageT, subject: str) -> None:
        """Raise DecodeError if an answer on this subject cannot be used."""

    async def _refuse(self, raw: RawMessage, reason: str) -> None:
        """Dead-letter an answer that cannot be used."""
        await self._dead_letters.bury(
            f"call.{self._connection.unique()}",
            subject=raw.subject,
            reason=reason,
            headers=raw.headers,
            payload=raw.data,
        )

    async def _wait(self, deadline: float | None) -> bool:
        loop = asyncio.get_running_loop()
        while not self._buffer:
            self._arrived.clear()
            timer = None if deadline is None else loop.call_at(deadline, self._arrived.set)
            try:
                await self._arrived.wait()
            finally:
                if timer is not None:
                    timer.cancel()
            if not self._buffer and deadline is not None and loop.time() >= deadline:
                return False
        return True

    def __aiter__(self) -> "Inbox[MessageT]":
        return self

    async def __anext__(self) -> MessageT:
        while True:
            message = await self.next()
            if message is not None:
                return message
