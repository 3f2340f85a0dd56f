"""Rules of the weight transport: which layouts and engines it supports."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from runtime.settings.placement import (
    engine_places,
    home_node,
    is_networked,
    nodes_of_engine,
    num_engines,
    weight_nodes,
)
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import POLICY, Topology, answers_are_recorded, keeps_prefixes, sglang_arguments

IN_FILES: Final = ("disk", "http")
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
STAGES: Final = ("pp_size", "pipeline_parallel_size")  # SGLang's names
NOT_FROM_PEERS: Final = ("load_format", "model_loader_extra_config", "quantization", "weight_cache_mode")
REPLICAS: Final = ("dp_size", "data_parallel_size")  # SGLang's names


def transport_problems(topology: Topology) -> Iterator[Problem]:
    """Yield weight transports that the layout, the weight export or the engines do not allow."""
    for name, engine in topology.engines.items():
        if name != POLICY:
            continue  # its weights do not change
        key = f"engines.{name}"
        if engine.weight_transport == "ipc" and engine.colocate is None:
            message = f'needs {key}.colocate = "trainer"; allowed otherwise: disk, http, collective'
            yield Problem.of(f"{key}.weight_transport", engine.weight_transport, message)
        if engine.weight_transport == "ipc":
            yield from _by_handles(engine, key)
        if engine.weight_transport == "collective" and engine.colocate is not None:
            message = "colocated engines cannot join a process group with the trainer; allowed: disk, ipc"
            yield Problem.of(f"{key}.weight_transport", engine.weight_transport, message)
        if engine.weight_transport == "collective":
            yield from _in_groups(topology, engine, key)
        if engine.weight_transport == "http":
            yield from _over_http(topology, engine, key)
        if engine.weight_transport not in IN_FILES:
            yield from _one_replica(engine, key)
        yield from _in_format(engine, key)
        yield from _deltas(topology, engine, key)
        if engine.local_copy:
            yield from _local_copies(engine, key)
        yield from _rolling(engine, key)
        yield from _in_place(topology, engine, key)
        if engine.start_weights == "peer":
            yield from _from_peers(topology, engine, key)


def _in_place(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Refuse in-place updates with SGLang's prefix cache behind a router.

    A request that waits at an engine during a weight update would be prefilled from prefixes of older weights, but
    labelled with the new ones. The rollout actor finds such an answer if it chose the engine and so knows its version.
    The tiny engine shares prompts within a weight version alone; external servers are queried at run time.
    """
    mode = topology.rollout.on_weight_update
    if mode != "in_place" or engine.kind == "tiny" or engine.urls or answers_are_recorded(topology):
        return
    if keeps_prefixes(topology, engine):
        return
    if not any(name == "disable_radix_cache" and value is True for name, _, value in sglang_arguments(engine)):
        message = (
            "waiting requests would reuse the prefix cache of older weights, with tokens labelled as of the new ones: "
            f'needs {key}.router = "direct" or {key}.sglang.disable_radix_cache = true; '
            'allowed otherwise: "drain", "abort", "retract"'
        )
        yield Problem.of("rollout.on_weight_update", mode, message)


