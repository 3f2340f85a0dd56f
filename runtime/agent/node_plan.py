"""What one agent has to run, and how it ended."""

from pathlib import Path

import msgspec

from runtime.agent.supervision.changes import GivenUp
from runtime.bus.limits import StreamLimits
from runtime.bus.nats.server import ServerSettings
from runtime.exit_codes import EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_OK
from runtime.secrets import Login
from runtime.settings.processes import ProcessSpec


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent has to run."""

    run: str
    node: str
    run_dir: Path
    incarnation: int  # of this agent, counted in the run directory
    num_steps: int
    step_groups: int = 0  # prompt groups of a train step; 0: unknown
    graded: bool = True  # samples have scores; those of demonstrations have none
    started: float  # Unix time at which the command was given
    processes: tuple[ProcessSpec, ...]
    server: ServerSettings | None = None  # of the bus, if this node runs it
    bus_url: str | None = None  # of the bus otherwise, without its login
    bus_login: Login | None = None  # what that bus asks for
    limits: StreamLimits = StreamLimits()
    owns_streams: bool = True  # they go with this node's directory; one node of a run does
    keeps_metrics: bool = True  # one node of a run does
    stall_after_s: float | None = None  # without any event, before it is said who waits; one node of a run says so
    bus_unresponsive_after_s: float = 60.0
    stream_bytes: int = 0  # that the streams in the run directory may grow to
    min_free_bytes: int = 0  # on the run directory's disk; with less the run ends in order


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended."""

    finished: bool
    stopped_by: int | None = None  # signal
    failure: GivenUp | None = None
    refused: str | None = None  # why nothing was started
    error: str | None = None  # when no process failed but the bus did


def exit_code_of(outcome: RunEnd) -> int:
    """0 finished, 1 failed, 2 wrong input, 128 + signal when stopped."""
    if outcome.finished:
        return EXIT_OK
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.refused is not None:
        return EXIT_INPUT_ERROR
    if outcome.failure is not None and outcome.failure.exit_code == EXIT_INPUT_ERROR:
        return EXIT_INPUT_ERROR
    return EXIT_FAILED
