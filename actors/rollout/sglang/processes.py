"""Process specs of engines and of sglang-router: their command lines and environments."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from actors.rollout.sglang.facts import CRASH_WORDS, KEPT_OF_INPUT, NO_DIAGNOSTICS, OVERRIDES
from actors.rollout.sglang.peer_weights import PEERS_VARIABLE
from actors.rollout.sglang.server_arguments import FOREIGN, LAUNCH
from runtime.bus.addresses import address_key
from runtime.models.config_keys import defaults_of
from runtime.models.fp8 import SERVED
from runtime.models.quantization import QUANTIZATION
from runtime.settings.derived import policy_model, quantization
from runtime.settings.devices import NVIDIA, ON_CPU
from runtime.settings.owners import rollout_places
from runtime.settings.placement import ProcessPlace, engine_places, served_dtype
from runtime.settings.processes import (
    OURS,
    AnswersHttp,
    PortRequest,
    ProcessSpec,
    RestartGroupSpec,
    Tier,
    WhenListening,
)
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import (
    POLICY,
    Topology,
    max_adapters,
    model_of,
    only_answers,
    serves_adapters,
    sglang_arguments,
)
from runtime.settings.torch_threads import threads_of

TINY_READY_TIMEOUT_S: Final = 120.0
READY_TIMEOUT_S: Final = 1800.0  # a slow disk needs that long for a large model
STREAM_INTERVAL: Final = 64  # tokens per streamed chunk; an engine crash loses at most this many tokens of a sample
READY_PATH: Final = "/ready"  # runs no forward pass; answers 503 while generation is paused
RANK_PATH: Final = "/health"  # of ranks that serve no requests
ROUTER_PATH: Final = "/liveness"
SERVER_ENVIRONMENT: Final = FOREIGN | NO_DIAGNOSTICS
# "power_of_two" starts with two engines or more; engines register later, and these never do
UNREACHABLE: Final = ("--worker-urls", "http://127.0.0.1:1", "http://127.0.0.1:2", "--worker-startup-timeout-secs", "5")
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")  # that of a model with experts has no adapters
METRICS_HOST: Final = "127.0.0.2"  # the router needs a free metrics port: its own port on another loopback address


def engine_specs(topology: Topology, node: str) -> Iterator[ProcessSpec]:
    """Yield the specs of the engines on one node, and of the routers of its rollout actors."""
    for pool, engine in topology.engines.items():
        for index, places in enumerate(engine_places(topology, engine)):
            yield from _engine_ranks(topology, pool, engine, index, places, node)
        own = engine.router == "sglang-router" and engine.router_url is None
        if pool == POLICY and own:  # requests to other pools name their engine
            places = rollout_places(topology)
            for index in [index for index, place in enumerate(places) if place.node == node]:
                name = f"router.{pool}" if len(places) == 1 else f"router.{pool}.{index}"
                yield _router(topology, pool, engine, name, index)


def _engine_ranks(
    topology: Topology, pool: str, engine: EngineConfig, index: int, places: Sequence[ProcessPlace], node: str
) -> list[ProcessSpec]:
    """Specs of one engine's processes on a node: rank 0 serves requests, the others answer liveness checks only."""
    number = len(places)
    group = RestartGroupSpec.of(f"engine.{pool}.{index}", [place.node for place in places], node)
    specs: list[ProcessSpec] = []
    for rank, place in enumerate(places):
        if place.node != node:
            continue
        spec = _engine(topology, pool, engine, index, place)
        if number > 1:
            command = (*spec.command, *_rank_arguments(rank, number))
            spec = msgspec.structs.replace(spec, command=command, restart_group=group)
        if rank > 0:
            probe = AnswersHttp(RANK_PATH)
            spec = msgspec.structs.replace(spec, name=f"{spec.name}.{rank}", probe=probe, address_key=None)
        specs.append(spec)
    return specs


def _visible(devices: tuple[int, ...]) -> dict[str, str]:
    return {NVIDIA: ",".join(map(str, devices))} if devices else {}


