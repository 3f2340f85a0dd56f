"""The process of a run's own NATS server."""

import math
from pathlib import Path

import anyio

from runtime.bus.errors import BusUnavailable
from runtime.bus.nats.server import NoProgress, ServerSettings, server_command, wait_ready, write_config
from runtime.node.claims.rundir import BUS_FILE
from runtime.node.node_plan import NodePlan
from runtime.settings.processes import Greets, NotReady, PortRequest, ProcessSpec, Tier, WhenConfirmed

BUS_PROCESS = "nats-server"
BUS_STOP_S = 1.5


def bus_process(plan: NodePlan, server: ServerSettings) -> ProcessSpec:
    """Specify the NATS server process, on its previous port if that is free."""
    directory = plan.run_dir / "bus"
    config = write_config(directory / "nats.conf", server)
    for leftover in directory.glob("*.ports"):  # of killed servers; a new server may get an old process id
        leftover.unlink()

    async def is_ready(pid: int) -> None:
        try:
            await wait_ready(directory, pid, login=server.login)
        except NoProgress as error:
            raise NotReady(str(error)) from error
        except BusUnavailable:
            await anyio.sleep_forever()  # it ended; the supervisor detects that

    fixed = server.port if server.port > 0 else None
    return ProcessSpec(
        name=BUS_PROCESS,
        command=(*server_command(config, directory), "--port", "{port}"),
        port=PortRequest(host=server.host, fixed=fixed, preferred=_last_port(plan.run_dir), kept=True),
        ready=WhenConfirmed(is_ready),
        ready_timeout_s=math.inf,  # unlimited while it reads its store
        probe=Greets(),
        unresponsive_after_s=plan.bus_unresponsive_after_s,
        tier=Tier.BUS,
        stop_timeout_s=BUS_STOP_S,
    )


def _last_port(run_dir: Path) -> int | None:
    path = run_dir / BUS_FILE
    port = path.read_text().strip().rpartition(":")[2] if path.exists() else ""
    return int(port) if port.isdigit() else None
