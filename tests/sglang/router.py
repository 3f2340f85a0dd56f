"""The real sglang-router, started with the arguments that a run uses."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.processes import process_specs
from runtime.node.supervisor.ports import free_port
from runtime.settings.processes import with_address
from runtime.settings.topology import SOLE_NODE
from tests.build.topology import topology_with
from tests.support.tiny_engine import wait_until_200

STOP_S = 10.0


@dataclass
class Router:
    """A router process on its own port."""

    port: int
    command: list[str]
    process: "subprocess.Popen[str]"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)

    def start_again(self) -> None:
        self.process = _started(self.command)
        wait_until_200(f"{self.url}/liveness", self.process)


def router_command(port: int, **rollout: Any) -> list[str]:
    """Build the router command of a run with these rollout settings."""
    pool = {"kind": "tiny", "concurrency": 8, "router": "sglang-router"}
    topology = topology_with(rollout=rollout, engines={"policy": pool})
    (spec,) = [spec for spec in process_specs(topology, SOLE_NODE, Path("/nowhere")) if spec.name == "router.policy"]
    return [with_address(part, "127.0.0.1", port) for part in spec.command]


@contextlib.contextmanager
def running_router(**rollout: Any) -> Iterator[Router]:
    """Run a router; yield it when it answers."""
    port = free_port()
    command = router_command(port, **rollout)
    router = Router(port, command, _started(command))
    try:
        wait_until_200(f"{router.url}/liveness", router.process)
        yield router
    finally:
        router.process.terminate()
        try:
            router.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            router.kill()


def _started(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
