"""Main program of an actor process: `python -m actors.host RUN_DIR ROLE...`, started by the node daemon."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

import msgspec
from msgspec.structs import replace

from runtime.util.imports import collecting_nothing, without

with collecting_nothing(), without("rich"):  # structlog would load it, for a terminal: a sixth of the imports
    from actors.registry import ROLES, Role, hosted
    from runtime.bus.addresses import BUS_CERTIFICATE_VARIABLE, BUS_URL_VARIABLE, INSTANCE_VARIABLE, NODE_VARIABLE
    from runtime.bus.bus import DEFAULT_LIMITS
    from runtime.bus.limits import over_network
    from runtime.node.claims.rundir import TOPOLOGY_FILE, TOPOLOGY_VARIABLE
    from runtime.process.logs import configure_logging
    from runtime.process.main import run_process
    from runtime.settings.placement import outage_s
    from runtime.settings.topology import SOLE_NODE, Topology, decode_topology
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
        topology = _topology_in(args.run_dir)
        url = os.environ[BUS_URL_VARIABLE]
    except (OSError, KeyError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{args.run_dir}: {error!r}\n")
        return EXIT_INPUT_ERROR
    configure_logging("+".join(args.roles), topology.run.name)
    actors = [hosted(role, topology, args.run_dir, name=_instance_name(role)) for role in args.roles]
    node = os.environ.get(NODE_VARIABLE, SOLE_NODE)
    certificate = os.environ.get(BUS_CERTIFICATE_VARIABLE)
    away_s = outage_s(topology, node)
    limits = over_network(
        replace(DEFAULT_LIMITS, connect_timeout_s=max(DEFAULT_LIMITS.connect_timeout_s, away_s)), away_s
    )  # it may start in an outage
    return run_process(url, topology.run.name, actors, node=node, certificate=certificate, limits=limits)


def preload(arguments: Sequence[str]) -> None:
    """Import what actors need, in the template that forks this process.

    Args:
        arguments: those of the process.
    """
    run_dir, *roles = arguments
    user_folder_last()
    topology = _topology_in(Path(run_dir))
    for role in roles:
        hosted(cast("Role", role), topology, Path(run_dir)).actor_type.preload()


def _topology_in(run_dir: Path) -> Topology:
    return decode_topology((run_dir / os.environ.get(TOPOLOGY_VARIABLE, TOPOLOGY_FILE)).read_bytes())


def _instance_name(role: str) -> str:
    """Instance name: the role, followed by its number or rank if it has several instances."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    number = os.environ.get(INSTANCE_VARIABLE) if alone else os.environ["RANK"]
    return role if number is None else f"{role}.{number}"


def end(code: int) -> NoReturn:
    """Exit without interpreter teardown, which takes seconds with torch loaded. Everything is closed by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
