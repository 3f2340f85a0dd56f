"""Main program of an actor process: `python -m actors.host RUN_DIR ROLE...`, started by the node daemon."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from actors.registry import ROLES, hosted
from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.process.logs import configure_logging
from runtime.process.main import run_process
from runtime.settings.topology import decode_topology
from runtime.util.exit_codes import EXIT_INPUT_ERROR
from runtime.util.import_path import user_folder_last


def main(argv: list[str] | None = None) -> int:
    """Run the actors and return the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="run directory with the resolved topology")
    parser.add_argument("roles", nargs="+", choices=ROLES, help="actors that share this process")
    args = parser.parse_args(argv)
    user_folder_last()
    try:
        topology = decode_topology((args.run_dir / TOPOLOGY_FILE).read_bytes())
        url = os.environ[BUS_URL_VARIABLE]
    except (OSError, KeyError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{args.run_dir}: {error!r}\n")
        return EXIT_INPUT_ERROR
    configure_logging("+".join(args.roles), topology.run.name)
    actors = [hosted(role, topology, args.run_dir, name=_instance_name(role)) for role in args.roles]
    return run_process(url, topology.run.name, actors, node=os.environ.get("PHYSARUM_NODE", "local"))


def _instance_name(role: str) -> str:
    """Instance name: the role, followed by the rank if the trainer has several ranks."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return role if alone else f"{role}.{os.environ['RANK']}"


def end(code: int) -> NoReturn:
    """Exit without interpreter teardown, which takes seconds with torch loaded. Everything is closed by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
