"""Which processes a run has on a node, and how each is started. Pure."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.bus.addresses import address_key
from runtime.import_path import ROOT
from runtime.settings.placement import gpus_of, home_node, num_engines, num_ranks
from runtime.settings.processes import AnswersHttp, PortRequest, ProcessSpec, Stage, WhenListening
from runtime.settings.topology import EngineConfig, Topology, answers_are_recorded

OURS = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),  # with -P
    "OMP_NUM_THREADS": "1",  # two threads were 10 to 200 times slower on shared cores
    "MKL_NUM_THREADS": "1",
}
FOREIGN = {"PYTHONSAFEPATH": "1"}  # as -P, for an interpreter that may be too old for it
STREAM_INTERVAL = 64  # tokens of a streamed chunk: what the death of an engine costs of a sample at most
LAUNCH = str(ROOT / "actors" / "rollout" / "engines" / "launch.py")  # gives them the run's key
METRICS_HOST = "127.0.0.2"  # the router insists on a port for metrics and fails if it is taken: its own, one host on
STAND_IN = "stand-in"  # in the trainer's place when only rollout runs
LIGHT_ACTORS = ("rollout", "reward", "filter", "buffer")


def process_specs(topology: Topology, node: str, run_dir: Path) -> list[ProcessSpec]:
    """The processes of a node beside its agent and the NATS server.

    Light actors, and the router and the embedded engines of a pool, live on the node that has the bus; trainer ranks
    and SGLang engines where their GPUs are.
    """
    specs: list[ProcessSpec] = []
    home = node == home_node(topology)
    recorded = answers_are_recorded(topology)  # need no engine and no grader
    for pool, engine in topology.engines.items() if not recorded else ():
        specs += _engines(topology, pool, engine, node, home=home)
        if home:
            specs.append(_router(pool, engine))
    if topology.run.only != "rollout":
        specs += _trainer(topology, node, run_dir, home=home)
    elif home:
        specs.append(ProcessSpec(name=STAND_IN, command=_host(run_dir, "trainer"), env=OURS))
    if home:
        shared = {role for roles in topology.share for role in roles}
        alone = [(role,) for role in LIGHT_ACTORS if role not in shared]
        idle = {"reward"} if recorded else set[str]()
        together = ([role for role in roles if role not in idle] for roles in (*topology.share, *alone))
        specs += [_actors(roles, run_dir) for roles in together if roles]
    return specs


def _actors(roles: Sequence[str], run_dir: Path) -> ProcessSpec:
    return ProcessSpec(name="+".join(roles), command=_host(run_dir, *roles), env=OURS)


def _host(run_dir: Path, *roles: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "actors.host", str(run_dir), *roles)


def _router(pool: str, engine: EngineConfig) -> ProcessSpec:
    command = (sys.executable, "-P", LAUNCH, "sglang_router.launch_router", "--host", "{host}", "--port", "{port}")
    options = (
        "--policy",
        "round_robin",
        "--disable-retries",  # a lost request is the rollout actor's to send again
        "--disable-circuit-breaker",  # which engines may answer is the rollout actor's to say
        "--health-check-endpoint",
        "/model_info",  # /health blocks while an engine is paused
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
        stage=Stage.SERVICE,
    )


def _engines(topology: Topology, pool: str, engine: EngineConfig, node: str, *, home: bool) -> list[ProcessSpec]:
    if engine.urls:
        return []  # they run already
    if engine.gpus is None:
        places = [(index, ()) for index in range(num_engines(engine))] if home else []
    else:
        gpus = gpus_of(topology, engine.gpus)
        size = engine.num_gpus_per_engine
        chunks = [gpus[start : start + size] for start in range(0, len(gpus), size)]
        places = [
            (index, tuple(gpu.index for gpu in chunk)) for index, chunk in enumerate(chunks) if chunk[0].node == node
        ]
    return [_engine(topology, pool, engine, index, devices) for index, devices in places]


def _engine(topology: Topology, pool: str, engine: EngineConfig, index: int, devices: tuple[int, ...]) -> ProcessSpec:
    embedded = engine.kind == "embedded"
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    return ProcessSpec(
        name=f"engine.{pool}.{index}",
        command=_embedded(topology, engine, index) if embedded else _sglang(topology, engine),
        env={**env, **(OURS if embedded else FOREIGN)},
        port=PortRequest(),
        ready=WhenListening(),
        ready_timeout_s=120.0 if embedded else 1800.0,
        probe=AnswersHttp("/ready"),  # needs no turn of the model; 503 while generation is paused
        unresponsive_after_s=engine.unresponsive_after_s,
        address_key=address_key("engine", pool, index),
        stage=Stage.SERVICE,
    )


def _embedded(topology: Topology, engine: EngineConfig, index: int) -> tuple[str, ...]:
    rollout = topology.rollout
    command = [sys.executable, "-P", "-m", "actors.rollout.embedded", "--model-path", topology.model.hf_checkpoint]
    command += ["--host", "{host}", "--port", "{port}", "--max-running-requests", str(engine.concurrency)]
    command += ["--random-seed", str(topology.run.seed + index)]
    command += ["--stream-interval", str(STREAM_INTERVAL), "--incremental-streaming-output"]
    command += ["--load-format", "dummy" if topology.model.random_init else "auto"]
    if engine.max_total_tokens is not None:
        command += ["--max-total-tokens", str(engine.max_total_tokens)]
    if rollout.max_context_len is not None:
        command += ["--context-length", str(rollout.max_context_len)]
    return tuple(command)


def _sglang(topology: Topology, engine: EngineConfig) -> tuple[str, ...]:
    """Every key of the pool's sglang table is a server argument; true and false switch flags on and leave them off."""
    command = [engine.python or sys.executable, LAUNCH, "sglang.launch_server"]
    command += ["--model-path", topology.model.hf_checkpoint, "--host", "{host}", "--port", "{port}"]
    streams = {"stream_interval": STREAM_INTERVAL, "incremental_streaming_output": True}
    sizes = {"tp_size": engine.num_gpus_per_engine, "max_running_requests": engine.concurrency}
    arguments = {**sizes, **streams, **engine.sglang}
    if topology.model.random_init:
        arguments.setdefault("load_format", "dummy")
    for key, value in arguments.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not False:
            command += [flag, str(value)]
    return tuple(command)


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
        if device is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(device)
        name = "trainer" if world == 1 else f"trainer.{rank}"
        specs.append(ProcessSpec(name=name, command=_host(run_dir, "trainer"), env=env))
    return specs
