"""Process specs of a run on one node. Pure."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from actors.engine_processes import OURS, engine_specs
from actors.rollout.sglang.server_arguments import LAUNCH
from runtime.bus.addresses import INSTANCE_VARIABLE, address_key
from runtime.settings.devices import HIDDEN, NVIDIA
from runtime.settings.placement import gpus_of, home_node, num_ranks
from runtime.settings.processes import (
    AnswersHttp,
    PortRequest,
    ProcessSpec,
    RestartGroupSpec,
    SendsHeartbeats,
    Tier,
    WhenListening,
)
from runtime.settings.topology import EngineConfig, Topology, answers_are_recorded, has_filter

METRICS_HOST = "127.0.0.2"  # the router needs a free metrics port: its own port on another loopback address
NO_OP_TRAINER = "no-op-trainer"  # process name; it runs when run.only = "rollout"
LIGHT_ACTORS = ("rollout", "reward", "filter", "buffer")


def process_specs(topology: Topology, node: str, run_dir: Path) -> list[ProcessSpec]:
    """Process specs of a node, without its node daemon and the NATS server.

    Light actors and routers run on the node that has the bus. So do reward actors and engines without GPUs, unless
    `reward.nodes` and `engines.<pool>.nodes` name others. Trainer ranks and engines with GPUs run where these are.
    """
    specs: list[ProcessSpec] = []
    home = node == home_node(topology)
    recorded = answers_are_recorded(topology)  # an offline rollout needs no engine and no grader
    placed = topology.reward.nodes
    for pool, engine in topology.engines.items() if not recorded else ():
        specs += engine_specs(topology, pool, engine, node)
        if home:
            specs.append(_router(topology, pool, engine))
    if topology.run.only != "rollout":
        specs += _trainer(topology, node, run_dir, home=home)
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
    return specs


def _host(topology: Topology, run_dir: Path, name: str, roles: Sequence[str], env: Mapping[str, str]) -> ProcessSpec:
    """Spec of a process that hosts actors."""
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-P", "-m", "actors.host", str(run_dir), *roles),
        env=env,
        probe=SendsHeartbeats(),
        unresponsive_after_s=topology.run.unresponsive_after_s,
    )


def _router(topology: Topology, pool: str, engine: EngineConfig) -> ProcessSpec:
    command = (sys.executable, "-P", LAUNCH, "sglang_router.launch_router", "--host", "{host}", "--port", "{port}")
    options = (
        "--policy",
        "round_robin",
        "--disable-retries",  # the rollout actor resends lost requests
        "--disable-circuit-breaker",  # the rollout actor decides which engines serve
        "--health-check-endpoint",
        "/model_info",  # /health blocks while an engine is paused
        "--request-timeout-secs",
        str(topology.rollout.generate_timeout_s),
        "--worker-startup-check-interval",
        "1",
        "--prometheus-host",
        METRICS_HOST,
        "--prometheus-port",
        "{port}",
        "--log-level",
        "warn",
    )
    return ProcessSpec(
        name=f"router.{pool}",
        command=(*command, *options),
        port=PortRequest(),
        ready=WhenListening(),
        probe=AnswersHttp("/liveness"),
        unresponsive_after_s=engine.unresponsive_after_s,
        address_key=address_key("router", pool, 0),
        tier=Tier.SERVICE,
    )


def _trainer(topology: Topology, node: str, run_dir: Path, *, home: bool) -> list[ProcessSpec]:
    trainer = topology.trainer
    world = num_ranks(trainer)
    if trainer.gpus is None:
        places = [(rank, None) for rank in range(world)] if home else []
    else:
        gpus = gpus_of(topology, trainer.gpus)
        places = [(rank, gpu.index) for rank, gpu in enumerate(gpus) if gpu.node == node]
    specs: list[ProcessSpec] = []
    for rank, device in places:
        env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", **OURS}
        env |= HIDDEN if device is None else {NVIDIA: str(device)}
        name = "trainer" if world == 1 else f"trainer.{rank}"
        specs.append(_host(topology, run_dir, name, ["trainer"], env))
    if world == 1:
        return specs
    whole = RestartGroupSpec("trainer", len(specs))  # ranks cannot compute alone: all of them restart together
    return [msgspec.structs.replace(spec, restart_group=whole) for spec in specs]
