"""One judge: bounded requests to its servers, repeated by the cause of their failure."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import aiohttp
import anyio
import structlog

from actors.reward.judging.budget import Budget
from actors.reward.judging.requests import PATH, JudgeAnswer, JudgeError, answer_in, error_of
from actors.reward.judging.servers import JudgeServer, JudgeServers, shows_life
from runtime.util.formatting import count_of
from runtime.util.retrying import Backoff
from runtime.util.secrets import HIDDEN

log = structlog.get_logger()

RESEND: Final = Backoff(first_s=0.2, max_s=5.0)
LONGEST_WAIT_S: Final = 60.0  # that a server may ask for between two requests
ANSWERLESS_S: Final = 120.0  # limits hold for a second or a minute; after a longer time the quota is spent
MAX_ANSWER_BYTES: Final = 8 << 20
CHUNK_BYTES: Final = 1 << 16

Report = Callable[[str, str, int], None]  # name of a server, reason, failures so far


class JudgeLimits(NamedTuple):
    """Limits of the requests to a judge; see its settings."""

    timeout_s: float
    max_tries: int
    at_once: int
    wait_s: float = 600.0


class Judge:
    """Sends requests to a judge's servers.

    A request that an engine of a pool lost because it ended is sent again, to another engine or to the restarted one,
    for `wait_s` at most. Timeouts, busy servers and unreadable answers count as tries.

    A server that limits the rate gets no request until the time that it says. Fewer requests are then in flight, and
    one more after as many answers. Its refusals do not count as tries. A request fails by them once the server has
    answered nothing for ANSWERLESS_S, or `wait_s` after its first refusal.
    """

    def __init__(
        self,
        name: str,
        servers: JudgeServers,
        limits: JudgeLimits,
        session: aiohttp.ClientSession,
        report: Report = lambda _name, _reason, _number: None,
        budget: Budget | None = None,
    ) -> None:
        self.name = name
        self._servers = servers
        self._limits = limits
        self._session = session
        self._report = report
        self._budget = budget
        self._slots = anyio.CapacityLimiter(limits.at_once)
        self._num_at_once = float(limits.at_once)  # of `_slots`; less while a server limits the rate
        self._held: dict[str, float] = {}  # servers that want no request until this time
        self._refused_since = math.inf  # when a server first limited the rate since the last answer
        self._limited_at = -math.inf  # when a server last limited the rate
        self._num_waiting = 0  # requests without an answer
        self._failures: Counter[tuple[str, str]] = Counter()  # by server and cause
        self.counts: Counter[str] = Counter()

    def waits_for(self) -> str:
        """Describe for people whose answers are awaited; empty if none are."""
        if not self._num_waiting:
            return ""
        return f"{self._servers.label}: {count_of(self._num_waiting, 'answer')} of the judge {self.name}"

    def was_rate_limited(self, within_s: float) -> bool:
        """Return whether servers limited the rate in the last seconds, or have answered nothing since they did."""
        return self._refused_since < math.inf or anyio.current_time() - self._limited_at <= within_s

    async def ask(self, request: Mapping[str, Any]) -> JudgeAnswer:
        """Send a request and return its answer.

        Args:
            request: body of a chat completion, without the model's name.

        Raises:
            JudgeError: the judge refused it, `max_tries` requests failed, no engine came within `wait_s`, the rate was
                limited for too long, or the budget is spent. It names the judge and the cause.
        """
        self._num_waiting += 1
        failures = _Failures()
        try:
            while True:
                async with self._slots:
                    answer = await self._answered(request, failures)
                if answer is not None:
                    self._refused_since = math.inf
                    self._set_at_once(self._num_at_once + 1 / self._num_at_once)
                    return answer
                await anyio.sleep_until(failures.next_at)
        finally:
            self._num_waiting -= 1

    async def _answered(self, request: Mapping[str, Any], failures: "_Failures") -> JudgeAnswer | None:
        """Send a request until it is answered; return None if the server limits the rate."""
        failed: JudgeServer | None = None
        waiting_since = anyio.current_time()
        while True:
            failed = server = await self._next_server(failed, waiting_since)
            # Another refusal may move the time meanwhile
            while (held := self._held.get(server.name, -math.inf)) > anyio.current_time():  # noqa: ASYNC110
                await anyio.sleep_until(held)
            try:
                return await self._send(server, request)
            except JudgeError as error:
                self._note(server, error)
                is_limited = error.cause == "rate_limited"
                if is_limited or (error.cause == "unreachable" and self._servers.is_pool):
                    failures.num_uncounted += 1
                else:
                    failures.tries += 1
                    waiting_since = anyio.current_time()
                tries = failures.tries
                is_last = tries >= self._limits.max_tries or (is_limited and not self._may_answer_later(failures))
                if error.cause == "refused" or is_last:
                    times = f", {tries} times" if tries > 1 else ""
                    named = f"{error}{times} (judge {self.name}, {server.name})"
                    raise _renamed(error, named) from error
                if error.cause == "timeout":
                    await self._doubt(server, str(error))
                pause_s = max(RESEND.pause_s(tries + failures.num_uncounted), min(error.wait_s, LONGEST_WAIT_S))
                if is_limited:
                    failures.next_at = anyio.current_time() + pause_s
                    self._slow_down(server, failures.next_at)
                    return None
            await anyio.sleep(pause_s)

    def _may_answer_later(self, failures: "_Failures") -> bool:
        """Return whether a server that limits the rate has answered others lately, and the request may wait."""
        now = anyio.current_time()
        self._refused_since = min(self._refused_since, now)
        failures.refused_until = min(failures.refused_until, now + self._limits.wait_s)
        return now < min(self._refused_since + ANSWERLESS_S, failures.refused_until)

    def _slow_down(self, server: JudgeServer, until: float) -> None:
        """Halve the requests in flight, once for all that were refused in the same time."""
        held = self._held.get(server.name, -math.inf)
        self._held[server.name] = max(held, until)
        if held <= anyio.current_time():
            self._set_at_once(self._num_at_once / 2)

    def _set_at_once(self, number: float) -> None:
        self._num_at_once = min(max(1.0, number), float(self._limits.at_once))
        self._slots.total_tokens = int(self._num_at_once)

    async def _next_server(self, failed: JudgeServer | None, waiting_since: float) -> JudgeServer:
        left_s = waiting_since + self._limits.wait_s - anyio.current_time()
        with anyio.move_on_after(left_s):
            if left_s > 0:
                return await self._servers.next(failed)
        reason = f"no engine of {self._servers.label} answered within {self._limits.wait_s:g} s (wait_s)"
        raise JudgeError("unreachable", f"{reason} (judge {self.name})")

    async def _send(self, server: JudgeServer, request: Mapping[str, Any]) -> JudgeAnswer:
        if self._budget is not None:
            await self._budget.begin()
        self.counts["requests"] += 1
        timeout = aiohttp.ClientTimeout(total=self._limits.timeout_s)
        try:
            async with self._session.post(
                f"{server.url}{PATH}",
                json={**request, "model": server.model},
                headers=server.headers(),
                timeout=timeout,
                allow_redirects=False,  # another host must not get the key
            ) as response:
                body = await _bounded(response)
                if response.status == 200:
                    answer = answer_in(body)
                    if self._budget is not None:
                        self._budget.end(answer)
                    return answer
                if self._budget is not None:
                    self._budget.give_back()
                raise error_of(response.status, _masked(body, server), response.headers.get("Retry-After"))
        except TimeoutError as error:
            raise JudgeError("timeout", f"no answer within {self._limits.timeout_s:g} s (timeout_s)") from error
        except aiohttp.ClientError as error:
            said = str(error) or type(error).__name__  # its repr has the headers, and so the key
            raise JudgeError("unreachable", _masked(said.encode(), server).decode()) from None

    def _note(self, server: JudgeServer, error: JudgeError) -> None:
        self.counts[f"{error.cause}_requests"] += 1
        if error.cause == "rate_limited":
            self._limited_at = anyio.current_time()
        self._failures[server.name, error.cause] += 1
        number = self._failures[server.name, error.cause]
        log.warning("judge_request_failed", judge=self.name, server=server.name, number=number, error=str(error))
        if number.bit_count() == 1:  # 1, 2, 4, 8, ...
            self._report(f"{server.name} (judge {self.name})", str(error), number)

    async def _doubt(self, server: JudgeServer, reason: str) -> None:
        """Have an engine restarted that did not answer in time and shows no sign of life."""
        if server.kill is not None and not await shows_life(self._session, server):
            await server.kill(reason)


@dataclass(eq=False)
class _Failures:
    """The failed requests for one answer."""

    tries: int = 0
    num_uncounted: int = 0
    next_at: float = 0.0  # when the next request is sent
    refused_until: float = math.inf  # end of the wait for a server that limits the rate


def _renamed(error: JudgeError, text: str) -> JudgeError:
    renamed = JudgeError(error.cause, "", status=error.status)
    renamed.args = (text,)
    return renamed


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Read a response of at most MAX_ANSWER_BYTES.

    Raises:
        JudgeError: it is larger.
    """
    read = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        read += chunk
        if len(read) > MAX_ANSWER_BYTES:
            raise JudgeError("bad_answer", f"the response has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(read)


def _masked(body: bytes, server: JudgeServer) -> bytes:
    """Hide the API key in a response that repeats it."""
    return body if server.key is None else body.replace(server.key.reveal().encode(), HIDDEN.encode())
