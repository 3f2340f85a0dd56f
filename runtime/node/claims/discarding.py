"""Starting over: discards a run's streams and directory together, unless a daemon uses them."""

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import anyio

from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.limits import BusLimits
from runtime.node.claims.claim import Claim, RunClaimed, is_lock, nodes_in
from runtime.node.claims.node_claim import NodeClaim, NodeClaimed, holders
from runtime.node.claims.run_id import RUN_ID_FILE
from runtime.util.errors import flatten
from runtime.util.secrets import Secret

BUS_LIMITS: Final = BusLimits()
CLIENT: Final = "daemon-fresh"  # client name in the server's monitoring


class NotDiscarded(Exception):
    """Another daemon uses the run, or its bus cannot be reached. The text has the details."""


def discard(
    claim: Claim, run: str, nodes: Iterable[str], bus_url: Secret | None, *, bus_limits: BusLimits = BUS_LIMITS
) -> None:
    """Delete a run's streams on an external bus, if it uses one, and empty its claimed directory.

    Meanwhile all locks in the directory and the claims on all nodes are held, so that no daemon starts; the locks stay.
    It may be killed at any point and repeated: until it is complete, every other start refuses the remains.

    Args:
        claim: held claim on the run directory.
        run: name of the run.
        nodes: nodes of the topology; the run may have used more.
        bus_url: external bus; None: the run has its own.
        bus_limits: deadlines and buffer bounds of the connection to the external bus.

    Raises:
        NotDiscarded: another daemon is alive, or the bus cannot be reached. Nothing was discarded.
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
            _discard_streams(bus_url, run, nodes, claim.run_dir, bus_limits)
        _empty(claim.run_dir)


def _discard_streams(bus_url: Secret, run: str, nodes: list[str], run_dir: Path, bus_limits: BusLimits) -> None:
    async def delete() -> None:
        async with Bus.connect(bus_url.reveal(), run, name=CLIENT, limits=bus_limits) as bus:
            await delete_unclaimed(bus, nodes, run_dir)

    try:
        anyio.run(delete, backend="asyncio")
    except* (BusError, NodeClaimed) as errors:
        raise NotDiscarded(f"{flatten(errors)[0]}; nothing was discarded") from errors


async def delete_unclaimed(bus: Bus, nodes: Iterable[str], run_dir: Path) -> None:
    """Claim every node of a run, then delete its streams and bucket.

    A daemon that starts meanwhile finds its node claimed, or the run id deleted.

    Raises:
        NodeClaimed: another daemon renews its claim. The claim of a dead daemon is waited for until it expires.
        BusError: the server refuses, or no server answers.
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
    """Delete all but the locks. The run id is last: without it the directory counts as new."""
    for path in sorted(run_dir.iterdir(), key=lambda path: path.name == RUN_ID_FILE):
        if is_lock(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
