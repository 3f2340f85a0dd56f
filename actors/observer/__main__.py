"""Process of a run's page, started with the run: serves it until SIGTERM, and writes its URL into the run directory."""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from actors.observer.page import Address, Page, follow, observed_of, served, stored_samples
from runtime.node.reopen import BUS_DIRECTORY, find_run
from runtime.node.versions import versions_in
from runtime.process.main import spare_the_collector
from runtime.settings.tables.observe import PAGE_FILE
from runtime.util.exit_codes import EXIT_OK
from runtime.util.files import write_atomically
from runtime.util.secrets import kept_secret

RUN_DIR_VARIABLE: Final = "PHYSARUM_RUN_DIR"
TOKEN_FILE: Final = "page.token"  # in the bus directory; the URL stays valid when the process is restarted

log = logging.getLogger("page")


async def _serve(run_dir: Path, address: Address) -> None:
    run = find_run(str(run_dir))
    token = kept_secret(run_dir / BUS_DIRECTORY / TOKEN_FILE).reveal()
    observed, settings = observed_of(run)
    stored = stored_samples(run, settings)
    page = Page(observed, token, settings, stored, partial(versions_in, run_dir))
    async with served(page, address) as port, anyio.create_task_group() as tasks:
        tasks.start_soon(follow, run, observed, page, log.debug, log.info, stored)
        write_atomically(run_dir / PAGE_FILE, f"{address.url(port)}/?token={token}\n".encode())
        try:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    break
        finally:
            (run_dir / PAGE_FILE).unlink(missing_ok=True)
        tasks.cancel_scope.cancel()


def main(arguments: Sequence[str]) -> int:
    """Serve the page of the run in PHYSARUM_RUN_DIR at the address in the first argument."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    spare_the_collector()
    anyio.run(_serve, Path(os.environ[RUN_DIR_VARIABLE]), Address.of(arguments[0]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
