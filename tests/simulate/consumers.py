"""Consumers of a simulated JetStream server: pull requests, redelivery, heartbeats."""

from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from tests.simulate.streams import NANOSECONDS, Message, Stream
from tests.simulate.subjects import Filters

ACK: Final = b"+ACK"
TERM: Final = b"+TERM"
IN_PROGRESS: Final = b"+WPI"
NAK: Final = b"-NAK"


class Host(Protocol):
    """The server of a consumer."""

    def later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle: ...
    def time(self) -> float: ...
    def has_interest(self, subject: str) -> bool: ...
    def send(
        self, subject: str, headers: dict[str, str] | None, data: bytes, reply: str = "", *, shown: str = ""
    ) -> None: ...
    def forget(self, stream: Stream, name: str, reason: str) -> None: ...


class _Request:
    """A pull request that waits for messages."""

    def __init__(self, inbox: str, asked: dict[str, Any], now: float) -> None:
        self.inbox = inbox
        self.left: int = asked.get("batch", 1)
        self.max_bytes: int = asked.get("max_bytes", 0)
        self.left_bytes = self.max_bytes
        self.heartbeat_s = asked.get("idle_heartbeat", 0) / NANOSECONDS
        self.active_at = now
        self.timers: list[TimerHandle] = []

    def end(self) -> None:
        for timer in self.timers:
            timer.cancel()


