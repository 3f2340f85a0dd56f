"""Process specs of a run on one node. Pure."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from actors.rollout.sglang.command_lines import (
    RANK_PATH,
    READY_PATH,
    READY_TIMEOUT_S,
    ROUTER_PATH,
    SERVER_ENVIRONMENT,
    common_arguments,
    peers_environment,
    rank_arguments,
    router_command,
    server_command,
    with_arguments,
)
from actors.rollout.sglang.facts import CRASH_WORDS
from runtime.bus.addresses import INSTANCE_VARIABLE, START_VARIABLE, address_key
from runtime.settings.devices import HIDDEN, NVIDIA
from runtime.settings.placement import ProcessPlace, engine_places, home_node, trainer_places
from runtime.settings.processes import (
    AnswersHttp,
    PortRequest,
    ProcessSpec,
    RestartGroupSpec,
    SendsHeartbeats,
    Tier,
    WhenListening,
)
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.tables.observe import OPENTELEMETRY, PAGE, PROMETHEUS, python_of
from runtime.settings.topology import POLICY, Topology, answers_are_recorded, has_filter, model_of
from runtime.util.import_path import ROOT

OURS: Final = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),  # for -P
    "OMP_NUM_THREADS": "1",  # two threads were 10 to 200 times slower on shared cores
    "MKL_NUM_THREADS": "1",
}
TINY_READY_TIMEOUT_S = 120.0
NO_OP_TRAINER = "no-op-trainer"  # process name; it runs when run.only = "rollout"
TRACKER_RESTARTS = 20  # with pauses of up to 10 s; W&B itself tries for 90 s to reach its server
WITH_LOG = "log"  # argument of the exporter that tells what the log says
LIGHT_ACTORS = ("rollout", "reward", "filter", "buffer")


def process_specs(topology: Topology, node: str, run_dir: Path) -> list[ProcessSpec]:
    """Process specs of a node, without its node daemon and the NATS server.

    Light actors, routers and trackers run on the node that has the bus. So do reward actors and engines without GPUs,
    unless `reward.nodes` and `engines.<pool>.nodes` name others. Trainer ranks and engines with GPUs run where these
    are; ranks on the CPU on `trainer.nodes`. Each node has an exporter for Prometheus.
    """
    specs: list[ProcessSpec] = []
    home = node == home_node(topology)
    recorded = answers_are_recorded(topology)  # an offline rollout needs no engine and no grader
    placed = topology.reward.nodes
    for pool, engine in topology.engines.items() if not recorded else ():
        specs += _engines(topology, pool, engine, node)
        own = engine.router == "sglang-router" and engine.router_url is None
        if home and pool == POLICY and own:  # requests to other pools name their engine
            specs.append(_router(topology, pool, engine))
    if topology.run.only != "rollout":
        specs += _trainer(topology, node, run_dir)
    elif home:
        specs.append(_host(topology, run_dir, NO_OP_TRAINER, ["trainer"], OURS | HIDDEN))
    if home:
        shared = {role for roles in topology.share for role in roles}
        alone = [(role,) for role in LIGHT_ACTORS if role not in shared and not (role == "reward" and placed)]
        idle = {role for role, runs in (("reward", not recorded), ("filter", has_filter(topology))) if not runs}
        together = ([role for role in roles if role not in idle] for roles in (*topology.share, *alone))
        specs += [_host(topology, run_dir, "+".join(roles), roles, OURS) for roles in together if roles]
    if node in placed and not recorded:
        number = placed.index(node)
        env = OURS | {INSTANCE_VARIABLE: str(number)}
        specs.append(_host(topology, run_dir, f"reward.{number}", ["reward"], env))
    specs += _exporter(topology, home=home)
    return [*specs, *_trackers(topology), *_page(topology), *_spans(topology)] if home else specs


def _engines(topology: Topology, pool: str, engine: EngineConfig, node: str) -> list[ProcessSpec]:
    """Specs of a pool's engines on one node."""
    return [
        spec
        for index, places in enumerate(engine_places(topology, engine))
        for spec in _engine_ranks(topology, pool, engine, index, places, node)
    ]


