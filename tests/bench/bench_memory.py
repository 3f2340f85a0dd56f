"""The most memory of a rank in each phase of a train step, by layout and setting. Prints JSON.

Run: python -m tests.bench.bench_memory. Each case has processes of its own, on the CPU, in float32 unless it says
otherwise. MB that no file backs, above what rank 0 has once it has imported everything. `prepare` and `train` are peaks
of the largest rank, `at rest` is rank 0 between two steps, `offloaded` is rank 0 after the trainer's offload().
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.node.supervisor.ports import free_port
from tests.bench.bench_transformers import MODEL, TABLES, ragged_batch
from tests.bench.rig import rounded

MB: Final = 1e6
TIMEOUT_S: Final = 900.0
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8192}
DO = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, tuple[int, dict[str, Any], str]] = {  # ranks, the table trainer, the dtype
    "1": (1, {}, "float32"),
    "1, recompute": (1, {"megatron": FULL}, "float32"),
    "1, optimizer_cpu_offload": (1, {"optimizer": {"optimizer_cpu_offload": True}}, "float32"),
    "1, bf16": (1, {}, "bfloat16"),
    "TP2": (2, {"megatron": {"tensor_model_parallel_size": 2}}, "float32"),
    "PP2": (2, {"megatron": {"pipeline_model_parallel_size": 2}}, "float32"),
    "DP2": (2, {}, "float32"),
    "DP2+DO": (2, {"optimizer": DO}, "float32"),
    "DP2, bf16": (2, {}, "bfloat16"),
    "DP2+DO, bf16": (2, {"optimizer": DO}, "bfloat16"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.place is None:
        found = {name: measure(name, small=args.small) for name in args.case or CASES}
    else:
        found = be_rank(args.place, args.case[0], args.rank, args.port)
    print(json.dumps(found, indent=2))
    return 0


def measure(name: str, *, small: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = MODEL | ({"vocab_size": 256} if small else SHAPE)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        port = str(free_port())
        command = [sys.executable, "-m", "tests.bench.bench_memory", "--case", name, "--place", folder, "--port"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, port, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(CASES[name][0])
        ]
        try:
            first, *_ = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return rounded(json.loads(first))


def be_rank(place: Path, name: str, rank: int, port: int) -> dict[str, float]:
    """Two train steps and what they took; the second has the optimizer's state from its beginning."""
    import ctypes

    import torch
    import torch.distributed as dist

    from actors.trainer.commands import TrainerRank
    from actors.trainer.megatron.groups import Ranks
    from actors.trainer.megatron.memory import give_back
    from runtime.settings.topology import Topology
    from runtime.util.memory import own_anonymous_bytes

    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: tensors that go are given back
    world, trainer, dtype = CASES[name]
    vocabulary = json.loads((place / "config.json").read_text())["vocab_size"]
    tables = TABLES | {
        "model": {"hf_checkpoint": str(place), "random_init": True, "dtype": dtype},
        "trainer": {"device": "cpu", "num_processes": world, **trainer},
        "train": {"num_steps": 2, "max_tokens_per_gpu": 512},
    }
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    imported = own_anonymous_bytes()
    ranks = Ranks(rank=rank, world_size=world, store=store)
    engine = TrainerRank(msgspec.convert(tables, Topology), place, ranks)
    if rank:
        engine.follow()
        return {}
    engine.train(ragged_batch(0, vocabulary, 0.5))
    metrics = engine.train(ragged_batch(1, vocabulary, 0.5)).metrics
    give_back()
    found = {"at rest": own_anonymous_bytes()}
    engine.offload()
    give_back()
    found["offloaded"] = own_anonymous_bytes()
    engine.onload()
    engine.close()
    for phase in ("prepare", "train"):
        peaks = [size for key, size in metrics.items() if key.startswith(f"perf/peak_bytes/{phase}/")]
        found[phase] = max(peaks, default=imported)
    return {phase: (size - imported) / MB for phase, size in found.items()}


if __name__ == "__main__":
    sys.exit(main())
