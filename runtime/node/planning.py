"""Plans what this node runs: from the topology and the start options to the plan of its daemon."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from runtime.bus.nats.accounts import NODE_USER
from runtime.bus.nats.certificate import own_certificate
from runtime.bus.nats.server import SYNC_INTERVAL, ServerSettings
from runtime.node.claims.claim import Claim
from runtime.node.claims.rundir import NODE_TOPOLOGY_FILE, RunRefused, raise_incarnation
from runtime.node.join import Join
from runtime.node.missing import Need, needs_of_run, waits_of
from runtime.node.network import NodeAddress
from runtime.node.node_plan import NodePlan
from runtime.node.run_files import given_by_home
from runtime.settings.derived import trains_demonstrations
from runtime.settings.placement import LOOPBACK, bus_node, bus_port, home_node, outage_s
from runtime.settings.plan import stream_limits
from runtime.settings.processes import ProcessSpec
from runtime.settings.reading.config import Problem
from runtime.settings.sizes import min_free_bytes, stream_sizes
from runtime.settings.topology import (
    POLICY,
    Topology,
    answers_are_recorded,
    chooser_of,
    fetches_weights,
    grader_names,
)
from runtime.util.proc import BEGUN, stat_of
from runtime.util.secrets import Login, kept_secret, read_login

BUS_DIRECTORY = "bus"  # in the run directory
BUS_PASSWORD_FILE = Path(BUS_DIRECTORY, "password")  # in the run directory, readable by its owner only
LOGS = "logs"  # in the run directory; of several nodes each has a directory of its own in it
STORE_BOUND = 1 << 50  # above the streams' own limits, which may have been larger at an earlier start

SpecsOf = Callable[[Topology, str, Path], Sequence[ProcessSpec]]


class StartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Start options from the command line."""

    node: str
    command: str  # command that resumes the run, for messages
    bus_login: Login | None = None  # taken from bus.url
    join: Path | None = None  # join file of the run; none: the one in the run directory
    take_over: bool = False  # become home although another machine holds the lease on it
    fresh: str | None = None  # start over: name of the run to discard, "" for none
    problems: tuple[Problem, ...] = ()  # of this node's own checks, which it reports to home, and home to all


def plan_of(
    topology: Topology,
    options: StartOptions,
    claim: Claim,
    specs_of: SpecsOf,
    address: NodeAddress | None,
    join: Join | None = None,
) -> NodePlan:
    """Return the plan of a node, at its next incarnation.

    Args:
        topology: topology of the run.
        options: of the command.
        claim: of the run directory.
        specs_of: returns the processes of a topology on a node.
        address: of this node; none: loopback.
        join: how the node reaches the bus of another node; none: it runs the bus, or the topology names one.

    Raises:
        RunRefused: the login of the bus cannot be read.
        OSError: the run directory cannot be written.
    """
    is_home, sizes = options.node == home_node(topology), stream_sizes(topology)
    logs, pool = claim.run_dir / LOGS, topology.engines.get(POLICY)
    return NodePlan(
        run=topology.run.name,
        node=options.node,
        run_dir=claim.run_dir,
        incarnation=raise_incarnation(claim.run_dir, claim.node),
        num_steps=topology.train.num_steps,
        step_groups=topology.rollout.rollout_batch_size,
        graded=not trains_demonstrations(topology),
        random_init=topology.model.random_init,
        router="" if pool is None or answers_are_recorded(topology) else chooser_of(pool),
        started=_command_started(),
        processes=tuple(specs_of(topology, options.node, claim.run_dir)),
        server=_server(topology, claim.run_dir, address) if bus_node(topology) == options.node else None,
        graders=grader_names(topology),
        address=address,
        nodes=tuple(topology.nodes),
        log_dir=logs if claim.node is None else logs / claim.node,
        topology_file=None if is_home else NODE_TOPOLOGY_FILE.format(options.node),
        bus_url=topology.bus.url if join is None else join.url,
        bus_login=bus_login(topology, options) if join is None else join.login,
        bus_certificate=None if join is None else join.certificate,
        home=home_node(topology),
        needs=_needs(topology, specs_of, claim.run_dir) if is_home else (),
        waits=waits_of(topology),
        outage_s=outage_s(topology, options.node),
        limits=stream_limits(topology),
        owns_streams=is_home,
        leases_home=is_home and len(topology.nodes) > 1 and bus_node(topology) == options.node,
        takes_over=options.take_over,
        keeps_metrics=is_home,
        shares_weights=fetches_weights(topology) and len(topology.nodes) > 1,
        copies_checkpoints=topology.train.checkpoint_copies > 1,
        given=given_by_home(topology) if is_home else (),
        stall_after_s=topology.run.stall_after_s if is_home else None,
        stream_bytes=sizes.event_bytes + sizes.work_bytes + sizes.data_bytes if is_home else 0,
        min_free_bytes=min_free_bytes(topology),
        bus_unresponsive_after_s=topology.bus.unresponsive_after_s,
    )


def _needs(topology: Topology, specs_of: SpecsOf, run_dir: Path) -> tuple[Need, ...]:
    return needs_of_run(topology, {node: specs_of(topology, node, run_dir) for node in topology.nodes})


def _server(topology: Topology, run_dir: Path, address: NodeAddress | None) -> ServerSettings:
    return ServerSettings(
        store_dir=run_dir / "nats",
        host=LOOPBACK if address is None else address.ip,
        port=bus_port(topology) or -1,
        certificate=None if address is None else own_certificate(run_dir / BUS_DIRECTORY),
        max_payload=stream_sizes(topology).max_payload_bytes,
        max_file_store=STORE_BOUND,
        sync_interval="always" if topology.bus.sync == "always" else SYNC_INTERVAL,
        login=Login(user=NODE_USER, password=kept_secret(run_dir / BUS_PASSWORD_FILE)),
    )


def bus_login(topology: Topology, options: StartOptions) -> Login | None:
    """Return the login for an external bus."""
    if topology.bus.credentials is None:
        return options.bus_login
    try:
        return read_login(Path(topology.bus.credentials))
    except (OSError, ValueError) as error:
        raise RunRefused(f"bus.credentials: {error}") from error


def _command_started() -> float:
    """Return the Unix time at which this process started, including any program that exec replaced."""
    ticks = int(stat_of("self")[BEGUN])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
