"""FP8 checkpoints in Hugging Face's format: quantized matrices, config.json, and the shapes that readers support.

The scheme is that of DeepSeek-V3 and Qwen3-FP8. A matrix `X.weight` [R, C] is divided into blocks of 128 x 128; the
last block of a side may be smaller. The matrix is stored as float8_e4m3fn. `X.weight_scale_inv`, float32
[ceil(R / 128), ceil(C / 128)], has the factor of each block. The matrices of layers are quantized, those of experts
too. Embeddings, lm_head, norms, biases and routers stay bfloat16; a router's `e_score_correction_bias` is float32.

Supported shapes (SGLang 0.5.23 `layers/quantization/fp8.py`, transformers 5.23 `Fp8Dequantize`):

- SGLang on one rank reads blocks of 128 for any shape, except for projections that it fuses (query, key and value;
  gate and up; those of experts). Their rows, and an expert's inner size, must be multiples of 128. With several ranks
  this applies to each rank's shard of rows and columns. `sglang_refuses` finds unsupported shapes.
- transformers does not use the 128: it divides each side evenly by the number of scales. The result is the same if a
  side is at most 128, or a multiple of it. It refuses other sides that do not divide evenly (576 by 5). It
  reads the rest WRONG without an error (192 by 2: 96 and 96, not 128 and 64). `transformers_reads` checks a shape.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

BLOCK: Final = 128
_IN_LAYER: Final = re.compile(r"(?:.+\.)?layers\.\d+\.(?P<module>.+)\.weight")
_NOT_QUANTIZED: Final = {  # modules of a layer, by the last part of the name: routers, and those of MTP
    "gate",
    "router",
    "shared_expert_gate",
    "embed_tokens",
    "eh_proj",
    "head",
}
_HEADS: Final = {
    "q_proj": "num_attention_heads x head_dim",
    "k_proj": "num_key_value_heads x head_dim",
    "v_proj": "num_key_value_heads x head_dim",
}
_JOINED: Final = ("gate_proj", "up_proj")
_BY_ROWS: Final = ("q_b_proj", "kv_b_proj")  # not fused, sharded by rows
_BY_COLUMNS: Final = ("o_proj", "down_proj")


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Return whether an FP8 checkpoint stores this tensor in blocks."""
    match = _IN_LAYER.fullmatch(name)
    return match is not None and len(shape) == 2 and match["module"].rpartition(".")[2] not in _NOT_QUANTIZED


def scale_name(name: str) -> str:
    """Return the name of a matrix's scales."""
    return f"{name}_scale_inv"


def grid_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each side of a matrix."""
    return tuple(-(-side // BLOCK) for side in shape)


def quantization_config(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json, which marks an FP8 checkpoint.

    Args:
        shapes: of all tensors of the model by name, before or after the cast.
    """
    kept = {
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and not is_quantized(name, shape)
    }
    return SERVED | {"modules_to_not_convert": sorted(kept | {"lm_head"})}  # it exists even if its weight is tied


# The quantization_config for SGLang's start, if the model's config.json has none. For the supported model families
# SGLang itself quantizes only the matrices of layers.
SERVED: Final[dict[str, Any]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def sglang_refuses(
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
