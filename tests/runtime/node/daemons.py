"""Node daemons in the process of a test, and the small processes that they run."""

import sys
import time
from pathlib import Path
from typing import Any

import anyio

from runtime.bus.limits import MIB, StreamLimits
from runtime.bus.nats.server import ServerSettings
from runtime.node.daemon import NodeDaemon
from runtime.node.missing import Need, Part
from runtime.node.node_plan import NodePlan, RunEnd
from runtime.settings.processes import ProcessSpec, Tier

ROOT = Path(__file__).parents[3]
PLAYER = Path(__file__).parent / "player.py"
LIMITS = StreamLimits(
    event_bytes=16 * MIB, work_bytes=4 * MIB, data_bytes=16 * MIB, dead_bytes=4 * MIB, kv_bytes=4 * MIB
)


def player(*arguments: str, name: str = "player", max_restarts: int = 10) -> ProcessSpec:
    command = (sys.executable, str(PLAYER), *arguments)
    return ProcessSpec(name=name, command=command, env={"PYTHONPATH": str(ROOT)}, max_restarts=max_restarts)


def plan(run_dir: Path, *processes: ProcessSpec, incarnation: int = 1) -> NodePlan:
    run_dir.mkdir(exist_ok=True)
    return NodePlan(
        run="r",
        node="local",
        run_dir=run_dir,
        incarnation=incarnation,
        num_steps=3,
        started=time.time(),
        processes=processes,
        server=ServerSettings(store_dir=run_dir / "nats"),
        limits=LIMITS,
    )


class Running:
    """A node daemon in this process, its lines, and its outcome."""

    def __init__(self, node_plan: NodePlan, **options: Any) -> None:
        self.lines: list[str] = []
        self.daemon = NodeDaemon(node_plan, show=self._show, **options)
        self.outcome: RunEnd | None = None
        self._more = anyio.Event()

    def _show(self, text: str) -> None:
        self.lines.append(text)
        self._more.set()
        self._more = anyio.Event()

    async def run(self) -> RunEnd:
        with anyio.fail_after(200):
            self.outcome = await self.daemon.run()
        return self.outcome

    async def shown(self, part: str) -> str:
        """Wait for a line that holds a text."""
        with anyio.fail_after(200):
            while True:
                for line in self.lines:
                    if part in line:
                        return line
                await self._more.wait()


def broken_engine(number: int) -> ProcessSpec:
    """An engine that ends at once and is not started again."""
    command = (sys.executable, "-c", "raise SystemExit(7)")
    name = f"engine.policy.{number}"
    return ProcessSpec(name=name, command=command, tier=Tier.SERVICE, critical=False, max_restarts=0)


def pool(*nodes: str, least: int) -> Need:
    parts = [(f"engine.policy.{number}", node) for number, node in enumerate(nodes)]
    return Need("engines.policy", tuple(Part(name, {name: node}) for name, node in parts), least, "min_engines")
