"""How much memory a rank needs to save and to load a checkpoint: `saving_peaks DIRECTORY RANK WORLD PORT`. Prints JSON.

Data-parallel ranks with the distributed optimizer, each in a fresh process: in others the allocator keeps memory.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from actors.trainer.megatron import groups
from actors.trainer.megatron.checkpoint import load_checkpoint
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from tests.actors.trainer.measured import Peak
from tests.actors.trainer.tiny import TINY, random_batch
from tests.build.topology import trainer_topology
from tests.support.checkpoints import save_checkpoint

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "vocab_size": 7168}
LARGE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.02}


def main(place: Path, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: tensors that go are given back
    directory = place / f"model of {rank}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY | LARGE))
    trainer = {"num_processes": world, "optimizer": {"use_distributed_optimizer": True}}
    topology = trainer_topology(directory, place, trainer=trainer)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    groups.join(
        groups.Ranks(rank=rank, world_size=world, store=store), topology.trainer.megatron, torch.device("cpu"), seed=1
    )
    replica = Replica(topology, torch.device("cpu"))
    TrainStep(topology, replica)(random_batch())
    begin = time.perf_counter()
    with Peak() as save:
        path = save_checkpoint(replica, place / "checkpoints", step=1, incarnation=1)
    took_s = time.perf_counter() - begin
    with Peak() as load:
        load_checkpoint(replica, path)
    parameters = sum(parameter.numel() for chunk in replica.chunks for parameter in chunk.parameters())
    written = sum(file.stat().st_size for file in path.glob(f"__{rank}_*"))
    found = {"parameters": parameters, "save": save.bytes, "load": load.bytes, "written": written, "took_s": took_s}
    sys.stdout.write(json.dumps(found))
    dist.barrier()
    groups.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
