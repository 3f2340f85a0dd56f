"""Process of the listener for agents: serves until SIGTERM."""

import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import anyio
import msgspec

from actors.sessions.listener import ListenerSettings, listening
from runtime.process.heartbeat import pulsing
from runtime.process.main import RUN_DIR, spare_the_collector
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_OK
from runtime.util.files import write_atomically

PORT_FILE: Final = "sessions.port"  # in the directory of the run

log = logging.getLogger("sessions")


def _port_before(run_dir: Path, host: str) -> int:
    """Return the port of the listener before this one, where programs ask again; 0: there is none, or it is taken."""
    try:
        port = int((run_dir / PORT_FILE).read_text())
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return port
    except (OSError, ValueError, OverflowError):
        return 0


async def _serve(run_dir: Path, settings: ListenerSettings) -> None:
    port = settings.port or _port_before(run_dir, settings.host)
    async with pulsing(), listening(run_dir, msgspec.structs.replace(settings, port=port)) as url:
        write_atomically(run_dir / PORT_FILE, str(urlsplit(url).port).encode())
        log.info("agents reach the listener at %s", url)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break


def main(arguments: Sequence[str]) -> int:
    """Serve the run in PHYSARUM_RUN_DIR with the settings in the first argument, as JSON; it holds no secret."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    spare_the_collector()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each agent holds a connection
    try:
        settings = msgspec.json.decode(arguments[0], type=ListenerSettings)
    except msgspec.DecodeError as error:
        log.error("settings of the listener: %s", error)
        return EXIT_INPUT_ERROR
    anyio.run(_serve, Path(os.environ[RUN_DIR]), settings)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
