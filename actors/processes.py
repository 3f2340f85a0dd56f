"""Process specs of a run on one node. Pure."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from actors.rollout.sglang.processes import engine_specs
from runtime.bus.addresses import INSTANCE_VARIABLE, START_VARIABLE
from runtime.settings.devices import NVIDIA, ON_CPU
from runtime.settings.owners import rollout_places
from runtime.settings.placement import home_node, trainer_places
from runtime.settings.processes import OURS, ProcessSpec, RestartGroupSpec, SendsHeartbeats, Tier
from runtime.settings.reading.schema import functions_in
from runtime.settings.tables.observe import OPENTELEMETRY, PAGE, PROMETHEUS, python_of
from runtime.settings.topology import Topology, answers_are_recorded, has_filter
from runtime.settings.torch_threads import threads_of

NO_OP_TRAINER = "no-op-trainer"  # process name; it runs when run.only = "rollout"
TRACKER_RESTARTS = 20  # with pauses of up to 10 s; W&B itself tries for 90 s to reach its server
WITH_LOG = "log"  # argument of the exporter that tells what the log says
LIGHT_ACTORS = ("rollout", "reward", "filter", "buffer")


def process_specs(topology: Topology, node: str, run_dir: Path) -> list[ProcessSpec]:
    """Process specs of a node, without its node daemon and the NATS server.

    Light actors, routers and trackers run on the node that has the bus. So do rollout and reward actors and engines
    without GPUs, unless `rollout.nodes`, `reward.nodes` and `engines.<pool>.nodes` name others. Trainer ranks and
    engines with GPUs run where these are; ranks on the CPU on `trainer.nodes`. Each node has a Prometheus exporter.
    """
    specs: list[ProcessSpec] = []
    home = node == home_node(topology)
    recorded = answers_are_recorded(topology)  # an offline rollout needs no engine and no grader
    # light actors on nodes of their own, each with its number
    placed = {} if recorded else {"rollout": topology.rollout.nodes, "reward": topology.reward.nodes}
    if not recorded:
        specs += engine_specs(topology, node)
    if topology.run.only != "rollout":
        specs += _trainer(topology, node, run_dir)
    elif home:
        specs.append(_host(topology, run_dir, NO_OP_TRAINER, ["trainer"], OURS | ON_CPU))
    if home:
        shared = {role for roles in topology.share for role in roles}
        alone = [(role,) for role in LIGHT_ACTORS if role not in shared and not placed.get(role)]
        idle = {role for role, runs in (("reward", not recorded), ("filter", has_filter(topology))) if not runs}
        together = ([role for role in roles if role not in idle] for roles in (*topology.share, *alone))
        specs += [_host(topology, run_dir, "+".join(roles), roles, OURS) for roles in together if roles]
    for role, nodes in placed.items():
        for number, name in enumerate(nodes):
            if name == node:
                env = OURS | {INSTANCE_VARIABLE: str(number)}
                specs.append(_host(topology, run_dir, f"{role}.{number}", [role], env))
    specs += _sessions(topology, node)
    specs += _exporter(topology, home=home)
    return [*specs, *_trackers(topology), *_page(topology), *_spans(topology)] if home else specs


def _host(topology: Topology, run_dir: Path, name: str, roles: Sequence[str], env: Mapping[str, str]) -> ProcessSpec:
    """Spec of a process that hosts actors."""
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-P", "-m", "actors.host", str(run_dir), *roles),
        env=env,
        forked=not env.get(NVIDIA),  # CUDA cannot be used in a process whose parent has used it
        functions={key: name for key, name, function in functions_in(topology) if function.runs_in in roles},
        probe=SendsHeartbeats(),
        unresponsive_after_s=topology.run.unresponsive_after_s,
    )


def _trackers(topology: Topology) -> list[ProcessSpec]:
    """Specs of the processes that log the run's metrics to trackers."""
    known = {"run": topology.run.name, "optimizer_steps": topology.algorithm.num_steps_per_rollout}
    return [
        ProcessSpec(
            name=f"tracker.{name}",
            command=(
                *(python_of(name, tracker.python), "-P", "-m", "actors.trackers", name),
                json.dumps(known | msgspec.structs.asdict(tracker)),
            ),
            env=OURS,
            tier=Tier.OBSERVER,
            critical=False,
            max_restarts=TRACKER_RESTARTS,
            stop_timeout_s=topology.observe.stop_timeout_s,
        )
        for name, tracker in topology.observe.trackers().items()
    ]


