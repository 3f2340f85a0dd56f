"""Rendezvous of the trainer's ranks: rank 0's TCP store, whose address is in the run's KV bucket."""

import os
import socket
from datetime import timedelta
from typing import Any, Final

import anyio
import anyio.to_thread

from runtime.bus.addresses import ADDRESS_VARIABLE, START_VARIABLE, Address, host_port, split_host_port
from runtime.bus.bus import Bus
from runtime.settings.placement import LOOPBACK, num_trainer_processes
from runtime.settings.topology import Topology
from runtime.util.retrying import FOR_EVER, retried

KEY: Final = "address.trainer.rendezvous.0"
CONNECT_TIMEOUT: Final = timedelta(seconds=10)
JOIN_TIMEOUT_S: Final = 300.0
BACKLOG: Final = 2048  # connections of ranks that wait to be accepted, as in torch


class _NoAddress(Exception):
    """Rank 0 has not published its store's address yet."""


def own_rank(topology: Topology) -> tuple[int, int]:
    """Read this process's rank and its GPU's index on the node, as the node daemon set them.

    Raises:
        ValueError: WORLD_SIZE differs from the topology's number of trainer ranks.
    """
    world = num_trainer_processes(topology)
    declared = int(os.environ.get("WORLD_SIZE", world))
    if declared != world:
        raise ValueError(f"WORLD_SIZE = {declared}, but the topology has {world} trainer ranks")
    return int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))


async def meet(topology: Topology, bus: Bus, rank: int) -> Any:
    """Create or join the store that all ranks share. Returns None if there is only one rank.

    Raises:
        TimeoutError: rank 0 was not found within JOIN_TIMEOUT_S.
    """
    world = num_trainer_processes(topology)
    if world == 1:
        return None
    if rank == 0:
        host = own_address()
        store = await anyio.to_thread.run_sync(_make_store, host, 0, world, True)
        await bus.kv.put(KEY, Address(url=f"tcp://{host_port(host, store.port)}", start=_own_start()))
        return store
    with anyio.fail_after(JOIN_TIMEOUT_S):  # rank 0 may restart and get another address
        return await retried(lambda: _join(bus, world), on=(OSError, RuntimeError, _NoAddress), times=FOR_EVER)


async def _join(bus: Bus, world: int) -> Any:
    """Connect to rank 0's TCP store.

    Raises:
        _NoAddress: rank 0 has published no address in this start of the ranks.
        OSError: nothing listens at the published address, or nothing answers there within CONNECT_TIMEOUT.
        RuntimeError: torch's DistError; no store answers there.
    """
    entry = await bus.kv.get(KEY, Address)
    if entry is None or entry.value is None or entry.value.start != _own_start():
        raise _NoAddress
    host, port = split_host_port(entry.value.url)
    with anyio.fail_after(CONNECT_TIMEOUT.total_seconds()):
        await (await anyio.connect_tcp(host, port)).aclose()  # torch would wait CONNECT_TIMEOUT for a closed port
    return await anyio.to_thread.run_sync(_make_store, host, port, world, False)


def _own_start() -> str:
    return os.environ.get(START_VARIABLE, "")


def _make_store(host: str, port: int, world: int, is_master: bool) -> Any:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public

    if not is_master:
        return TCPStore(host, port, world, False, timeout=CONNECT_TIMEOUT, wait_for_workers=False)
    listener = listening_at(host)
    return TCPStore(
        host,
        listener.getsockname()[1],
        world,
        True,
        timeout=CONNECT_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def listening_at(host: str) -> socket.socket:
    """Listen at an address, for a store: torch alone would listen at all addresses of the machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)


def own_address() -> str:
    """Return the address of this node, at which other processes reach this one."""
    return os.environ.get(ADDRESS_VARIABLE, LOOPBACK)
