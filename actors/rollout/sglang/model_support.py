"""Models that SGLang 0.5.23 cannot serve, although the trainer can train them.

In FP8 (`layers/quantization/fp8.py`), SGLang on one rank reads blocks of 128 for any shape, except for projections
that it fuses (query, key and value; gate and up; those of experts). Their rows, and an expert's inner size, must be
multiples of 128. With several ranks this applies to each rank's shard of rows and columns.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from runtime.models.directory import CONFIG, read_json
from runtime.models.family import Family
from runtime.models.fp8 import BLOCK, is_quantized
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import sglang_arguments

_HEADS: Final = {
    "q_proj": "num_attention_heads x head_dim",
    "k_proj": "num_key_value_heads x head_dim",
    "v_proj": "num_key_value_heads x head_dim",
}
_JOINED: Final = ("gate_proj", "up_proj")
_BY_ROWS: Final = ("q_b_proj", "kv_b_proj")  # not fused, sharded by rows
_BY_COLUMNS: Final = ("o_proj", "down_proj")


def ignored_keys_refusal(directory: Path, family: Family) -> str | None:
    """Return why SGLang serves another model: it ignores keys of config.json, and assumes a value of them.

    Args:
        directory: of the model.
        family: its declaration, which has these keys.
    """
    config, keys = directory / CONFIG, read_json(directory, CONFIG, dict[str, Any])
    for key, assumed in family.ignored_by_sglang.items():
        if (found := keys.get(key, assumed) or assumed) != assumed:
            return f"{config}: {key} = {found}, which SGLang ignores: it builds another model; allowed: {assumed}"
    return None


def parallel_sizes(engine: EngineConfig) -> tuple[int, int]:
    """Return the ranks of an engine of a pool, and the ranks over which its experts are distributed."""
    arguments = {argument.name: argument.value for argument in sglang_arguments(engine)}
    ranks = arguments.get("tp_size") or arguments.get("tensor_parallel_size") or engine.num_gpus_per_engine
    return ranks, arguments.get("ep_size") or arguments.get("expert_parallel_size") or 1


def fp8_refusal(
    shapes: Mapping[str, Sequence[int]], head_dim: int, *, tp_size: int = 1, ep_size: int = 1
) -> str | None:
    """Return why SGLang cannot read a model in blocks, with the unsupported size; None if it can.

    Args:
        shapes: of all tensors of the model by name.
        head_dim: of one head. With more ranks than key-value heads, each rank has a whole head.
        tp_size: ranks of an engine.
        ep_size: ranks that the whole experts are distributed over.
    """
    for name, shape in shapes.items():
        if is_quantized(name, shape):
            ranks = tp_size // ep_size if ".experts." in name else tp_size
            side, of_rank = _cut(name.split(".")[-2], shape, head_dim, ranks)
            if of_rank % BLOCK:
                part = f", {of_rank} on each of {ranks} ranks" if ranks > 1 else ""
                return f"{_key(name)} = {side} of the model{part}: SGLang reads FP8 in multiples of {BLOCK} there"
    return None


def _cut(module: str, shape: Sequence[int], head_dim: int, ranks: int) -> tuple[int, int]:
    """Return the side of a matrix that must be a multiple of the block, and a rank's shard of it; 0, 0: neither."""
    rows, columns = shape
    if module in _HEADS:
        return rows, max(rows // ranks, head_dim)
    if module in _JOINED or (module in _BY_ROWS and ranks > 1):
        return rows, rows // ranks
    return (columns, columns // ranks) if module in _BY_COLUMNS and ranks > 1 else (0, 0)


def _key(name: str) -> str:
    """Return the config.json key that determines a side, or the tensor's name."""
    module = name.split(".")[-2]
    if ".experts." in name:
        return "moe_intermediate_size"
    if module in _HEADS:
        return _HEADS[module]
    return name if ".shared_experts." in name or module in (*_BY_ROWS, "o_proj") else "intermediate_size"
