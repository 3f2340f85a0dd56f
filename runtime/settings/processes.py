"""A process of a run, as its agent needs to know it. Which processes a run has is said in actors/processes.py."""

from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum

import msgspec


class Tier(IntEnum):
    """Who depends on whom: a tier is stopped after all later ones."""

    BUS = 0
    SERVICE = 1  # engines, router
    ACTOR = 2


class PortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The port that a process serves; "{port}" and "{host}" in its command and environment stand for it.

    It stays the same over restarts unless another program takes it meanwhile.
    """

    host: str = "127.0.0.1"
    fixed: int | None = None  # in use: an error instead of another port
    preferred: int | None = None  # taken if it is free
    kept: bool = False  # once started, never another: clients have no way to learn of it


class WhenStarted(msgspec.Struct, frozen=True):
    """Ready as soon as it runs."""


class WhenListening(msgspec.Struct, frozen=True):
    """Ready when its port takes connections."""


class NotReady(Exception):
    """A process will not become ready; says why."""


class WhenConfirmed(msgspec.Struct, frozen=True):
    """Ready when a check of the process with this id returns; it is cancelled when the process ends.

    It raises NotReady when there is nothing to wait for any more.
    """

    check: Callable[[int], Awaitable[None]]


Readiness = WhenStarted | WhenListening | WhenConfirmed


class AnswersHttp(msgspec.Struct, frozen=True):
    """A server that answers a GET of a path; whatever it answers, it lives."""

    path: str


class Greets(msgspec.Struct, frozen=True):
    """A server that speaks first, as NATS does."""


class GivesPulse(msgspec.Struct, frozen=True):
    """A process of ours that gives signs by itself while its event loop runs (runtime/host/pulse.py)."""


Question = AnswersHttp | Greets
Probe = Question | GivesPulse


class PartOf(msgspec.Struct, frozen=True):
    """What several processes are parts of, a server or a trainer: they are started, and started again, together.

    "{peers}" in their commands and environments is where they may meet.
    """

    name: str
    num_processes: int


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one process is started, known to be ready, restarted and stopped.

    In its command and environment the agent fills in "{host}" and "{port}", where it is to listen, and "{others}", the
    addresses of its pool's other servers that are ready on this node, unless its last start had failed: HOST:PORT,...
    """

    name: str  # of the process and of its log
    command: tuple[str, ...]
    env: Mapping[str, str] = {}  # added to the agent's
    part_of: PartOf | None = None
    port: PortRequest | None = None
    ready: Readiness = WhenStarted()
    ready_timeout_s: float = 300.0  # from its start; then it is killed and counts as failed
    probe: Probe | None = None  # looked at again and again once it is ready
    unresponsive_after_s: float = 60.0  # without an answer or a sign; then it is killed and counts as failed
    crash_words: tuple[str, ...] = ()  # in its output: it ended itself, whatever signal it took for that
    address_key: str | None = None  # the KV key that gets its URL each time it is ready
    tier: Tier = Tier.ACTOR
    critical: bool = True  # whether the run fails when it is given up
    max_restarts: int = 10  # without progress of the run in between
    stop_timeout_s: float = 4.0  # from SIGTERM to SIGKILL
