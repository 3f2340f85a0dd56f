"""Rules of how weights reach engines."""

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from runtime.settings.reading.config import Problem
from runtime.settings.topology import EngineConfig, Topology

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
REPLICAS: Final = ("dp_size", "data_parallel_size")  # SGLang's names of it


def transport_problems(topology: Topology) -> Iterator[Problem]:
    """Transports that the layout, the handover or the engines do not allow."""
    for name, engine in topology.engines.items():
        key = f"engines.{name}"
        if engine.weight_transport == "ipc" and engine.colocate is None:
            message = f'needs {key}.colocate = "trainer"; allowed otherwise: disk, collective'
            yield Problem.of(f"{key}.weight_transport", engine.weight_transport, message)
        if engine.weight_transport == "collective" and engine.colocate is not None:
            message = "engines on the trainer's GPUs cannot be in a process group with it; allowed there: disk, ipc"
            yield Problem.of(f"{key}.weight_transport", engine.weight_transport, message)
        if engine.weight_transport == "collective":
            yield from _in_groups(topology, engine, key)
        if engine.weight_transport != "disk":
            yield from _in_sessions(topology, engine, key)


def _in_groups(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    """One backend serves all ranks of a group; with one node, the trainer waits for engines at 127.0.0.1."""
    if (topology.trainer.device == "cuda") != (engine.gpus is not None) and not engine.urls:
        message = 'needs trainer and engines on GPUs, or both on the CPU; allowed otherwise: "disk"'
        yield Problem.of(f"{key}.weight_transport", engine.weight_transport, message)
    away = [url for url in engine.urls if urlsplit(url).hostname not in LOOPBACK]
    if away and len(topology.nodes) == 1:
        message = (
            f'the trainer cannot be reached from there: needs {key}.weight_transport = "disk", or urls of 127.0.0.1'
        )
        yield Problem.of(f"{key}.urls", list(engine.urls), message)


def _in_sessions(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    if topology.trainer.handover == "copy":
        message = f'a copy is handed over in files: needs {key}.weight_transport = "disk"; allowed otherwise: stream'
        yield Problem.of("trainer.handover", "copy", message)
    for name, value in engine.sglang.items():
        if name.replace("-", "_") in REPLICAS and value != 1:
            message = f'SGLang updates engines of one replica only; allowed: 1, or {key}.weight_transport = "disk"'
            yield Problem.of(f"{key}.sglang.{name}", value, message)
