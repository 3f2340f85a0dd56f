"""Rendezvous of the trainer's ranks: rank 0's TCP store, whose address is in the run's KV bucket."""

import os
import socket
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from runtime.bus.addresses import BUS_URL_VARIABLE, Address
from runtime.bus.bus import Bus
from runtime.settings.placement import num_ranks
from runtime.settings.topology import Topology
from runtime.util.retrying import FOR_EVER, retried

KEY: Final = "address.trainer.rendezvous.0"
CONNECT_TIMEOUT: Final = timedelta(seconds=10)
JOIN_TIMEOUT_S: Final = 300.0


class _NoAddress(Exception):
    """Rank 0 has not published its store's address yet."""


def own_rank(topology: Topology) -> tuple[int, int]:
    """Read this process's rank and its GPU's index on the node, as the node daemon set them.

    Raises:
        ValueError: WORLD_SIZE differs from the topology's number of trainer ranks.
    """
    world = num_ranks(topology.trainer)
    declared = int(os.environ.get("WORLD_SIZE", world))
    if declared != world:
        raise ValueError(f"WORLD_SIZE = {declared}, but the topology has {world} trainer ranks")
    return int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))


async def meet(topology: Topology, bus: Bus, rank: int) -> Any:
    """Create or join the store that all ranks share. Returns None if there is only one rank.

    Raises:
        TimeoutError: rank 0 was not found within JOIN_TIMEOUT_S.
    """
    world = num_ranks(topology.trainer)
    if world == 1:
        return None
    if rank == 0:
        host = own_address(topology)
        store = await anyio.to_thread.run_sync(_make_store, host, 0, world, True)
        await bus.kv.put(KEY, Address(url=f"tcp://{host}:{store.port}"))
        return store
    with anyio.fail_after(JOIN_TIMEOUT_S):  # rank 0 may restart and get another address
        return await retried(lambda: _join(bus, world), on=(OSError, RuntimeError, _NoAddress), times=FOR_EVER)


async def _join(bus: Bus, world: int) -> Any:
    """Join rank 0's store.

    Raises:
        _NoAddress: rank 0 has published no address.
        OSError: nothing listens at the published address.
        RuntimeError: torch's DistError; no store answers there.
    """
    entry = await bus.kv.get(KEY, Address)
    if entry is None or entry.value is None:
        raise _NoAddress
    host, _, port = entry.value.url.removeprefix("tcp://").rpartition(":")
    await (await anyio.connect_tcp(host, int(port))).aclose()  # torch would wait CONNECT_TIMEOUT for a dead address
    return await anyio.to_thread.run_sync(_make_store, host, int(port), world, False)


def _make_store(host: str, port: int, world: int, is_master: bool) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public

    return TCPStore(host, port, world, is_master, timeout=CONNECT_TIMEOUT, wait_for_workers=False)


def own_address(topology: Topology) -> str:
    """Return an address at which other ranks reach this process."""
    if len(topology.nodes) == 1:
        return "127.0.0.1"
    server = urlsplit(os.environ[BUS_URL_VARIABLE])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server.hostname, server.port or 4222))  # sends nothing; the kernel selects the route
        return probe.getsockname()[0]
