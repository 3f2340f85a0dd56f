"""Ranks as forks of one process: it imports torch and Megatron-core, which takes seconds of a core, once for all."""

import faulthandler
import gc
import multiprocessing
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

HOST: Final = "127.0.0.1"


def fork_ranks(main: Callable[..., None], *arguments: Any) -> None:
    """Run `main(rank, world, listener, *arguments)` as each rank; end with 1 as soon as one of them fails.

    The world's size is this program's first argument. The listener is for `meet`: it listens before any rank runs, so
    that no other program takes its port. No thread may run yet: forks do not have it.
    A single rank is no fork: torch uses no GPU in a fork of a process that has called `torch.cuda.is_available`.
    """
    world, listener = int(sys.argv[1]), socket.create_server((HOST, 0))
    gc.collect()
    gc.freeze()  # what was imported stays: each collection would walk it, for a fifth of a short training's time
    if world == 1:
        main(0, world, listener, *arguments)
        return
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=main, args=(rank, world, listener, *arguments), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for sentinel in wait(list(running)):  # run_ranks limits the time
            rank = running.pop(sentinel)
            ranks[rank].join()
            if ranks[rank].exitcode:
                sys.stderr.write(f"rank {rank} ended with exit code {ranks[rank].exitcode}\n")
                raise SystemExit(1)  # daemons end with this process


def meet(rank: int, world: int, listener: socket.socket) -> Any:
    """Join the store of all ranks; rank 0 serves it."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public

    port = listener.getsockname()[1]
    if rank:
        listener.close()
        return TCPStore(HOST, port, world)
    return TCPStore(HOST, port, world, is_master=True, master_listen_fd=listener.detach())


def begin_job(place: Path, rank: int, name: str, *, stuck_s: float) -> None:
    """Note the job of a rank for `run_ranks`. After `stuck_s` in it, the rank prints where it is, and goes on."""
    _file_of(place, rank).write_text(name)
    faulthandler.dump_traceback_later(stuck_s, file=sys.__stderr__)


def jobs_under_way(place: Path, world: int) -> str:
    """Describe the job that each rank began last. One that has less to do waits in its next job for the others."""
    files = ((rank, _file_of(place, rank)) for rank in range(world))
    return ", ".join(f"rank {rank} in {file.read_text()!r}" for rank, file in files if file.exists()) or "none"


def forget_jobs(place: Path, world: int) -> None:
    """Remove what earlier ranks noted."""
    for rank in range(world):
        _file_of(place, rank).unlink(missing_ok=True)


def _file_of(place: Path, rank: int) -> Path:
    return place / f"job of rank {rank}"
