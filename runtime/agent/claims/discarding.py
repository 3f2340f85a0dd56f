"""Starting over: a run's streams and its directory are discarded together, unless somebody is at work in them."""

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import anyio

from runtime.agent.claims.claim import Claim, RunClaimed, is_lock, nodes_in
from runtime.agent.claims.node_claim import NodeClaim, NodeClaimed, holders
from runtime.agent.claims.run_id import RUN_ID_FILE
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.limits import BusLimits
from runtime.failures import leaves
from runtime.secrets import Secret

BUS_LIMITS: Final = BusLimits()
CLIENT: Final = "agent-fresh"  # in the server's monitoring


class NotDiscarded(Exception):
    """Somebody is at work in the run, or its bus cannot be reached; the text says who."""


def discard(claim: Claim, run: str, nodes: Iterable[str], bus_url: Secret | None) -> None:
    """Delete a run's streams on a bus that is not its own, if there is one, and empty its claimed directory.

    All locks in the directory and the claims on all nodes are held meanwhile, so that no agent starts in between; the
    locks stay. May be killed anywhere and done again: until the end, what is left is refused by every other start.

    Args:
        nodes: of the topology; more may be in use.

    Raises:
        NotDiscarded: another agent is alive, or the bus cannot be reached. Nothing was discarded.
        OSError: a file cannot be deleted.
    """
    nodes = list(nodes)
    with ExitStack() as held:
        try:
            for node in {None, *nodes, *nodes_in(claim.run_dir)} - {claim.node}:
                held.enter_context(Claim.take(claim.run_dir, node=node))
        except RunClaimed as error:
            raise NotDiscarded(f"{error}; nothing was discarded") from error
        if bus_url is not None:
            _discard_streams(bus_url, run, nodes, claim.run_dir)
        _empty(claim.run_dir)


def _discard_streams(bus_url: Secret, run: str, nodes: list[str], run_dir: Path) -> None:
    async def delete() -> None:
        async with Bus.connect(bus_url.reveal(), run, name=CLIENT, limits=BUS_LIMITS) as bus:
            await delete_unclaimed(bus, nodes, run_dir)

    try:
        anyio.run(delete, backend="asyncio")
    except* (BusError, NodeClaimed) as errors:
        raise NotDiscarded(f"{leaves(errors)[0]}; nothing was discarded") from errors


async def delete_unclaimed(bus: Bus, nodes: Iterable[str], run_dir: Path) -> None:
    """Delete a run's streams and bucket once every node of it is claimed from here.

    An agent that starts meanwhile finds its node claimed, or the run's id gone.

    Raises:
        NodeClaimed: another agent renews its claim. One that died is waited for until its claim expires.
        BusError: the server refuses, or none answers.
    """
    if (await bus.holdings()).has_bucket:
        claimed = {node for node, _ in await holders(bus)}
        async with anyio.create_task_group() as tasks:
            for node in claimed.union(nodes):
                tasks.start_soon(_claim, bus, node, run_dir)
    await bus.delete_streams()


async def _claim(bus: Bus, node: str, run_dir: Path) -> None:
    await NodeClaim.take(bus, node, run_dir, incarnation=0)


def _empty(run_dir: Path) -> None:
    """Delete all but the locks; the run's id last, since without it the directory counts as new."""
    for path in sorted(run_dir.iterdir(), key=lambda path: path.name == RUN_ID_FILE):
        if is_lock(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
