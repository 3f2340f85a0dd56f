"""The plan of one node daemon, and the outcome of its run."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from messages import NodeLeft, RunStopped
from messages.plain import clipped
from runtime.bus.limits import StreamLimits
from runtime.bus.nats.server import ServerSettings
from runtime.node.missing import Need
from runtime.node.network import NodeAddress
from runtime.node.run_files import RunFile
from runtime.node.supervisor.state_changes import GivenUp
from runtime.settings.processes import ProcessSpec
from runtime.util.exit_codes import EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_OK
from runtime.util.formatting import signal_name
from runtime.util.secrets import Login

REASON_CHARS = 1000  # of a reason in an event


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one node daemon."""

    run: str
    node: str
    run_dir: Path
    incarnation: int  # of this daemon, counted in the run directory
    num_steps: int
    step_groups: int = 0  # prompt groups of a train step; 0: unknown
    graded: bool = True  # samples have scores; demonstrations have none
    random_init: bool = False  # the model begins with random weights
    router: str = ""  # what chooses the engines of requests; "": the run sends none
    started: float  # Unix time of the command
    processes: tuple[ProcessSpec, ...]
    server: ServerSettings | None = None  # NATS server settings, if this node runs it
    graders: tuple[str, ...] = ()  # that the topology names; each has a queue, which external clients may serve
    address: NodeAddress | None = None  # of this node; none: loopback, because nothing listens beyond this machine
    nodes: tuple[str, ...] = ()  # of the run
    log_dir: Path | None = None  # none: `logs` in the run directory
    topology_file: str | None = None  # name of this node's file in a directory that another node owns
    bus_url: str | None = None  # otherwise the URL of the bus, without its login
    bus_login: Login | None = None  # login of that bus
    bus_certificate: str | None = None  # its PEM certificate, if another node of the run has it
    home: str = ""  # the node that the streams belong to; "": unknown
    needs: tuple[Need, ...] = ()  # what the run cannot do without; at home
    waits: Mapping[str, float] = {}  # seconds that home waits for each other node
    outage_s: float = 0.0  # without the bus, before the node ends; 0: it runs the bus
    limits: StreamLimits = StreamLimits()
    owns_streams: bool = True  # the streams belong with this node's directory; true for one node of a run
    leases_home: bool = False  # other machines may become home; needs the lease file of the run directory
    takes_over: bool = False  # become home although another daemon holds the lease
    keeps_metrics: bool = True  # true on the node that owns the streams
    shares_weights: bool = False  # nodes fetch weights from each other, because they share no directory
    copies_checkpoints: bool = False  # nodes keep copies of checkpoint files of others
    given: tuple[RunFile, ...] = ()  # at home: what nodes that lack it may fetch
    stall_after_s: float | None = None  # without any event, before run.stalled; none: another node reports it
    bus_unresponsive_after_s: float = 15.0
    stream_bytes: int = 0  # maximum size of the streams in the run directory
    min_free_bytes: int = 0  # of the run directory's disk; below it the run stops in order


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a node daemon's run."""

    finished: bool
    stopped_by: int | None = None  # signal
    failure: GivenUp | None = None
    refused: str | None = None  # why the run cannot start: wrong input
    error: str | None = None  # of the bus or the daemon, if no process failed
    stopped: RunStopped | None = None  # another node, or an earlier event of this one, stopped the run
    is_announced: bool = False  # other nodes know the end, or it does not concern them


def announcement(outcome: RunEnd, node: str, *, is_home: bool) -> RunStopped | NodeLeft | None:
    """Return the event that tells the other nodes of this end; None if they need no event.

    The run ends with its home, and with a process that any node gives up. Otherwise a node leaves it.
    """
    if outcome.finished or outcome.is_announced:
        return None
    if outcome.stopped_by is not None:
        reason = signal_name(outcome.stopped_by)
    elif outcome.refused is not None:
        reason = clipped(outcome.refused, REASON_CHARS)
    elif outcome.failure is not None:
        reason = f"{outcome.failure.spec.name}: {clipped(outcome.failure.reason, REASON_CHARS)}"
    else:
        reason = clipped(outcome.error or "ended without a reason", REASON_CHARS)
    gave_up = outcome.failure is not None and outcome.stopped_by is None
    if is_home or gave_up:
        return RunStopped(node=node, reason=reason, exit_code=exit_code_of(outcome))
    return NodeLeft(node=node, reason=reason)


def exit_code_of(outcome: RunEnd) -> int:
    """Return the exit code: 0 finished, 1 failed, 2 wrong input, 128 + signal when stopped."""
    if outcome.finished:
        return EXIT_OK
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.stopped is not None:
        return outcome.stopped.exit_code
    if outcome.refused is not None:
        return EXIT_INPUT_ERROR
    if outcome.failure is not None and outcome.failure.exit_code == EXIT_INPUT_ERROR:
        return EXIT_INPUT_ERROR
    return EXIT_FAILED
