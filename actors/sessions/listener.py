"""The HTTP side of the listener for agents.

What needs a status is decided before the first byte of an answer. After it a connection is held for as long as the
turn takes: by white space before JSON, by events or comments in a stream. No limit is answered with 429, on which some
clients end.
"""

import logging
import re
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Final
from uuid import uuid4

import anyio
import anyio.to_thread
import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from actors.sessions.dialects.chat import ChatDialect
from actors.sessions.dialects.generate import GenerateDialect, models
from actors.sessions.dialects.messages import MessagesDialect
from actors.sessions.dialects.reading import Asked, Dialect, ParameterRefused, Problem, decode
from actors.sessions.dialects.responses import ResponsesDialect
from actors.sessions.joining import Joining, Prepared, Running
from runtime.bus.addresses import host_port
from runtime.http.connections import CONNECTIONS, SCHEME, SEND_S, Handler, Limits, served, trust
from runtime.sessions.keys import MAX_KEY_CHARS, Use
from runtime.sessions.link import HOLD_S, ControlCall, Unavailable
from runtime.sessions.listener_end import ListenerEnd
from runtime.sessions.turns import TurnRefused
from runtime.settings.placement import is_loopback

MAX_BODY_BYTES: Final = 16 << 20
LEAST_BODY_BYTES: Final = 1 << 20  # for tools and a system prompt, whatever the context
BODY_BYTES_PER_TOKEN: Final = 32  # of the context: words with their JSON, and room for what is cut later
LARGE_BODY_BYTES: Final = 256 << 10  # beyond, a body is parsed on a thread
LARGE_BODIES: Final = 8  # that are read or parsed at once
MAX_REASON_CHARS: Final = 1000
WAITING: Final = (1024, 8)  # connections without a head, and the share of the descriptors that they may use
ASKING: Final = (1024, 8)  # without a valid key
SPACE: Final = b" "
HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
SESSION: Final = web.RequestKey("session", str)
KEY_IN_PATH: Final = re.compile(r"^/s/[^/]*")
PATHS: Final[Mapping[str, Dialect]] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MessagesDialect(),
    "/inference/v1/generate": GenerateDialect(),
}
CHAT: Final = PATHS["/v1/chat/completions"]
MESSAGES: Final = MessagesDialect()

log = logging.getLogger("sessions")


class ListenerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the listener.

    Args:
        host: at which it listens. Beyond loopback it needs a certificate.
        port: 0: any free one.
        certificate: file of a certificate for TLS; None: there is no TLS.
        private_key: file of its key.
        num_actors: rollout actors of its node.
        connections: at most, of holders of keys; beyond, the oldest one is closed.
        connections_per_session: the same, of one session.
        body_s: time for a body to come, in seconds.
        first_byte_s: time for which a status may still be decided, in seconds; afterwards a connection is held.
        hold_every_s: time between two signs of life on a connection that is held, in seconds.
        hold_s: time for which a call waits for a rollout actor that is away, in seconds.
        turn_s: time for a whole turn, in seconds.
        repeat_s: time for which a delivered answer is repeated to the same request, in seconds.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    certificate: str | None = None
    private_key: str | None = None
    num_actors: Annotated[int, Meta(ge=1)] = 1
    connections: Annotated[int, Meta(ge=4)] = 4096
    connections_per_session: Annotated[int, Meta(ge=4)] = 64
    body_s: Annotated[float, Meta(gt=0)] = 60.0
    first_byte_s: Annotated[float, Meta(gt=0)] = 20.0
    hold_every_s: Annotated[float, Meta(gt=0)] = 5.0
    hold_s: Annotated[float, Meta(gt=0)] = HOLD_S
    turn_s: Annotated[float, Meta(gt=0)] = 7200.0
    repeat_s: Annotated[float, Meta(ge=0)] = 600.0

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key: set both or none")
        if self.certificate is None and not is_loopback(self.host):
            raise ValueError(f"host = {self.host!r}: without a certificate the listener is for this machine alone")

    def tls(self) -> ssl.SSLContext | None:
        """Return the context of TLS, if there is a certificate."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.private_key)
        return context


class _Reward(Struct, forbid_unknown_fields=True):
    """Body of PUT /session/reward; without a number there is no reward, which is not 0."""

    reward: float | None = None
    rewards: dict[str, float] | None = None  # by name
    answer: str | None = None  # id of the answer that it is for; None: of the whole session
    turns: tuple[float | None, ...] | None = None  # of each turn, the first one first; null: that turn has none


class _Ending(Struct, forbid_unknown_fields=True):
    """Body of POST /session/end, which may be empty."""

    truncated: bool = False  # the episode was cut off, and is not over


class _Failure(Struct, forbid_unknown_fields=True):
    reason: Annotated[str, Meta(min_length=1)]


class Listener:
    """Answers agents, and holders of control keys.

    Args:
        end: the listener's end of the link.
        joining: joins requests for the same turn.
        settings: of the listener.
    """

    def __init__(self, end: ListenerEnd, joining: Joining, settings: ListenerSettings) -> None:
        self._end, self._joining, self._settings = end, joining, settings
        self._large = anyio.Semaphore(LARGE_BODIES)
        self._dropped: dict[str, Counter[str]] = {}  # tools that no model was offered, by session

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        for prefix in ("", "/s/{key}"):
            router = application.router
            for path in PATHS:
                router.add_post(prefix + path, self._turn)
            router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            router.add_get(f"{prefix}/v1/models", self._models)
            router.add_get(f"{prefix}/session", self._show)
            router.add_put(f"{prefix}/session/reward", self._reward)
            router.add_post(f"{prefix}/session/end", self._end_session)
            router.add_post(f"{prefix}/session/fail", self._fail)

        def forget(session: str) -> None:
            self._joining.forget(session)
            self._dropped.pop(session, None)
            application[CONNECTIONS].forget(session)

        self._end.on_end = forget
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Find the session of a request by its key, and give errors the form that its client reads."""
        began, session = monotonic(), ""
        try:
            session, use = await self._end.find(_key_of(request))
            trust(request, session)
            _check_use(request, use)
            request[SESSION] = session
            response = await handler(request)
        except TurnRefused as refused:
            response = _problem(request, Problem.of(refused))
        except Unavailable as error:
            response = _problem(request, Problem(503, str(error), retry=True))
        except web.HTTPRequestEntityTooLarge:
            response = _problem(request, Problem(413, f"A body has at most {self._max_body()} bytes."))
        except web.HTTPException as error:
            response = _problem(request, Problem(error.status, f"{error.reason}: {shown_path(request)}"))
        except (ConnectionError, TimeoutError, web.RequestPayloadError):
            _cut(request)  # the client has left, or does not take or send its bytes
            response = web.Response(status=499)
        took_ms = round((monotonic() - began) * 1000)
        log.debug("%s %s %d %s %d ms", request.method, shown_path(request), response.status, session, took_ms)
        return response

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        dialect, session = _dialect_of(request), request[SESSION]
        prepared = await self._read(request, dialect.read)
        if prepared.asked.dropped_tools:
            self._dropped.setdefault(session, Counter()).update(prepared.asked.dropped_tools)
        running = self._joining.join(session, prepared)
        with anyio.move_on_after(self._settings.first_byte_s):
            await running.decided.wait()
        if running.problem is not None:
            return _problem(request, running.problem)
        deliver = self._stream if prepared.asked.stream else self._whole
        return await deliver(request, dialect, prepared.asked, running)

    async def _whole(
        self, request: web.Request, dialect: Dialect, asked: Asked, running: Running
    ) -> web.StreamResponse:
        """Answer with JSON, after white space if it takes long."""
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/json"})
        while not await self._is_done(running):
            await _send(request, response, SPACE)
        if running.problem is not None:
            if not response.prepared:
                return _problem(request, running.problem)
            _cut(request)  # the client asks again, and gets the status
            return response
        await _send(request, response, dialect.answer(asked, running.turn))
        await response.write_eof()
        running.is_delivered = True
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, asked: Asked, running: Running
    ) -> web.StreamResponse:
        """Answer with events. A stream ends with its end or with an error."""
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        await _send(request, response, dialect.opening(asked, running.turn))
        while not await self._is_done(running):
            await _send(request, response, dialect.hold(asked, running.turn))
        if running.problem is not None:
            await _send(request, response, dialect.problem_event(running.problem))
        else:
            await _send(request, response, b"".join(dialect.events(asked, running.turn)))
        await response.write_eof()
        running.is_delivered = running.problem is None
        return response

    async def _is_done(self, running: Running) -> bool:
        with anyio.move_on_after(self._settings.hold_every_s):
            await running.done.wait()
        return running.done.is_set()

    async def _count(self, request: web.Request) -> web.StreamResponse:
        prepared = await self._read(request, MESSAGES.read_counted)
        num_tokens = await self._end.count(uuid4().hex, request[SESSION], prepared.asked.request)
        return _json({"input_tokens": num_tokens})

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return _answered(models(self._end.model, self._end.max_tokens))

    async def _show(self, request: web.Request) -> web.StreamResponse:
        content = await self._control(request, "show", {})
        dropped = self._dropped.get(request[SESSION], Counter())
        return _json({**content, "session": request[SESSION], "dropped_tools": dict(dropped)})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        given = decode(await self._body(request), _Reward)
        if given.reward is None and not given.rewards:
            raise ParameterRefused("reward", "a finite number is needed; a session without one has no reward")
        return _json(await self._control(request, "reward", msgspec.to_builtins(given)))

    async def _end_session(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        ending = decode(body, _Ending) if body else _Ending()
        return _json(await self._control(request, "end", msgspec.to_builtins(ending)))

    async def _fail(self, request: web.Request) -> web.StreamResponse:
        reason = decode(await self._body(request), _Failure).reason[:MAX_REASON_CHARS]
        return _json(await self._control(request, "fail", {"reason": reason}))

    async def _control(self, request: web.Request, call: ControlCall, content: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._end.control(uuid4().hex, request[SESSION], call, content)

    async def _read(self, request: web.Request, read: Callable[[bytes], Asked]) -> Prepared:
        length = request.content_length
        if length is not None and length <= LARGE_BODY_BYTES:
            return Prepared(read(await self._body(request)))
        async with self._large:
            body = await self._body(request)
            return await anyio.to_thread.run_sync(lambda: Prepared(read(body)))

    async def _body(self, request: web.Request) -> bytes:
        most = self._max_body()
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise ParameterRefused("Content-Encoding", "a body is sent as it is")
        if (request.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
        body = bytearray()
        with anyio.fail_after(self._settings.body_s):
            async for part in request.content.iter_any():
                body += part
                if len(body) > most:
                    raise web.HTTPRequestEntityTooLarge(most, len(body))
        return bytes(body)

    def _max_body(self) -> int:
        return min(MAX_BODY_BYTES, LEAST_BODY_BYTES + BODY_BYTES_PER_TOKEN * self._end.max_tokens)


def shown_path(request: web.Request) -> str:
    """Return the path of a request for a log, without a key."""
    return KEY_IN_PATH.sub("/s/***", request.path)


def _key_of(request: web.Request) -> str:
    given = request.match_info.get("key") or request.headers.get("x-api-key")
    if given is None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        given = given if scheme.lower() == SCHEME.strip().lower() else ""
    return given[: MAX_KEY_CHARS + 1]


def _check_use(request: web.Request, use: Use) -> None:
    """Refuse what a key is not for.

    Raises:
        TurnRefused: a model key is for turns alone, and a control key for the session.
    """
    is_control = _path_of(request).startswith("/session")
    if is_control and use != "control":
        raise TurnRefused("forbidden", "This key generates, and may not read, reward or end its session.")
    if not is_control and use != "model":
        raise TurnRefused("forbidden", "This key is for the control of a session; the model's key generates.")


def _path_of(request: web.Request) -> str:
    return KEY_IN_PATH.sub("", request.path)


def _dialect_of(request: web.Request) -> Dialect:
    path = _path_of(request)
    return PATHS.get(path) or (MESSAGES if path.startswith("/v1/messages") else CHAT)


def _problem(request: web.Request, problem: Problem) -> web.Response:
    headers = {**HEADERS, "Content-Type": "application/json", "x-should-retry": str(problem.retry).lower()}
    response = web.Response(status=problem.status, body=_dialect_of(request).problem(problem), headers=headers)
    if problem.status == 413:
        response.force_close()
    return response


def _answered(body: bytes) -> web.Response:
    return web.Response(body=body, headers={**HEADERS, "Content-Type": "application/json"})


def _json(content: Mapping[str, Any]) -> web.Response:
    return _answered(msgspec.json.encode(content))


async def _send(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    with anyio.fail_after(SEND_S):
        if not response.prepared:
            await response.prepare(request)
        if content:
            await response.write(content)


def _cut(request: web.Request) -> None:
    """End a connection so that its client does not take what came for the whole."""
    if request.transport is not None:
        request.transport.abort()


@asynccontextmanager
async def listening(run_dir: Path, settings: ListenerSettings) -> AsyncGenerator[str]:
    """Serve agents for the duration of a block; yield the URL at which they reach the listener.

    Args:
        run_dir: directory of the run, for the socket of the link.
        settings: of the listener.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    end = ListenerEnd(run_dir, hold_s=settings.hold_s, turn_s=settings.turn_s, num_actors=settings.num_actors)
    tls = settings.tls()
    limits = Limits(WAITING, ASKING, (settings.connections, 2), settings.connections_per_session)
    async with anyio.create_task_group() as tasks:
        listener = Listener(end, Joining(end.turn, tasks, settings.repeat_s), settings)
        async with served(listener.application(), settings.host, settings.port, tls, limits) as port:
            end.url = f"{'http' if tls is None else 'https'}://{host_port(settings.host, port)}"
            await tasks.start(end.serve)
            yield end.url
            tasks.cancel_scope.cancel()