def _page(topology: Topology) -> list[ProcessSpec]:
    """Spec of the process that serves the run's page, if there is one."""
    page = topology.observe.page
    return [] if page is None else [_observer(PAGE, "actors.observer", page)]


def _exporter(topology: Topology, *, home: bool) -> list[ProcessSpec]:
    """Spec of the process that answers `/metrics`, if there is one. That of the home node reads the log."""
    address = topology.observe.prometheus
    with_log = (WITH_LOG,) if home else ()
    return [] if address is None else [_observer(PROMETHEUS, "actors.observer.exporter", address, *with_log)]


def _spans(topology: Topology) -> list[ProcessSpec]:
    """Spec of the process that sends spans to a collector, if there is one."""
    otlp = topology.observe.otlp
    if otlp.endpoint is None:
        return []
    spec = _observer(OPENTELEMETRY, "actors.observer.otlp", otlp.endpoint, str(topology.observe.stop_timeout_s))
    command = (python_of(OPENTELEMETRY, otlp.python), *spec.command[1:])
    return [msgspec.structs.replace(spec, command=command, stop_timeout_s=topology.observe.stop_timeout_s)]


def _sessions(topology: Topology, node: str) -> list[ProcessSpec]:
    """Specs of the listener for agents and of the process that holds their programs, on each node with a rollout actor.

    The latter stops after the rollout actors, which stop their programs.
    """
    num_actors = sum(place.node == node for place in rollout_places(topology))
    if not topology.rollout.agent.command or not num_actors:
        return []
    settings = json.dumps({"num_actors": num_actors, "turn_s": topology.rollout.generate_timeout_s})
    still_s = topology.run.unresponsive_after_s
    return [
        ProcessSpec(
            name="sessions",
            command=(sys.executable, "-P", "-m", "actors.sessions", settings),
            env=OURS,
            probe=SendsHeartbeats(),
            unresponsive_after_s=still_s,
        ),
        ProcessSpec(
            name="programs",
            command=(sys.executable, "-P", "-m", "actors.sessions.programs", "{}"),
            env=OURS,
            probe=SendsHeartbeats(),
            unresponsive_after_s=still_s,
            tier=Tier.SERVICE,
        ),
    ]


def _observer(name: str, module: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-P", "-m", module, *arguments),
        env=OURS,
        tier=Tier.OBSERVER,
        critical=False,
        max_restarts=TRACKER_RESTARTS,
    )


def _trainer(topology: Topology, node: str, run_dir: Path) -> list[ProcessSpec]:
    """Specs of the trainer's ranks on one node: those of the actor, then those of a critic on ranks of its own."""
    places = trainer_places(topology)
    world = len(places)
    specs: list[ProcessSpec] = []
    for rank, place in enumerate(places):
        if place.node != node:
            continue
        env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", **OURS}
        on_cpu = ON_CPU | threads_of(topology, node, topology.trainer.torch_threads)
        env |= on_cpu if place.gpu is None else {NVIDIA: str(place.gpu)}
        name = "trainer" if world == 1 else f"trainer.{rank}"
        specs.append(_host(topology, run_dir, name, ["trainer"], env))
    if world == 1:
        return specs
    group = RestartGroupSpec.of("trainer", [place.node for place in places], node)  # ranks cannot compute alone
    return [
        msgspec.structs.replace(spec, env={**spec.env, START_VARIABLE: "{peers}"}, restart_group=group)
        for spec in specs
    ]
