"""Ranks as forks of one process: it imports torch and Megatron-core, which takes seconds of a core, once for all."""

import gc
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any


def fork_ranks(main: Callable[..., None], *arguments: Any) -> None:
    """Run `main(rank, world, port, *arguments)` as each rank; end with 1 as soon as one of them fails.

    The world's size and a port are this program's first arguments. No thread may run yet: forks do not have it.
    A single rank is no fork: torch uses no GPU in a fork of a process that has called `torch.cuda.is_available`.
    """
    world, port = int(sys.argv[1]), int(sys.argv[2])
    gc.collect()
    gc.freeze()  # what was imported stays: each collection would walk it, for a fifth of a short training's time
    if world == 1:
        main(0, world, port, *arguments)
        return
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=main, args=(rank, world, port, *arguments), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    running: dict[Any, Any] = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in wait(list(running)):  # run_ranks limits the time
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode:
                raise SystemExit(1)  # daemons end with this process
