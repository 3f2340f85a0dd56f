"""Process specs and command lines of a pool's engines. Pure."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from actors.rollout.sglang.facts import CRASH_WORDS, KEPT_OF_INPUT, NO_DIAGNOSTICS, OVERRIDES
from actors.rollout.sglang.peer_weights import PEERS_VARIABLE
from actors.rollout.sglang.server_arguments import FOREIGN, LAUNCH
from runtime.bus.addresses import address_key
from runtime.models.fp8 import SERVED
from runtime.settings.devices import HIDDEN, NVIDIA
from runtime.settings.placement import gpus_of, nodes_of_pool, num_engines, served_dtype
from runtime.settings.processes import AnswersHttp, PortRequest, ProcessSpec, RestartGroupSpec, Tier, WhenListening
from runtime.settings.topology import EngineConfig, Topology, sglang_arguments
from runtime.util.import_path import ROOT

OURS: Final = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),  # for -P
    "OMP_NUM_THREADS": "1",  # two threads were 10 to 200 times slower on shared cores
    "MKL_NUM_THREADS": "1",
}
READY_TIMEOUT_S: Final = {"tiny": 120.0, "sglang": 1800.0}  # a slow disk needs that long for a large model
STREAM_INTERVAL: Final = 64  # tokens per streamed chunk; an engine crash loses at most this many tokens of a sample


def engine_specs(topology: Topology, pool: str, engine: EngineConfig, node: str) -> list[ProcessSpec]:
    """Process specs of a pool's engines on one node.

    Args:
        topology: the topology.
        pool: name of the pool.
        engine: settings of the pool.
        node: the node whose processes are returned.
    """
    if engine.urls:
        return []  # external engines are started elsewhere
    if engine.gpus is None:
        nodes = nodes_of_pool(topology, engine)
        places = [(index, ()) for index in range(num_engines(engine)) if nodes[index % len(nodes)] == node]
    else:
        gpus = gpus_of(topology, engine.gpus)
        size = engine.num_gpus_per_engine
        chunks = [gpus[start : start + size] for start in range(0, len(gpus), size)]
        places = [
            (index, tuple(gpu.index for gpu in chunk)) for index, chunk in enumerate(chunks) if chunk[0].node == node
        ]
    return [spec for index, gpus in places for spec in _processes(topology, pool, engine, index, gpus)]


def _processes(
    topology: Topology, pool: str, engine: EngineConfig, index: int, devices: tuple[int, ...]
) -> list[ProcessSpec]:
    """Process specs of one engine: rank 0 serves requests, the other ranks answer liveness checks only."""
    whole = _engine(topology, pool, engine, index, devices)
    number = engine.num_processes
    if number == 1:
        return [whole]
    share = len(devices) // number
    return [
        msgspec.structs.replace(
            whole,
            name=whole.name if rank == 0 else f"{whole.name}.{rank}",
            command=(*whole.command, *_words("nnodes", number), *_words("node_rank", rank), "--dist-init-addr={peers}"),
            env={**whole.env, **_visible(devices[rank * share : (rank + 1) * share])},
            probe=whole.probe if rank == 0 else AnswersHttp("/health"),
            address_key=whole.address_key if rank == 0 else None,
            restart_group=RestartGroupSpec(whole.name, number),
        )
        for rank in range(number)
    ]


def _visible(devices: tuple[int, ...]) -> dict[str, str]:
    return {NVIDIA: ",".join(map(str, devices))} if devices else {}


def _peers(engine: EngineConfig) -> dict[str, str]:
    """Environment variable that lists the peer engines; the launcher takes the first weights from one of them."""
    return {PEERS_VARIABLE: "{others}"} if engine.start_weights == "peer" else {}


def _engine(topology: Topology, pool: str, engine: EngineConfig, index: int, devices: tuple[int, ...]) -> ProcessSpec:
    tiny = engine.kind == "tiny"
    return ProcessSpec(
        name=f"engine.{pool}.{index}",
        command=_tiny_engine(topology, engine, index) if tiny else _sglang(topology, engine, index),
        env={
            **(OURS | HIDDEN if tiny else FOREIGN | NO_DIAGNOSTICS),
            **engine.env,
            **_visible(devices),
            **_peers(engine),
        },
        port=PortRequest(),
        ready=WhenListening(),
        ready_timeout_s=engine.ready_timeout_s or READY_TIMEOUT_S[engine.kind],
        probe=AnswersHttp("/ready"),  # runs no forward pass; answers 503 while generation is paused
        unresponsive_after_s=engine.unresponsive_after_s,
        crash_words=CRASH_WORDS,
        address_key=address_key("engine", pool, index),
        tier=Tier.SERVICE,
    )


def _tiny_engine(topology: Topology, engine: EngineConfig, index: int) -> tuple[str, ...]:
    load_format = "dummy" if topology.model.random_init else "auto"
    command = [sys.executable, "-P", "-m", "actors.tiny_engine", "--model-path", topology.model.hf_checkpoint]
    return _command(command, _arguments(topology, engine, index) | {"load_format": load_format})


def _sglang(topology: Topology, engine: EngineConfig, index: int) -> tuple[str, ...]:
    """Command line of an SGLang server; every key of the pool's sglang table is a server argument."""
    own = {
        "tp_size": engine.num_gpus_per_engine if engine.gpus else engine.num_processes,
        "dtype": served_dtype(topology, engine),
    }  # SGLang's default serves a float32 model in float16
    arguments: dict[str, Any] = own | _arguments(topology, engine, index)
    if topology.model.trust_remote_code:
        arguments["trust_remote_code"] = True
    if topology.model.random_init:
        arguments["load_format"] = "dummy"
    if engine.colocate is not None and engine.gpus is not None:
        arguments["enable_memory_saver"] = True  # without it SGLang does not release memory on request
    arguments |= {argument.name: argument.value for argument in sglang_arguments(engine)}
    if engine.weight_format == "fp8":  # the checkpoint is not: start with dummy weights until the first update
        config = {"quantization_config": SERVED, **arguments.get(OVERRIDES, {})}
        arguments |= {"quantization": "fp8", OVERRIDES: config, "load_format": "dummy"}
    command = [engine.python or sys.executable, LAUNCH, "sglang.launch_server"]
    return _command([*command, "--model-path", topology.model.hf_checkpoint], arguments)


def _arguments(topology: Topology, engine: EngineConfig, index: int) -> dict[str, object]:
    """Server arguments that both kinds of engine take."""
    longest = topology.rollout.max_context_len
    arguments: dict[str, object | None] = {
        "max_running_requests": engine.concurrency,
        "random_seed": topology.run.seed + index,
        "stream_interval": STREAM_INTERVAL,
        "incremental_streaming_output": True,
        "max_total_tokens": engine.max_total_tokens,
        "context_length": None if longest is None else longest + KEPT_OF_INPUT,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _command(command: list[str], arguments: Mapping[str, object]) -> tuple[str, ...]:
    words = (word for name, value in arguments.items() for word in _words(name, value))
    return (*command, "--host", "{host}", "--port", "{port}", *words)


def _words(name: str, value: object) -> tuple[str, ...]:
    """Format an argument for the command line that launch.py parses.

    Tables and lists become JSON; true becomes --NAME and false --no-NAME.
    """
    flag = name.replace("_", "-")
    match value:
        case bool():
            return (f"--{flag}" if value else f"--no-{flag}",)
        case str():
            return (f"--{flag}", value) if value and not value.startswith("-") else (f"--{flag}={value}",)
        case int() | float():
            return (f"--{flag}", str(value))
        case _:
            return (f"--{flag}={json.dumps(value)}",)
