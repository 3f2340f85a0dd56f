"""Which requests are for one turn: clients repeat requests, and say so in no way that can be relied on.

A request is the same as another one of its session if it was read to the same turn; fields that change no token, such
as `metadata` and `cache_control`, are read away before. It joins a turn in flight, and gets the answer of one that
nothing was asked after. Else it is a sibling: another answer to the same conversation.
"""

import hashlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import time
from typing import Final, Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from actors.sessions.dialects.reading import Asked, ParameterRefused, Problem, Turn
from runtime.sessions.link import Unavailable
from runtime.sessions.turns import TurnAnswer, TurnRefused, TurnRequest

MAX_RUNNING: Final = 64  # turns of a session that are sampled at once
MAX_ANSWERED: Final = 16  # of a session that are kept to be repeated
ID_CHARS: Final = 24
DIGEST_BYTES: Final = 16

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


class Prefixes:
    """Digests of a conversation after each of its messages, or of a prompt after some tokens.

    Args:
        request: whose messages are read once.
    """

    def __init__(self, request: TurnRequest) -> None:
        hashed, self._digests = hashlib.sha256(), [b""]
        for message in request.messages:
            hashed.update(_ENCODER.encode(message))
            self._digests.append(hashed.digest()[:DIGEST_BYTES])
        self._ids = array("i", request.prompt_ids or ())
        self.num_messages, self.num_ids = len(request.messages), len(self._ids)

    def after(self, num_messages: int, num_ids: int) -> bytes:
        """Return the digest of a beginning, which has at most as many messages and tokens as there are."""
        ids = hashlib.sha256(self._ids[:num_ids].tobytes()).digest()[:DIGEST_BYTES] if num_ids else b""
        return self._digests[num_messages] + ids


