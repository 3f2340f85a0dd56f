"""The NATS server of a run's node: its process, and the file that invites other nodes to it."""

import math
from pathlib import Path
from typing import Final

import anyio

from runtime.bus.addresses import host_port, split_host_port
from runtime.bus.errors import BusUnavailable
from runtime.bus.nats.server import NoProgress, ServerSettings, server_command, wait_ready, write_config
from runtime.node.claims.rundir import BUS_FILE
from runtime.node.join import JOIN_FILE, Join, write_join
from runtime.node.node_plan import NodePlan
from runtime.settings.processes import Greets, NotReady, PortRequest, ProcessSpec, Tier, WhenConfirmed
from runtime.util.secrets import Secret

BUS_PROCESS: Final = "nats-server"
BUS_STOP_S: Final = 1.5


def bus_process(plan: NodePlan, server: ServerSettings) -> ProcessSpec:
    """Specify the NATS server process, on its previous port if that is free."""
    directory = plan.run_dir / "bus"
    config = write_config(directory / "nats.conf", server)
    for leftover in directory.glob("*.ports"):  # of killed servers; a new server may get an old process id
        leftover.unlink()

    async def is_ready(pid: int) -> None:
        try:
            certificate = None if server.certificate is None else server.certificate.pem()
            await wait_ready(directory, pid, login=server.login, certificate=certificate)
        except NoProgress as error:
            raise NotReady(str(error)) from error
        except BusUnavailable:
            await anyio.sleep_forever()  # it ended; the supervisor detects that

    fixed = server.port if server.port > 0 else None
    return ProcessSpec(
        name=BUS_PROCESS,
        command=(*server_command(config, directory), "--port", "{port}"),
        port=PortRequest(fixed=fixed, key="bus.port", preferred=_last_port(plan.run_dir), kept=True),
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


def invite(plan: NodePlan, url: Secret, certificate: str | None, *, run_id: str, incarnation: int) -> None:
    """Write the join file, if the server accepts other nodes.

    Args:
        plan: of this node.
        url: of its server.
        certificate: PEM certificate of its server.
        run_id: id of the run.
        incarnation: of this node daemon.

    Raises:
        OSError: it cannot be written.
    """
    login = None if plan.server is None else plan.server.login
    if plan.address is None or login is None:
        return
    _, port = split_host_port(url.reveal())
    join = Join(
        run=plan.run,
        run_id=run_id,
        incarnation=incarnation,
        url=f"tls://{host_port(plan.address.announced, port)}",
        user=login.user or "",
        password=login.password.reveal(),
        certificate=certificate or "",
    )
    write_join(plan.run_dir / JOIN_FILE, join)