def _engine_ranks(
    topology: Topology, pool: str, engine: EngineConfig, index: int, places: Sequence[ProcessPlace], node: str
) -> list[ProcessSpec]:
    """Specs of one engine's processes on a node: rank 0 serves requests, the others answer liveness checks only."""
    number = len(places)
    group = _restart_group(f"engine.{pool}.{index}", [place.node for place in places], node)
    specs: list[ProcessSpec] = []
    for rank, place in enumerate(places):
        if place.node != node:
            continue
        spec = _engine(topology, pool, engine, index, place.gpus)
        if number > 1:
            command = (*spec.command, *rank_arguments(rank, number))
            spec = msgspec.structs.replace(spec, command=command, restart_group=group)
        if rank > 0:
            probe = AnswersHttp(RANK_PATH)
            spec = msgspec.structs.replace(spec, name=f"{spec.name}.{rank}", probe=probe, address_key=None)
        specs.append(spec)
    return specs


def _visible(devices: tuple[int, ...]) -> dict[str, str]:
    return {NVIDIA: ",".join(map(str, devices))} if devices else {}


def _engine(topology: Topology, pool: str, engine: EngineConfig, index: int, devices: tuple[int, ...]) -> ProcessSpec:
    if engine.kind == "tiny":
        command, ready_timeout_s = _tiny_engine(topology, pool, index), TINY_READY_TIMEOUT_S
        env = OURS | HIDDEN
    else:
        command, ready_timeout_s = server_command(topology, pool, index), READY_TIMEOUT_S
        env = SERVER_ENVIRONMENT
    return ProcessSpec(
        name=f"engine.{pool}.{index}",
        command=command,
        env={**env, **engine.env, **_visible(devices), **peers_environment(engine)},
        port=PortRequest(),
        ready=WhenListening(),
        ready_timeout_s=engine.ready_timeout_s or ready_timeout_s,
        probe=AnswersHttp(READY_PATH),
        unresponsive_after_s=engine.unresponsive_after_s,
        crash_words=CRASH_WORDS,
        address_key=address_key("engine", pool, index),
        tier=Tier.SERVICE,
        critical=engine.colocate is not None,  # the trainer waits for the memory of each
    )


def _tiny_engine(topology: Topology, pool: str, index: int) -> tuple[str, ...]:
    engine = topology.engines[pool]
    load_format = "dummy" if topology.model.random_init and engine.hf_checkpoint is None else "auto"
    command = [sys.executable, "-P", "-m", "actors.tiny_engine", "--model-path", model_of(topology, engine)]
    return with_arguments(command, common_arguments(topology, pool, index) | {"load_format": load_format})


def _host(topology: Topology, run_dir: Path, name: str, roles: Sequence[str], env: Mapping[str, str]) -> ProcessSpec:
    """Spec of a process that hosts actors."""
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-P", "-m", "actors.host", str(run_dir), *roles),
        env=env,
        probe=SendsHeartbeats(),
        unresponsive_after_s=topology.run.unresponsive_after_s,
    )


def _trackers(topology: Topology) -> list[ProcessSpec]:
    """Specs of the processes that log the run's metrics to trackers."""
    known = {
        "run": topology.run.name,
        "optimizer_steps": topology.algorithm.num_steps_per_rollout,
    }
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


def _observer(name: str, module: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-P", "-m", module, *arguments),
        env=OURS,
        tier=Tier.OBSERVER,
        critical=False,
        max_restarts=TRACKER_RESTARTS,
    )


def _router(topology: Topology, pool: str, engine: EngineConfig) -> ProcessSpec:
    return ProcessSpec(
        name=f"router.{pool}",
        command=router_command(topology, engine),
        port=PortRequest(),
        ready=WhenListening(),
        probe=AnswersHttp(ROUTER_PATH),
        unresponsive_after_s=engine.unresponsive_after_s,
        address_key=address_key("router", pool, 0),
        tier=Tier.SERVICE,
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
        env |= HIDDEN if place.gpu is None else {NVIDIA: str(place.gpu)}
        name = "trainer" if world == 1 else f"trainer.{rank}"
        specs.append(_host(topology, run_dir, name, ["trainer"], env))
    if world == 1:
        return specs
    group = _restart_group("trainer", [place.node for place in places], node)  # ranks cannot compute alone
    return [
        msgspec.structs.replace(spec, env={**spec.env, START_VARIABLE: "{peers}"}, restart_group=group)
        for spec in specs
    ]


def _restart_group(name: str, nodes_of_processes: Sequence[str], node: str) -> RestartGroupSpec:
    """Return the restart group of processes on these nodes, as one of the nodes has it."""
    nodes = tuple(dict.fromkeys(nodes_of_processes))
    here = sum(each == node for each in nodes_of_processes)
    return RestartGroupSpec(name, here, nodes if len(nodes) > 1 else ())