def _engine(topology: Topology, pool: str, engine: EngineConfig, index: int, place: ProcessPlace) -> ProcessSpec:
    if engine.kind == "tiny":
        command, ready_timeout_s = _tiny_engine(topology, pool, index), TINY_READY_TIMEOUT_S
        env = OURS | ON_CPU | threads_of(topology, place.node, engine.torch_threads)
    else:
        command, ready_timeout_s = _server_command(topology, pool, index), READY_TIMEOUT_S
        env = SERVER_ENVIRONMENT
    return ProcessSpec(
        name=f"engine.{pool}.{index}",
        command=command,
        env={**env, **engine.env, **_visible(place.gpus), **_peers_environment(engine)},
        forked=engine.kind == "tiny",
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
    load_format = "dummy" if _waits_for_weights(topology, engine) else "auto"
    command = [sys.executable, "-P", "-m", "actors.tiny_engine", "--model-path", model_of(topology, engine)]
    command += ignoring(topology) if engine.hf_checkpoint is None else ()
    own: dict[str, Any] = {"load_format": load_format, "dtype": served_dtype(topology, engine)}
    if pool == POLICY and serves_adapters(topology):
        own |= adapter_arguments(topology)
    return _with_arguments(command, _common_arguments(topology, pool, index) | own)


def _waits_for_weights(topology: Topology, engine: EngineConfig) -> bool:
    """Return whether an engine starts with any weights: those that it is to serve are drawn, or dequantized, first."""
    return engine.hf_checkpoint is None and (topology.model.random_init or quantization(topology) is not None)


def adapter_arguments(topology: Topology) -> dict[str, Any]:
    """Return the arguments by which an engine serves the run's adapters."""
    number = max_adapters(topology) + 1  # SGLang counts the base model in a batch, and loads at least that many
    return {
        "enable_lora": True,
        "max_lora_rank": topology.trainer.lora.rank,
        "max_loras_per_batch": number,
        "max_loaded_loras": number,
    }


def adapter_targets(topology: Topology) -> tuple[str, ...]:
    """Return the names of the layers with adapters, which SGLang wants to know at its start."""
    targets = topology.trainer.lora.targets
    if targets != "all-linear":
        return targets
    return ATTENTION if policy_model(topology).shape.experts is not None else (*ATTENTION, *MLP)


def ignoring(topology: Topology) -> tuple[str, ...]:
    """Return the arguments by which a tiny engine leaves keys of the trained model's config.json out."""
    keys = topology.model.ignore_config_keys
    return ("--ignore-config-keys", *keys) if keys else ()


def _router(topology: Topology, pool: str, engine: EngineConfig, name: str, index: int) -> ProcessSpec:
    """Spec of the router of one rollout actor: in a common one, engines of several would mix."""
    return ProcessSpec(
        name=name,
        command=_router_command(topology, engine),
        port=PortRequest(),
        ready=WhenListening(),
        probe=AnswersHttp(ROUTER_PATH),
        unresponsive_after_s=engine.unresponsive_after_s,
        address_key=address_key("router", pool, index),
        tier=Tier.SERVICE,
    )


def _server_command(topology: Topology, pool: str, index: int) -> tuple[str, ...]:
    """Return the command line of an SGLang server; every key of the pool's sglang table is a server argument."""
    engine = topology.engines[pool]
    own = {
        "tp_size": engine.num_gpus_per_engine if engine.gpus else engine.num_processes,
        "dtype": served_dtype(topology, engine),
    }  # SGLang's default serves a float32 model in float16
    arguments: dict[str, Any] = own | _common_arguments(topology, pool, index)
    if topology.model.trust_remote_code:
        arguments["trust_remote_code"] = True
    if _waits_for_weights(topology, engine):
        arguments["load_format"] = "dummy"
    if engine.colocate is not None and engine.gpus is not None:
        arguments["enable_memory_saver"] = True  # without it SGLang does not release memory on request
    if pool == POLICY and serves_adapters(topology):
        arguments |= adapter_arguments(topology) | {"lora_target_modules": list(adapter_targets(topology))}
    arguments |= {argument.name: argument.value for argument in sglang_arguments(engine)}
    if topology.model.ignore_config_keys and engine.hf_checkpoint is None:
        arguments[OVERRIDES] = defaults_of(topology.model.ignore_config_keys) | arguments.get(OVERRIDES, {})
    if engine.weight_format != "fp8" and engine.hf_checkpoint is None and quantization(topology) is not None:
        arguments[OVERRIDES] = {QUANTIZATION: None, **arguments.get(OVERRIDES, {})}
    if engine.weight_format == "fp8":  # the checkpoint is not: start with dummy weights until the first update
        config = {QUANTIZATION: SERVED, **arguments.get(OVERRIDES, {})}
        arguments |= {"quantization": "fp8", OVERRIDES: config, "load_format": "dummy"}
    command = [engine.python or sys.executable, LAUNCH, "sglang.launch_server"]
    return _with_arguments([*command, "--model-path", model_of(topology, engine)], arguments)


def _peers_environment(engine: EngineConfig) -> dict[str, str]:
    """Return the environment variable with the peer engines, from which launch.py takes the first weights."""
    return {PEERS_VARIABLE: "{others}"} if engine.start_weights == "peer" else {}


def _rank_arguments(rank: int, num_processes: int) -> tuple[str, ...]:
    """Return the arguments of one process of an engine that has several."""
    return (*_words("nnodes", num_processes), *_words("node_rank", rank), "--dist-init-addr={peers}")


def _common_arguments(topology: Topology, pool: str, index: int) -> dict[str, object]:
    """Return the arguments that an SGLang server and a tiny engine both take."""
    engine, longest = topology.engines[pool], topology.rollout.max_context_len
    if only_answers(topology, pool):
        longest = None  # that of the model
    elif longest is not None and engine.hf_checkpoint is not None:
        longest += 1  # whole samples are the input of such engines, which takes one token more
    arguments: dict[str, object | None] = {
        "max_running_requests": engine.concurrency,
        "random_seed": topology.run.seed + index,
        "stream_interval": STREAM_INTERVAL,
        "incremental_streaming_output": True,
        "max_total_tokens": engine.max_total_tokens,
        "context_length": None if longest is None else longest + KEPT_OF_INPUT,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _with_arguments(command: list[str], arguments: Mapping[str, object]) -> tuple[str, ...]:
    """Append the address and the arguments to a server's command."""
    words = (word for name, value in arguments.items() for word in _words(name, value))
    return (*command, "--host", "{host}", "--port", "{port}", *words)


def _router_command(topology: Topology, engine: EngineConfig) -> tuple[str, ...]:
    """Return the command line of sglang-router for a pool."""
    command = (sys.executable, "-P", LAUNCH, "sglang_router.launch_router", "--host", "{url_host}", "--port", "{port}")
    options = (
        "--policy",
        engine.router_policy,
        *(UNREACHABLE if engine.router_policy == "power_of_two" else ()),
        "--balance-abs-threshold",  # of "cache_aware": the longest prefix unless loads differ by half
        "0",
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
    return (*command, *options)


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
