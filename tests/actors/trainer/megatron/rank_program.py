"""One rank of a trainer, for tests of several: `rank_program.py DIRECTORY RANK WORLD PORT`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from actors.trainer.commands import TrainerRank
from actors.trainer.megatron import cpu
from actors.trainer.megatron.groups import Ranks
from runtime.settings.topology import decode_topology
from tests.actors.trainer.tiny import random_batch


def main(directory: Path, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    topology = decode_topology((directory / "topology.json").read_bytes())
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0) if world > 1 else None
    with cpu.CpuMode():
        engine = TrainerRank(topology, directory, Ranks(rank=rank, world_size=world, store=store))
        if rank == 0:
            lead(engine, directory)
        else:
            engine.follow()


def lead(engine: TrainerRank, directory: Path) -> None:
    """Two train steps, then two again from the checkpoint after the first."""
    engine.resume()
    results = [engine.train(random_batch(0)).metrics]
    if not (directory / "checkpoints").exists():
        engine.save(step=1, incarnation=1)
    results.append(engine.train(random_batch(1)).metrics)
    assert engine.resume() == 1
    results.append(engine.train(random_batch(1)).metrics)
    published = engine.publish(1, confirmed=0)
    engine.close()
    assert published.probe is not None
    probe = [list(column) for column in (published.probe.token_ids, published.probe.log_probs)]
    result = {"metrics": results, "path": str(published.path), "probe": probe}
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
