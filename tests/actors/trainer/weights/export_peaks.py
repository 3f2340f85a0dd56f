"""How much memory an export takes, in a fresh process: in others the allocator has memory of its own. Prints JSON."""

import ctypes
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from actors.trainer.megatron import groups
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.files import TensorShard
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.weights.export import copied, weight_thread
from actors.trainer.weights.files import export_to_files
from actors.trainer.weights.gathering import Part
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.measured import Peak
from tests.actors.trainer.tiny import TINY
from tests.build.model import rank_part

CPU = torch.device("cpu")
MB = 1 << 20
BUCKET = 4 * MB
COPY_BUCKET = 32 * MB  # of the largest tensor
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 16384}
LARGE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
LARGEST = 16384 * 512 * 4


def parts_of(hf: HfConfig, ranks: int) -> list[Part]:
    """Megatron's tensors of a rank, the embedding first and last."""
    shapes = hf_shapes(hf)

    def drawn(name: str, cut: TensorShard | None = None) -> torch.Tensor:
        whole = torch.full(shapes[name], 0.5)
        return whole if cut is None else cut.of(whole)

    dims = {"embedding.word_embeddings.weight": 0}
    for layer in range(hf.num_layers):
        prefix = f"decoder.layers.{layer}."
        dims |= {f"{prefix}self_attention.linear_qkv.weight": 0, f"{prefix}self_attention.linear_proj.weight": 1}
        dims |= {f"{prefix}mlp.linear_fc1.weight": 0, f"{prefix}mlp.linear_fc2.weight": 1}
    dims["output_layer.weight"] = 0
    return [
        Part(
            (name,),
            rank_part(name, hf, drawn, TensorShard(dim, 0, ranks) if ranks > 1 else None),
            dim,
            ranks,
            None,
        )
        for name, dim in dims.items()
    ]


def gather(own: torch.Tensor, collected: list[torch.Tensor], **_options: object) -> None:
    """Each other rank has the same part as this one."""
    for tensor in collected:
        tensor.copy_(own)


def peak_of(hf: HfConfig, out: Path, ranks: int, bucket_bytes: int, *, copies: bool) -> dict[str, float]:
    parts = parts_of(hf, ranks)
    own = sum(part.tensor.nbytes for part in parts)
    out.mkdir()
    ranks_of = mock.patch.object(dist, "get_process_group_ranks", return_value=list(range(ranks)))
    with ranks_of, mock.patch.object(dist, "gather", gather), Peak() as peak:
        taken = copied(parts) if copies else parts
        export_to_files(taken, hf, out, weight_thread(), device=CPU, bucket_bytes=bucket_bytes).finish()
    written = sum(file.stat().st_size for file in out.iterdir())
    return {"peak": peak.bytes / MB, "own": own / MB, "written": written / MB}


def main(place: Path) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: tensors that go are given back
    (place / "config.json").write_text(json.dumps(TINY | LARGE))
    hf = read_hf_config(place)
    groups.join(groups.Ranks(), MegatronConfig(), CPU, seed=1)
    found = {
        f"{kind} {ranks}": peak_of(hf, place / f"{kind} {ranks}", ranks, size, copies=kind == "copy")
        for kind, size in (("stream", BUCKET), ("copy", COPY_BUCKET))
        for ranks in (1, 2)
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