def _deltas(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Yield problems of deltas: the node daemon applies them to files, and only for engines that it starts."""
    interval = topology.trainer.full_export_interval
    if interval == 1 or answers_are_recorded(topology):
        return
    if engine.weight_transport not in IN_FILES:
        message = (
            f'deltas are published as files: needs {key}.weight_transport = "disk" or "http"; allowed otherwise: 1'
        )
        yield Problem.of("trainer.full_export_interval", interval, message)
    if engine.colocate is not None:
        message = f"deltas need engines on their own GPUs ({key}.colocate unset); allowed otherwise: 1"
        yield Problem.of("trainer.full_export_interval", interval, message)
    if engine.urls:
        message = (
            "no node daemon of the run applies deltas for external engines: needs trainer.full_export_interval = 1"
        )
        yield Problem.of(f"{key}.urls", list(engine.urls), message)


def _local_copies(engine: EngineConfig, key: str) -> Iterator[Problem]:
    if engine.weight_transport not in IN_FILES:
        message = (
            f'local copies are made of files only: needs {key}.weight_transport = "disk"; allowed otherwise: false'
        )
        yield Problem.of(f"{key}.local_copy", True, message)
    if engine.urls:
        message = f"no node daemon of the run copies files for external engines: needs {key}.local_copy = false"
        yield Problem.of(f"{key}.urls", list(engine.urls), message)


def _rolling(engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Yield problems of update groups: some engines serve while others are updated."""
    groups = engine.update_groups
    if groups == 1:
        return
    if engine.colocate is not None:
        message = "colocated engines are updated together, while none serves; allowed: 1"
        yield Problem.of(f"{key}.update_groups", groups, message)
        return
    try:
        number = num_engines(engine)
    except ValueError:  # another rule reports the GPU list
        return
    if groups > number:
        yield Problem.of(f"{key}.update_groups", groups, f"is above the number of engines in the pool, {number}")


def _from_peers(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Yield problems of first weights from a peer.

    SGLang sends parameters from each TP rank, GPU to GPU, to the same rank of a server with the same arguments.
    """

    def refused(message: str) -> Problem:
        return Problem.of(f"{key}.start_weights", "peer", f'{message}; allowed otherwise: "files"')

    if engine.kind == "tiny" or engine.gpus is None or engine.urls:
        yield refused("needs engines of SGLang on GPUs that the run starts")
        return
    if engine.colocate is not None:
        yield refused(
            f"colocated engines release their weights, so a peer has none to send: needs {key}.colocate unset"
        )
    if engine.num_processes > 1:
        yield refused(f"each process of an engine would choose its own peer: needs {key}.num_processes = 1")
    if engine.weight_format == "fp8":
        yield refused(f"SGLang does not send FP8 scales: needs {key}.weight_format other than fp8")
    if engine.verify != "always":
        yield refused(f'received weights are verified by their checksum: needs {key}.verify = "always"')
    if not _has_two_on_a_node(topology, engine):
        yield refused("peers are engines of one node, and no node has two engines of this pool")
    for name, spelled, value in sglang_arguments(engine):
        if name in (*STAGES, *REPLICAS) and value != 1:
            message = f'allowed with {key}.start_weights = "peer": 1'
            yield Problem.of(f"{key}.sglang.{spelled}", value, message)
        elif name in NOT_FROM_PEERS or name.startswith(("remote_instance_weight_loader_", "speculative_")):
            message = f'not allowed with {key}.start_weights = "peer"; remove it'
            yield Problem.of(f"{key}.sglang.{spelled}", value, message)


def _has_two_on_a_node(topology: Topology, engine: EngineConfig) -> bool:
    try:
        nodes = [nodes_of_engine(places) for places in engine_places(topology, engine)]
    except ValueError:  # another rule reports the GPU list
        return True
    return max(Counter(nodes).values(), default=0) > 1 and all(len(each) == 1 for each in nodes)


def _in_groups(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Yield problems of process groups with engines.

    One backend serves all ranks of a group. With one node and no address of its own the trainer waits for engines at
    127.0.0.1.
    """
    if (topology.trainer.device == "cuda") != (engine.gpus is not None) and not engine.urls:
        message = 'needs trainer and engines on GPUs, or both on the CPU; allowed otherwise: "disk"'
        yield Problem.of(f"{key}.weight_transport", engine.weight_transport, message)
    away = [url for url in engine.urls if urlsplit(url).hostname not in LOOPBACK]
    if away and not is_networked(topology):
        message = (
            "these engines cannot reach the trainer at 127.0.0.1: "
            f'needs {key}.weight_transport = "disk", or urls of 127.0.0.1'
        )
        yield Problem.of(f"{key}.urls", list(engine.urls), message)


def _by_handles(engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Refuse pipeline stages: SGLang passes one handle to all stages, but it is valid on one GPU only."""
    for name, spelled, value in sglang_arguments(engine):
        if engine.gpus is not None and name in STAGES and value != 1:
            message = (
                f'a memory handle is valid for one pipeline stage only; allowed: 1, or {key}.weight_transport = "disk"'
            )
            yield Problem.of(f"{key}.sglang.{spelled}", value, message)


def _over_http(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Yield what cannot be fetched: home's node daemon serves files, and node daemons fetch them for their engines."""

    def refused(message: str) -> Problem:
        return Problem.of(f"{key}.weight_transport", "http", f"{message}; allowed otherwise: disk, collective")

    if engine.urls:
        yield refused(f"no node daemon of the run fetches files for external engines: needs {key}.urls unset")
    if engine.colocate is not None:
        yield refused(f"colocated engines are beside the trainer's files: needs {key}.colocate unset")
    home = home_node(topology)
    with suppress(ValueError):  # another rule reports the GPU list
        if any(node != home for node in weight_nodes(topology)):
            yield refused(
                f"not implemented yet: a pipeline stage whose first rank is on another node than home, {home}"
            )
        if any(len(nodes_of_engine(places)) > 1 for places in engine_places(topology, engine)):
            yield refused("not implemented yet for an engine over several nodes")


def _one_replica(engine: EngineConfig, key: str) -> Iterator[Problem]:
    for name, spelled, value in sglang_arguments(engine):
        if name in REPLICAS and value != 1:
            message = f'SGLang updates only engines with one replica; allowed: 1, or {key}.weight_transport = "disk"'
            yield Problem.of(f"{key}.sglang.{spelled}", value, message)


def _in_format(engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Yield problems of FP8: it needs SGLang on GPUs, and its quantization_config must have one source."""
    if engine.weight_format != "fp8":
        return
    if engine.kind == "tiny" or (engine.gpus is None and not engine.urls):
        message = "needs engines of SGLang on GPUs; allowed otherwise: as_trained, bfloat16"
        yield Problem.of(f"{key}.weight_format", "fp8", message)
    for name, spelled, value in sglang_arguments(engine):
        if name == "json_model_override_args" and not _leaves_it(value):
            message = f'allowed with {key}.weight_format = "fp8": a table without quantization_config'
            yield Problem.of(f"{key}.sglang.{spelled}", value, message)


def _leaves_it(overrides: object) -> bool:
    return isinstance(overrides, dict) and "quantization_config" not in overrides