class Prepared:
    """A request with what it is compared by.

    Args:
        asked: the request.

    Raises:
        ParameterRefused: a schema of a tool has a number of more than 64 bits.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked, self.prefixes = asked, Prefixes(asked.request)
        self.begin = self.prefixes.after(self.prefixes.num_messages, self.prefixes.num_ids)
        rest = (asked.request.tools, asked.request.sampling, asked.request.model, asked.num_samples)
        try:
            encoded = _ENCODER.encode(rest)
        except (OverflowError, RecursionError) as error:  # of a schema, which is any JSON
            raise ParameterRefused("tools", f"a schema cannot be sent on: {error}") from None
        self.digest = hashlib.sha256(self.begin + encoded).digest()[:DIGEST_BYTES]


class Running:
    """A turn that one or more requests wait for, or whose answer is kept.

    Args:
        prepared: the first request.
        turn: its id and time; `turn.answers` follow.
    """

    def __init__(self, prepared: Prepared, turn: Turn) -> None:
        self.digest, self._begin = prepared.digest, prepared.begin
        self._num_messages, self._num_ids = prepared.prefixes.num_messages, prepared.prefixes.num_ids
        self.turn = turn
        self.problem: Problem | None = None
        self.decided, self.done = anyio.Event(), anyio.Event()
        self.is_delivered = False
        self._accepted = set[int]()
        self._num_samples = prepared.asked.num_samples

    def accept(self, sample: int) -> None:
        """A sample is served: nothing of its request can be refused any more."""
        self._accepted.add(sample)
        if len(self._accepted) == self._num_samples:
            self.decided.set()

    def end(self, answers: Sequence[TurnAnswer], problem: Problem | None) -> None:
        """All samples are there, or one of them will not be."""
        self.turn, self.problem = self.turn._replace(answers=tuple(answers)), problem
        self.decided.set()
        self.done.set()

    def is_before(self, prefixes: Prefixes) -> bool:
        """Whether a longer request begins as this one."""
        num_messages, num_ids = self._num_messages, self._num_ids
        if (prefixes.num_messages, prefixes.num_ids) == (num_messages, num_ids):
            return False
        if prefixes.num_messages < num_messages or prefixes.num_ids < num_ids:
            return False
        return prefixes.after(num_messages, num_ids) == self._begin


class Ask(Protocol):
    """Has a turn sampled: `ListenerEnd.turn`."""

    def __call__(
        self, number: str, session: str, request: TurnRequest, accepted: Callable[[], None]
    ) -> Awaitable[TurnAnswer]:
        """Return the answer."""
        ...


class _Session:
    """The turns of one session."""

    def __init__(self) -> None:
        self.turns: dict[bytes, Running] = {}  # by digest, the oldest first
        self.siblings: dict[bytes, int] = {}  # by digest: turns that are not kept any more

    def drop(self, running: Running) -> None:
        if self.turns.get(running.digest) is running:
            del self.turns[running.digest]
            self.siblings[running.digest] = self.siblings.get(running.digest, 0) + 1


class Joining:
    """The turns of all sessions.

    Args:
        ask: has one sampled.
        tasks: in which turns are awaited; they outlive the connections of their clients.
        repeat_s: time for which an answer that was delivered is repeated, in seconds.
    """

    def __init__(self, ask: Ask, tasks: TaskGroup, repeat_s: float) -> None:
        self._ask, self._tasks, self._repeat_s = ask, tasks, repeat_s
        self._sessions: dict[str, _Session] = {}

    def forget(self, session: str) -> None:
        """Drop what is kept of a session that has ended."""
        self._sessions.pop(session, None)

    def join(self, session: str, prepared: Prepared) -> Running:
        """Return the turn that a request is for; begin it if there is none.

        Raises:
            TurnRefused: too many turns of the session are sampled at once.
        """
        known = self._sessions.setdefault(session, _Session())
        for other in list(known.turns.values()):
            if other.done.is_set() and (other.is_before(prepared.prefixes) or self._is_old(other)):
                known.drop(other)
        running = known.turns.get(prepared.digest)
        if running is not None:
            return running
        if sum(not one.done.is_set() for one in known.turns.values()) >= MAX_RUNNING:
            raise TurnRefused("parameter", f"{MAX_RUNNING} turns of this session are sampled at once: wait for one")
        return self._begin(known, session, prepared)

    def _is_old(self, running: Running) -> bool:
        return running.is_delivered and time() - running.turn.created > self._repeat_s

    def _begin(self, known: _Session, session: str, prepared: Prepared) -> Running:
        sibling = known.siblings.get(prepared.digest, 0)
        named = f"{session} {prepared.digest.hex()} {sibling}".encode()
        turn = Turn(hashlib.sha256(named).hexdigest()[:ID_CHARS], int(time()))
        running = known.turns[prepared.digest] = Running(prepared, turn)
        answered = [one for one in known.turns.values() if one.done.is_set()]
        for oldest in answered[: max(0, len(answered) - MAX_ANSWERED)]:
            known.drop(oldest)
        self._tasks.start_soon(self._sample, running, known, session, prepared.asked)
        return running

    async def _sample(self, running: Running, known: _Session, session: str, asked: Asked) -> None:
        answers, problems = dict[int, TurnAnswer](), list[Problem]()
        async with anyio.create_task_group() as samples:

            async def one(index: int) -> None:
                number = f"{running.turn.id}{index:02d}" if index else running.turn.id
                request = msgspec.structs.replace(
                    asked.request, choice=index
                )  # the actor joins requests that are equal
                try:
                    answers[index] = await self._ask(number, session, request, partial(running.accept, index))
                except TurnRefused as refused:
                    problems.append(Problem.of(refused))
                    samples.cancel_scope.cancel()
                except Unavailable as error:
                    problems.append(Problem(503, str(error), retry=True))
                    samples.cancel_scope.cancel()

            for index in range(asked.num_samples):
                samples.start_soon(one, index)
        running.end([answers[index] for index in sorted(answers)], problems[0] if problems else None)
        if problems and known.turns.get(running.digest) is running:
            del known.turns[running.digest]  # the next request asks again, under the same id
