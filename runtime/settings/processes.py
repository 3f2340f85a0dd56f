"""Process specifications for the node daemon. actors/processes.py lists the processes of a run."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final, Self

import msgspec

from runtime.util.import_path import ROOT

OURS: Final = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),  # for -P
    "OMP_NUM_THREADS": "1",  # of all but engines and trainer ranks: see torch_threads.py
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # torch's threads wait without taking a core: on a busy machine, 10 times faster
}


class Tier(IntEnum):
    """Stop order of processes: a tier stops after all later tiers, which depend on it."""

    OBSERVER = -1  # trackers: nothing depends on them, and the run goes on without them
    BUS = 0
    SERVICE = 1  # engines, router
    ACTOR = 2


class PortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The port of a server process, at its node's address.

    `with_address` puts both into the command and the environment. The port stays the same across restarts unless
    another program takes it meanwhile.
    """

    fixed: int | None = None  # if it is in use, the start fails
    key: str | None = None  # setting of the fixed port, for the error
    preferred: int | None = None  # used if it is free
    kept: bool = False  # never changed after the first start: clients cannot learn of another port


class WhenStarted(msgspec.Struct, frozen=True):
    """Ready as soon as the process runs."""


class WhenListening(msgspec.Struct, frozen=True):
    """Ready when the port accepts connections."""


class NotReady(Exception):
    """Raised when a process cannot become ready; the message is the reason."""


class WhenConfirmed(msgspec.Struct, frozen=True):
    """Ready when a check of the process, called with its id, returns.

    The check is cancelled when the process ends. It raises NotReady if the process cannot become ready.
    """

    check: Callable[[int], Awaitable[None]]


Readiness = WhenStarted | WhenListening | WhenConfirmed


class AnswersHttp(msgspec.Struct, frozen=True):
    """Liveness probe: the server answers a GET of this path, with any status."""

    path: str


class Greets(msgspec.Struct, frozen=True):
    """Liveness probe: the server sends data first, as NATS does."""


class SendsHeartbeats(msgspec.Struct, frozen=True):
    """Heartbeat: the process sends one while its event loop runs (runtime/process/heartbeat.py)."""


Question = AnswersHttp | Greets
Probe = Question | SendsHeartbeats


class RestartGroupSpec(msgspec.Struct, frozen=True):
    """Restart group: the processes of one server or trainer, which start and restart together.

    An address for their rendezvous, on the first node, replaces "{peers}" in their commands and environments.
    """

    name: str
    num_processes: int  # on this node
    nodes: tuple[str, ...] = ()  # of all processes, that of the first process first; empty: only this node

    @classmethod
    def of(cls, name: str, nodes_of_processes: Sequence[str], node: str) -> Self:
        """Return the restart group of processes on these nodes, as one of the nodes has it."""
        nodes = tuple(dict.fromkeys(nodes_of_processes))
        return cls(name, sum(each == node for each in nodes_of_processes), nodes if len(nodes) > 1 else ())


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start, probe, restart and stop one process.

    In the command and environment the node daemon puts in the address to listen on (`with_address`). It
    replaces "{others}" by the addresses of ready peer engines on this node, as HOST:PORT,..., or by "" if the last
    start failed.
    """

    name: str  # also of its log
    command: tuple[str, ...]
    env: Mapping[str, str] = {}  # added to the node daemon's
    functions: Mapping[str, str] = {}  # users' functions that run in it, by setting
    restart_group: RestartGroupSpec | None = None
    port: PortRequest | None = None
    ready: Readiness = WhenStarted()
    ready_timeout_s: float = 300.0  # from its start; a slower process is killed and counts as failed
    probe: Probe | None = None  # checked repeatedly once the process is ready
    unresponsive_after_s: float = 60.0  # without an answer or a heartbeat; then it is killed and counts as failed
    silent_after_s: float = 20.0  # the same; then it is named
    forked: bool = False  # by the node's template process, which has imported what it needs; without GPUs
    crash_words: tuple[str, ...] = ()  # in its output: the process ended itself, whatever the signal
    address_key: str | None = None  # KV key that receives its URL each time it is ready
    tier: Tier = Tier.ACTOR
    critical: bool = True  # the run fails when the process is given up; otherwise if too few of its kind are left
    max_restarts: int = 10  # without progress of the run between them; of an observer, from the start of the run on
    stop_timeout_s: float = 4.0  # from SIGTERM to SIGKILL


PROBE_EVERY_S: Final = 5.0
PROBES_PER_LIMIT: Final = 4  # at least, before a server counts as unresponsive


def probe_interval_s(limit_s: float) -> float:
    """Seconds between two liveness probes of a server that may be silent for `limit_s`."""
    return min(PROBE_EVERY_S, limit_s / PROBES_PER_LIMIT)


def probe_patience_s(limit_s: float, silent_s: float) -> float:
    """Seconds that a probe waits for its answer: half of the limit, or its rest if that is less."""
    every_s = probe_interval_s(limit_s)
    return min(limit_s / 2, max(every_s, limit_s - silent_s - every_s))


def longest_silence_s(limit_s: float) -> float:
    """Seconds from a server's last answer until it is killed, at most."""
    silent_s = 0.0
    while silent_s < limit_s:
        silent_s += probe_interval_s(limit_s) + probe_patience_s(limit_s, silent_s)
    return silent_s


def with_address(text: str, host: str, port: int) -> str:
    """Replace "{host}", "{port}", and "{url_host}": the host as URLs have it, an IPv6 address in brackets."""
    in_url = f"[{host}]" if ":" in host else host
    return text.replace("{port}", str(port)).replace("{host}", host).replace("{url_host}", in_url)
