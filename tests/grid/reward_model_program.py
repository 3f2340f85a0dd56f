"""The ranks of a reward model that continues in one layout after the other: `WORLD DIRECTORY`.

Each layout starts from the checkpoint of the one before, trains a step on pairs, evaluates others and saves.
"""

import json
import sys
from pathlib import Path
from socket import socket
from typing import Any

import torch
import torch.distributed as dist

from actors.trainer.commands import TrainerRank
from actors.trainer.megatron.groups import Ranks
from runtime.settings.topology import decode_topology
from tests.actors.trainer.tiny import pairs
from tests.grid.forked import begin_job, fork_ranks, meet
from tests.support.checkpoints import save

STUCK_S = 120.0
HELD_OUT = pairs(100)


def lead(rank: TrainerRank, incarnation: int) -> dict[str, float]:
    """Train a step and save; return its metrics and those of the evaluation after it."""
    step = rank.resume()
    metrics = rank.train(pairs(step)).metrics
    evaluated = rank.evaluate(HELD_OUT)
    save(rank, step=step + 1, incarnation=incarnation)
    rank.close()
    found = {name: value for name, value in metrics.items() if name.startswith("train/")}
    return found | {f"evaluated {name}": value for name, value in evaluated.sums.items()}


def main(rank: int, world: int, listener: socket, directory: Path) -> None:
    torch.set_num_threads(1)
    jobs: list[dict[str, Any]] = json.loads((directory / "jobs.json").read_text())
    store = meet(rank, world, listener)
    found: list[dict[str, float]] = []
    for number, job in enumerate(jobs):
        begin_job(directory, rank, f"{number}: {job['run']}, world {job['world']}", stuck_s=STUCK_S)
        if rank >= job["world"]:
            continue
        topology = decode_topology(json.dumps(job["topology"]).encode())
        ranks = Ranks(rank=rank, world_size=job["world"], store=dist.PrefixStore(str(number), store))
        own = TrainerRank(topology, directory / job["run"], ranks)
        if rank:
            own.follow()
        else:
            found.append(lead(own, number + 1))
    if rank == 0:
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    fork_ranks(main, Path(sys.argv[2]))
