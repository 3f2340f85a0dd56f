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

from actors.observer.access import Address
from actors.observer.page import Page, dump_directory, follow, observed_of, served
from runtime.node.page_url import PageUrl
from runtime.node.reopen import find_run
from runtime.node.versions import versions_in
from runtime.process.main import spare_the_collector
from runtime.settings.tables.observe import PAGE_FILE
from runtime.util.exit_codes import EXIT_OK

RUN_DIR_VARIABLE: Final = "PHYSARUM_RUN_DIR"

log = logging.getLogger("page")


async def _serve(run_dir: Path, address: Address) -> None:
    run = find_run(str(run_dir), trust=True)
    url = PageUrl(run_dir / PAGE_FILE)
    observed, settings = observed_of(run)
    page = Page(observed, url.secret, settings, dump_directory(run, settings), partial(versions_in, run_dir))
    async with served(page, address.again(url.place)) as port, anyio.create_task_group() as tasks:
        tasks.start_soon(follow, run, observed, page, log.debug, log.info)
        url.write(address.url(port))
        try:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    break
            await page.close()
        finally:
            url.remove()
        tasks.cancel_scope.cancel()


def main(arguments: Sequence[str]) -> int:
    """Serve the page of the run in PHYSARUM_RUN_DIR at the address in the first argument."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    spare_the_collector()
    anyio.run(_serve, Path(os.environ[RUN_DIR_VARIABLE]), Address.of(arguments[0]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
