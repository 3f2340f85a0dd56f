"""The ranks that load quantized models in one layout after the other: `WORLD DIRECTORY`.

Each rank compares the tensors that it loaded with its shares of the numbers by definition, to the bit.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from actors.trainer.megatron import groups
from actors.trainer.megatron.build import build_chunks
from actors.trainer.megatron.config import DTYPES, transformer_config
from actors.trainer.megatron.imports import quiet
from actors.trainer.models import dequantize
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.files import WeightSource, file_source
from actors.trainer.models.shapes import check_weights
from actors.trainer.models.sharding import load_weights, tensors_of
from runtime.models.safetensors import SINGLE_FILE
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.measured import TensorPeak
from tests.build.model import mapping_source
from tests.grid.forked import begin_job, fork_ranks, meet

CPU = torch.device("cpu")
STUCK_S = 60.0
STRIP = 1 << 12  # numbers that are dequantized at once
PER_NUMBER = 64  # bytes that they may take, and positions of RoPE and the like beside the model


def built(hf: HfConfig, layout: MegatronConfig, dtype: str) -> Any:
    with quiet():
        (model,) = build_chunks(hf, transformer_config(hf, layout, dtype=DTYPES[dtype]))
    return model


def loaded(hf: HfConfig, layout: MegatronConfig, dtype: str, source: WeightSource) -> tuple[Any, dict[str, int]]:
    """Build and load a rank's model; return it, and the bytes that this took."""
    with TensorPeak() as peak:
        model = built(hf, layout, dtype)
        load_weights(model, hf, source)
    sizes = sorted((tensor.nbytes for tensor in (*model.parameters(), *model.buffers())), reverse=True)
    return model, {"peak": peak.bytes, "own": sum(sizes), "largest": sum(sizes[:2]), "strip": STRIP * PER_NUMBER}


def differing(model: Any, other: Any) -> Iterator[str]:
    """Yield the names of tensors that are not equal to the bit."""
    for (name, own), (_, expected) in zip(tensors_of(model), tensors_of(other), strict=True):
        if not torch.equal(bits(own), bits(expected)):
            yield name


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def found_by(rank: int, place: Path, layout: MegatronConfig, dtype: str) -> dict[str, Any]:
    """Load a model from quantized files and from plain ones, and compare both with the numbers of the definition."""
    hf, numbers = read_hf_config(place / "quantized"), load_file(place / "plain" / SINGLE_FILE)
    check_weights(place / "quantized", hf)
    expected = built(hf, layout, dtype)
    load_weights(expected, hf, mapping_source(numbers))
    found: dict[str, Any] = {"rank": rank, "tensors": len(tensors_of(expected))}
    for form in ("quantized", "plain"):
        model, memory = loaded(hf, layout, dtype, file_source(place / form, DTYPES[dtype]))
        found[form] = memory | {"differing": [*differing(model, expected)]}
    return found


@torch.no_grad()
def main(rank: int, world: int, listener: socket, directory: Path) -> None:
    torch.set_num_threads(1)
    dequantize.STRIP = STRIP
    jobs: list[dict[str, Any]] = json.loads((directory / "jobs.json").read_text())
    store, found = meet(rank, world, listener), dict[str, Any]()
    for number, job in enumerate(jobs):
        layout = MegatronConfig(**job["layout"])
        ranks = groups.Ranks(rank=rank, world_size=world, store=dist.PrefixStore(str(number), store))
        groups.join(ranks, layout, CPU, seed=1)
        for model in job["models"]:
            for dtype in DTYPES:
                name = f"{model}, {job['name']}, {dtype}"
                begin_job(directory, rank, name, stuck_s=STUCK_S)
                found[name] = found_by(rank, directory / model, layout, dtype)
        dist.barrier()
        groups.leave()
    (directory / f"found by {rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    fork_ranks(main, Path(sys.argv[2]))
