"""A simulated nats-server: subjects, JetStream's streams and consumers, and links to clients that may break.

It answers what the project's bus sends, as nats-server 2.12 does; the same contract tests run on both. What it stores
survives its end; consumers of readers do not. It has no permissions, no cluster and no limits of connections.
"""

import itertools
from asyncio import TimerHandle
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from tests.simulate.consumers import Consumer
from tests.simulate.loop import Process, VirtualLoop
from tests.simulate.streams import Message, Refused, Stream
from tests.simulate.subjects import Filter

EPOCH_S: Final = 1_700_000_000.0  # Unix time at which the clocks of simulations begin
API: Final = "$JS.API."
MAX_PAYLOAD: Final = 8 << 20
LATENCY_S: Final = (0.0001, 0.001)
SLOW_S: Final = 0.05  # latency of one message in 50
MANY: Final = 1024  # subjects of one request

Headers = dict[str, str] | None


class Msg(NamedTuple):
    """A message as a client gets it."""

    subject: str
    reply: str
    data: bytes
    headers: Headers


class Client(Protocol):
    """The other end of a link."""

    process: Process

    def received(self, sid: int, message: Msg) -> None: ...
    def ponged(self) -> None: ...
    def cut(self, reason: str) -> None: ...


class Link:
    """A connection. What is sent arrives in order, and is lost if the connection breaks first."""

    def __init__(self, server: "SimulatedServer", client: Client) -> None:
        self.is_up = True
        self.subs: dict[int, str] = {}
        self.client = client
        self._server = server
        self._to_server = self._to_client = 0.0

    def send(self, what: Callable[..., None], *args: Any) -> None:
        """Have the server do something for this client when the request arrives."""
        loop = self._server.loop
        self._to_server = max(loop.time() + self._server.latency_s(), self._to_server + 1e-7)
        loop.arrive(self._to_server, self._server.process, self._arrived, what, args)

    def _arrived(self, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_up:
            what(self, *args)

    def reply(self, what: Callable[..., None], *args: Any) -> None:
        """Have the client do something when the answer arrives."""
        loop = self._server.loop
        self._to_client = max(loop.time() + self._server.latency_s(), self._to_client + 1e-7)
        loop.arrive(self._to_client, self.client.process, self._answered, what, args)

    def _answered(self, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_up:
            what(*args)

    def close(self) -> None:
        """End the connection from the client's side. The server handles what it was sent before."""
        self.send(lambda link: self._server.unlink(link))

    def break_off(self, reason: str) -> None:
        """Break the connection: what is on its way is lost. The client notices, if it lives."""
        if not self.is_up:
            return
        self._server.unlink(self)
        self._server.loop.arrive(
            self._server.loop.time() + self._server.latency_s(), self.client.process, self.client.cut, reason
        )


class SimulatedServer:
    """The server of one simulation, with what it stores."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.streams: dict[str, Stream] = {}
        self.history: list[tuple[str, Message]] = []  # all that was stored on any stream, with its name
        self.on_stored: Callable[[str, bytes, dict[str, str]], None] = lambda *_: None
        self.process = Process(loop, "nats-server")
        self.is_up = True
        self.links: set[Link] = set()
        self.links_in_order: list[Link] = []
        self._random = random
        self._exact: dict[str, dict[tuple[Link, int], None]] = {}
        self._wild: dict[tuple[Link, int], Filter] = {}
        self._names = itertools.count(1)
        self._unique = itertools.count(1)

    # the machine

    def time(self) -> float:
        return self.loop.time()

    def unix_time(self) -> float:
        """Its clock."""
        return EPOCH_S + self.loop.time()

    def unique(self) -> int:
        """A number for a name that no other client has."""
        return next(self._unique)

    def latency_s(self) -> float:
        """Draw the time that a message takes."""
        low, high = LATENCY_S
        slow = SLOW_S if self._random.random() < 0.02 else 1.0 * high
        return low + self._random.random() * (slow - low)

    def later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call something later, unless the server has ended by then."""
        return self.loop.call_at(self.loop.time() + delay_s, callback, *args, context=self.process.context)

    def kill(self) -> None:
        """End as by SIGKILL."""
        self.is_up = False
        self.process.kill()
        for link in tuple(self.links_in_order):
            link.break_off("unexpected EOF")

    def start(self) -> None:
        """Start again, with what was stored."""
        self.process = Process(self.loop, "nats-server")
        self.is_up = True
        for stream in self.streams.values():
            for name, consumer in list(stream.followers.items()):
                if isinstance(consumer, Consumer) and consumer.is_durable:
                    consumer.restart()
                else:
                    del stream.followers[name]
            for message in stream.messages.values():
                if message.headers and "Nats-TTL" in message.headers:
                    left_s = float(message.headers["Nats-TTL"].removesuffix("s")) + message.time_s - self.unix_time()
                    self._expire_in(stream, max(0.0, left_s), message.seq)

    def _expire_in(self, stream: Stream, seconds: float, seq: int) -> None:
        self.later(seconds, self._expire, stream, seq)

    def _expire(self, stream: Stream, seq: int) -> None:
        before = stream.last_seq
        stream.expire(seq)
        if stream.last_seq > before:
            message = stream.messages[stream.last_seq]
            self._route(message.subject, message.headers, message.data, "")

    # clients

    def link(self, client: Client) -> Link:
        """Accept a client."""
        link = Link(self, client)
        self.links.add(link)
        self.links_in_order.append(link)
        return link

    def unlink(self, link: Link) -> None:
        """Forget a client whose connection ended."""
        if link.is_up:
            link.is_up = False
            self.links.discard(link)
            self.links_in_order.remove(link)
            for sid in tuple(link.subs):
                self.unsubscribe(link, sid)

    def subscribe(self, link: Link, sid: int, subject: str) -> None:
        """Take a subscription."""
        link.subs[sid] = subject
        if "*" in subject or ">" in subject:
            self._wild[link, sid] = Filter(subject)
        else:
            self._exact.setdefault(subject, {})[link, sid] = None

    def unsubscribe(self, link: Link, sid: int) -> None:
        """End a subscription."""
        subject = link.subs.pop(sid, None)
        if subject is None:
            return
        if self._wild.pop((link, sid), None) is None:
            del self._exact[subject][link, sid]
            if not self._exact[subject]:
                del self._exact[subject]

    def ping(self, link: Link) -> None:
        """Answer a ping."""
        link.reply(link.client.ponged)

    def has_interest(self, subject: str) -> bool:
        """Whether a client subscribes to a subject."""
        return subject in self._exact or any(each.matches(subject) for each in self._wild.values())

    def publish(self, link: Link, subject: str, reply: str, headers: Headers, data: bytes) -> None:
        """Take a message of a client."""
        if subject.startswith("$JS."):
            if subject.startswith("$JS.ACK."):
                self._acknowledge(subject, data)
                return
            if self._call(subject, reply, data):
                return
        else:
            for stream in self.streams.values():
                if any(each.matches(subject) for each in stream.captures):
                    self._store(stream, subject, reply, headers, data)
                    self._route(subject, headers, data, reply)
                    return
        if not self._route(subject, headers, data, reply) and reply:
            self.send(reply, {"Status": "503"}, b"")

    def send(self, subject: str, headers: Headers, data: bytes, reply: str = "", *, shown: str = "") -> None:
        """Send a message to the clients that subscribe to a subject; `shown` is the subject that they see."""
        self._route(subject, headers, data, reply, shown=shown)

    def _route(self, subject: str, headers: Headers, data: bytes, reply: str, *, shown: str = "") -> bool:
        message = Msg(shown or subject, reply, data, headers)
        found = list(self._exact.get(subject, ()))
        found += [place for place, each in self._wild.items() if each.matches(subject)]
        for link, sid in found:
            link.reply(link.client.received, sid, message)
        return bool(found)

    # JetStream

    def _store(self, stream: Stream, subject: str, reply: str, headers: Headers, data: bytes) -> None:
        answer: dict[str, Any] = {"stream": stream.name}
        try:
            answer["seq"], is_duplicate = stream.store(subject, headers, data)
        except Refused as refused:
            answer |= {"seq": 0, "error": refused.answer}
        else:
            if is_duplicate:
                answer["duplicate"] = True
            else:
                self.history.append((stream.name, stream.messages[answer["seq"]]))
                self.on_stored(stream.name, data, headers or {})
        if reply:
            self.send(reply, None, msgspec.json.encode(answer))

    def _acknowledge(self, subject: str, data: bytes) -> None:
        _, _, name, consumer, _, seq, *_ = subject.split(".")
        stream = self.streams.get(name)
        follower = None if stream is None else stream.followers.get(consumer)
        if isinstance(follower, Consumer):
            follower.acknowledge(int(seq), data)

    def _call(self, subject: str, reply: str, data: bytes) -> bool:
        """Answer a request of JetStream's API. Return False if no stream or consumer of its name gets it."""
        verb = subject.removeprefix(API)
        if verb.startswith("DIRECT.GET."):
            return self._get(verb.removeprefix("DIRECT.GET."), reply, data)
        if verb.startswith("CONSUMER.MSG.NEXT."):
            name, consumer = verb.removeprefix("CONSUMER.MSG.NEXT.").split(".")
            follower = self.streams[name].followers.get(consumer) if name in self.streams else None
            if isinstance(follower, Consumer):
                follower.pull(reply, data)
            return isinstance(follower, Consumer)
        asked: dict[str, Any] = msgspec.json.decode(data) if data else {}
        try:
            answer = self._answer(verb, asked)
        except Refused as refused:
            answer = {"error": refused.answer}
        if reply:
            self.send(reply, None, msgspec.json.encode(answer))
        return True

    def _answer(self, verb: str, asked: dict[str, Any]) -> dict[str, Any]:
        kind, action, *rest = verb.split(".")
        if (kind, action) == ("STREAM", "CREATE"):
            name = rest[0]
            self.streams[name] = stream = Stream(
                asked, self.unix_time, lambda seconds, seq: self._expire_in(self.streams[name], seconds, seq)
            )
            return self._info(stream)
        if kind == "STREAM" and action == "MSG":
            action, *rest = (f"MSG.{rest[0]}", *rest[1:])
        name = rest[0]
        stream = self.streams.get(name)
        if stream is None:
            raise Refused(404, 10059, "stream not found")
        match kind, action:
            case "STREAM", "INFO":
                return self._info(stream)
            case "STREAM", "UPDATE":
                stream.config = asked
                return self._info(stream)
            case "STREAM", "DELETE":
                for follower in list(stream.followers):
                    self.forget(stream, follower, "Consumer Deleted")
                del self.streams[name]
                return {"success": True}
            case "STREAM", "PURGE":
                number = stream.purge(below_seq=asked.get("seq"), subject_filter=asked.get("filter"))
                return {"success": True, "purged": number}
            case "STREAM", "MSG.DELETE":
                if not stream.remove(asked["seq"]):
                    raise Refused(400, 10057, "sequence not found")
                return {"success": True}
            case "STREAM", "MSG.GET":
                seq = asked.get("seq") or stream.last_of(asked["last_by_subj"])
                if seq not in stream.messages:
                    raise Refused(404, 10037, "no message found")
                return {"message": _encoded(stream.messages[seq])}
            case "CONSUMER", "CREATE":
                return self._create(stream, asked["config"])
            case "CONSUMER", "NAMES":
                return {"consumers": sorted(stream.followers)}
            case "CONSUMER", ("DELETE" | "INFO"):
                consumer = stream.followers.get(rest[1])
                if not isinstance(consumer, Consumer):
                    raise Refused(404, 10014, "consumer not found")
                if action == "INFO":
                    return consumer.info
                self.forget(stream, rest[1], "Consumer Deleted")
                return {"success": True}
            case _:
                raise AssertionError(f"the simulated server does not know {verb}")

    def _create(self, stream: Stream, config: dict[str, Any]) -> dict[str, Any]:
        name = config.get("name") or f"c{next(self._names):07}"
        known = stream.followers.get(name)
        if isinstance(known, Consumer):
            known.config = config
            return known.info
        stream.followers[name] = consumer = Consumer(self, stream, name, config)
        return consumer.info

    def forget(self, stream: Stream, name: str, reason: str) -> None:
        """Delete a consumer."""
        consumer = stream.followers.pop(name, None)
        if isinstance(consumer, Consumer):
            consumer.end(reason)

    def _info(self, stream: Stream) -> dict[str, Any]:
        created = datetime.fromtimestamp(stream.created_s, UTC).isoformat()
        return {"config": stream.config, "created": created, "state": stream.state}

    def _get(self, place: str, reply: str, data: bytes) -> bool:
        """Answer a direct get, which a stream answers itself."""
        name, _, subject = place.partition(".")
        stream = self.streams.get(name)
        if stream is None:
            return False
        asked: dict[str, Any] = msgspec.json.decode(data) if data else {}
        if "multi_last" in asked:
            found = stream.last_of_each(asked["multi_last"])
            if len(found) > MANY:
                self.send(reply, {"Status": "413", "Description": "Too Many Results"}, b"")
            else:
                self._send_several(reply, stream, found, len(found))
            return True
        if "batch" in asked:
            several = list(itertools.islice(stream.from_seq(asked.get("seq", 1)), asked["batch"]))
            num_later = sum(1 for _ in stream.from_seq(asked.get("seq", 1)))
            self._send_several(reply, stream, several, num_later)
            return True
        seq = asked.get("seq") or stream.last_of(asked.get("last_by_subj", subject))
        message = stream.messages.get(seq)
        if message is None:
            self.send(reply, {"Status": "404", "Description": "Message Not Found"}, b"")
        else:
            self.send(reply, _with_place(stream, message), message.data)
        return True

    def _send_several(self, reply: str, stream: Stream, found: list[Message], num_left: int) -> None:
        if not found:
            self.send(reply, {"Status": "404", "Description": "No Results"}, b"")
            return
        before = 0
        for message in found:
            num_left -= 1
            also = {"Nats-Num-Pending": str(num_left), "Nats-Last-Sequence": str(before)}
            self.send(reply, _with_place(stream, message) | also, message.data)
            before = message.seq
        end = {"Status": "204", "Description": "EOB", "Nats-Num-Pending": str(num_left)}
        self.send(reply, end | {"Nats-Last-Sequence": str(before)}, b"")


def _with_place(stream: Stream, message: Message) -> dict[str, str]:
    time = datetime.fromtimestamp(message.time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {
        **(message.headers or {}),
        "Nats-Stream": stream.name,
        "Nats-Subject": message.subject,
        "Nats-Sequence": str(message.seq),
        "Nats-Time-Stamp": time,
    }


def _encoded(message: Message) -> dict[str, Any]:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (message.headers or {}).items())
    time = datetime.fromtimestamp(message.time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {
        "subject": message.subject,
        "seq": message.seq,
        "data": b64encode(message.data).decode(),
        "hdrs": b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode(),
        "time": time,
    }
