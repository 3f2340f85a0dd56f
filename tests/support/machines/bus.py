"""The real nats-server in a machine, with a user and a password, on the machine's address and a fixed port."""

from pathlib import Path
from typing import Final

from runtime.bus.nats.server import ServerSettings, render_config, server_command
from runtime.util.secrets import Login, Secret, with_login
from tests.support.machines.machine import Machine, Process

PORT: Final = 4222
PLACE: Final = Path("/tmp/nats")  # on the machine's own disk; a server started again finds its store
LOGIN: Final = Login(user="node", password=Secret("of-the-test"))
READY: Final = "Server is ready"
READY_S: Final = 30.0


def start_nats(machine: Machine, *, port: int = PORT, six: bool = False) -> tuple[Process, str]:
    """Start nats-server in a machine and wait until it accepts clients. Return it, and its URL with the login."""
    host = machine.address6 if six else machine.address
    settings = ServerSettings(store_dir=PLACE / "store", host=host, port=port, login=LOGIN)
    machine.path(PLACE).mkdir(exist_ok=True)
    machine.path(PLACE / "nats.conf").write_text(render_config(settings))
    process = machine.start(server_command(PLACE / "nats.conf", PLACE))
    process.wait_for(READY, READY_S)
    return process, with_login(f"nats://{f'[{host}]' if six else host}:{port}", LOGIN)