class _Unacked:
    """A delivered message that waits for its acknowledgement."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.num_delivered = 0
        self.timer: TimerHandle | None = None

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Consumer:
    """One consumer of one stream."""

    def __init__(self, host: Host, stream: Stream, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config
        self.is_durable = bool(config.get("durable_name"))
        self.unacked: dict[int, _Unacked] = {}
        self._host = host
        self._stream = stream
        self._filters = Filters(config.get("filter_subjects") or [])
        self._acks = config.get("ack_policy") == "explicit"
        self._requests: deque[_Request] = deque()
        self._again: dict[int, None] = {}  # to be redelivered
        self._num_sent = 0
        self._last_considered = 0
        self._todo: dict[int, None] = {}  # messages to be delivered first, in order
        self._used_at = host.time()
        policy = config.get("deliver_policy")
        if policy == "last_per_subject":
            patterns = config.get("filter_subjects") or [">"]
            self._todo = {message.seq: None for message in stream.last_of_each(patterns)}
        else:
            start = config.get("opt_start_seq", 1)
            self._todo = {m.seq: None for m in stream.from_seq(start) if self._filters.matches(m.subject)}
        if not self.is_durable:
            self._watch_use()

    @property
    def info(self) -> dict[str, Any]:
        return {
            "stream_name": self._stream.name,
            "name": self.name,
            "config": self.config,
            "num_pending": len(self._todo),
            "num_ack_pending": len(self.unacked),
            "num_waiting": len(self._requests),
        }

    def _watch_use(self) -> None:
        threshold_s = self.config.get("inactive_threshold", 0) / NANOSECONDS
        if not threshold_s:
            return
        if any(self._host.has_interest(request.inbox) for request in self._requests):
            self._used_at = self._host.time()
        idle_s = self._host.time() - self._used_at
        if idle_s >= threshold_s:
            self._host.forget(self._stream, self.name, "")
        else:
            self._host.later(threshold_s - idle_s, self._watch_use)

    # the stream

    def stored(self, message: Message) -> None:
        """Deliver a new message, or keep it for the next request."""
        if self._filters.matches(message.subject):
            self._todo[message.seq] = None
            self.deliver()

    def removed(self, message: Message) -> None:
        """Forget a message that the stream no longer holds."""
        self._todo.pop(message.seq, None)
        self._again.pop(message.seq, None)
        unacked = self.unacked.pop(message.seq, None)
        if unacked is not None:
            unacked.stop()

    # pull requests

    def pull(self, inbox: str, data: bytes) -> None:
        """Take a pull request."""
        asked: dict[str, Any] = msgspec.json.decode(data) if data else {}
        self._used_at = now = self._host.time()
        request = _Request(inbox, asked, now)
        if self.config.get("max_batch") and request.left > self.config["max_batch"]:
            self._status(request, "409", f"Exceeded MaxRequestBatch of {self.config['max_batch']}")
            return
        most_ns = self.config.get("max_expires", 0)
        if most_ns and asked.get("expires", 0) > most_ns:
            self._status(request, "409", f"Exceeded MaxRequestExpires of {most_ns // NANOSECONDS}s")
            return
        self._drop_deserted()
        if self.config.get("max_waiting") and len(self._requests) >= self.config["max_waiting"]:
            self._status(request, "409", "Exceeded MaxWaiting")
            return
        expires_s = asked.get("expires", 0) / NANOSECONDS
        if expires_s:
            request.timers.append(self._host.later(expires_s, self._expire, request))
        if request.heartbeat_s:
            request.timers.append(self._host.later(request.heartbeat_s, self._beat, request))
        self._requests.append(request)
        self.deliver()

    def _expire(self, request: _Request) -> None:
        if request in self._requests:
            self._requests.remove(request)
            request.end()
            self._status(request, "408", "Request Timeout")

    def _beat(self, request: _Request) -> None:
        if request not in self._requests:
            return
        quiet_s = self._host.time() - request.active_at
        if quiet_s >= request.heartbeat_s - 1e-6:
            request.active_at, quiet_s = self._host.time(), 0.0
            self._last_considered = next(iter(self._todo), self._stream.last_seq + 1) - 1
            headers = {
                "Status": "100",
                "Description": "Idle Heartbeat",
                "Nats-Last-Consumer": str(self._num_sent),
                "Nats-Last-Stream": str(self._last_considered),
            }
            self._host.send(request.inbox, headers, b"")
        request.timers[-1] = self._host.later(request.heartbeat_s - quiet_s, self._beat, request)

    def _status(self, request: _Request, status: str, description: str) -> None:
        headers = {"Status": status, "Description": description, "Nats-Pending-Messages": str(request.left)}
        headers["Nats-Pending-Bytes"] = str(request.left_bytes)
        self._host.send(request.inbox, headers, b"")

    def _drop_deserted(self) -> None:
        for request in [each for each in self._requests if not self._host.has_interest(each.inbox)]:
            self._requests.remove(request)
            request.end()

    def end(self, description: str) -> None:
        """End all requests, with a status if there is a description."""
        for request in self._requests:
            request.end()
            if description:
                self._status(request, "409", description)
        self._requests.clear()
        for unacked in self.unacked.values():
            unacked.stop()

    # deliveries

    def deliver(self) -> None:
        """Send messages to the requests that wait."""
        while self._requests and (self._again or self._todo):
            request = self._requests[0]
            if not self._host.has_interest(request.inbox):
                self._requests.popleft().end()
                continue
            seq = next(iter(self._again), 0)
            if not seq:
                if self._acks and len(self.unacked) >= self.config.get("max_ack_pending", 1000):
                    return
                seq = next(iter(self._todo), 0)
                if not seq:
                    return
            message = self._stream.messages[seq]
            if request.max_bytes and message.size > request.left_bytes:
                self._requests.popleft().end()
                self._status(request, "409", "Message Size Exceeds MaxBytes")
                continue
            self._again.pop(seq, None)
            self._todo.pop(seq, None)
            self._send(request, message)

    def _send(self, request: _Request, message: Message) -> None:
        self._num_sent += 1
        number = 1
        if self._acks:
            unacked = self.unacked.setdefault(message.seq, _Unacked(message))
            unacked.num_delivered = number = unacked.num_delivered + 1
            self.arm(unacked)
        place = f"{number}.{message.seq}.{self._num_sent}.{int(message.time_s * NANOSECONDS)}.{len(self._todo)}"
        request.left -= 1
        request.left_bytes -= message.size
        request.active_at = self._host.time()
        if request.left <= 0:
            self._requests.popleft().end()
        reply = f"$JS.ACK.{self._stream.name}.{self.name}.{place}"
        self._host.send(request.inbox, message.headers, message.data, reply, shown=message.subject)

    def arm(self, unacked: _Unacked) -> None:
        """Redeliver a message after the ack wait."""
        unacked.stop()
        wait_s = self.config.get("ack_wait", 30 * NANOSECONDS) / NANOSECONDS
        unacked.timer = self._host.later(wait_s, self._redeliver, unacked.message.seq)

    def _redeliver(self, seq: int) -> None:
        unacked = self.unacked.get(seq)
        if unacked is not None:
            unacked.stop()
            self._again[seq] = None
            self.deliver()

    def acknowledge(self, seq: int, how: bytes) -> None:
        """Take the acknowledgement of a delivery."""
        unacked = self.unacked.get(seq)
        if unacked is None:
            return
        if how.startswith(IN_PROGRESS):
            if seq not in self._again:
                self.arm(unacked)
        elif how.startswith(NAK):
            options: dict[str, Any] = msgspec.json.decode(how[len(NAK) :]) if len(how) > len(NAK) else {}
            delay_s = options.get("delay", 0) / NANOSECONDS
            unacked.stop()
            if delay_s:
                unacked.timer = self._host.later(delay_s, self._redeliver, seq)
            else:
                self._redeliver(seq)
        else:  # done, or given up
            unacked.stop()
            del self.unacked[seq]
            self._again.pop(seq, None)
            if self._stream.config["retention"] == "workqueue":
                self._stream.remove(seq)
            self.deliver()

    def restart(self) -> None:
        """Begin again after the server's end: requests and timers are gone, the state is not."""
        self._requests.clear()
        for unacked in self.unacked.values():
            self.arm(unacked)
