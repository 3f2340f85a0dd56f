"""A model of the size of Qwen3-0.6B with random weights, batches for it, and how much arithmetic a step of it is."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from actors.trainer.models.config import HfConfig
from runtime.settings.topology import Topology
from tests.bench.bench_transformers import MODEL, TABLES, ragged_batch

CONFIG: Final = MODEL | {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}
TINY: Final = CONFIG | {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
# dense bfloat16 operations a second, by what nvidia-smi calls the GPU; makers' data sheets, without sparsity
PEAKS: Final = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12
}  # fmt: skip


class Work(NamedTuple):
    """What is trained."""

    topology: Topology
    batches: list[Any]


def work(folder: Path, device: str, *, tiny: bool, steps: int, megatron: dict[str, Any] | None = None) -> Work:
    """The model in a directory, and random samples: 64 of 256 to 1,792 tokens, of which the last half trains."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY if tiny else CONFIG))
    tables = TABLES | {
        "model": {
            "hf_checkpoint": str(folder),
            "random_init": True,
            "dtype": "float32" if device == "cpu" else "bfloat16",
        },
        "trainer": {"device": device, "gpus": None if device == "cpu" else "local:0", "megatron": megatron or {}},
        "nodes": {"local": {"address": "127.0.0.1", "gpus": 0 if device == "cpu" else 1}},
        "train": {"num_steps": steps, "max_tokens_per_gpu": 64 if tiny else 8192},
    }
    sizes = {"pairs": 2, "shortest": 8, "longest": 24} if tiny else {"pairs": 32, "shortest": 256, "longest": 1792}
    vocabulary = (TINY if tiny else CONFIG)["vocab_size"]
    return Work(
        msgspec.convert(tables, Topology), [ragged_batch(step, vocabulary, 0.5, **sizes) for step in range(steps)]
    )


def operations(model: HfConfig, lengths: Sequence[int], num_trained: int) -> float:
    """Floating-point operations of a train step: matrix products forward and twice that backward, nothing twice.

    Args:
        model: a dense one.
        lengths: of the samples, in tokens.
        num_trained: tokens whose logits are needed.
    """
    attention = model.attention
    query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    layer = model.hidden_size * (2 * query + 2 * key + 3 * model.intermediate_size)
    tokens = 2 * layer * model.num_layers * sum(lengths)
    seen = sum(length * (length + 1) / 2 for length in lengths)  # pairs of positions
    pairs = 2 * 2 * query * model.num_layers * seen
    head = 2 * model.hidden_size * model.vocab_size * num_trained
    return 3 * (tokens + pairs + head)


def peak_of(name: str) -> float | None:
    """Operations a second of a GPU; none: not known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)
