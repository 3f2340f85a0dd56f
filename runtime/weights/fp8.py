"""FP8 checkpoints as Hugging Face stores them: which matrices are in blocks, what config.json says, who reads them.

The scheme is that of DeepSeek-V3 and Qwen3-FP8. A matrix `X.weight` [R, C] is cut into blocks of 128 x 128; the last
block of a side may be smaller. It is stored as float8_e4m3fn, and beside it `X.weight_scale_inv`, float32
[ceil(R / 128), ceil(C / 128)], has what each block is multiplied with to read it. In blocks are the matrices of layers,
those of experts too. Embeddings, lm_head, norms, biases and routers stay bfloat16, a router's `e_score_correction_bias`
float32.

Who reads which shapes (SGLang 0.5.23 `layers/quantization/fp8.py`, transformers 5.23 `Fp8Dequantize`):

- SGLang on one rank reads blocks of 128 whatever the sides, but for projections that it joins (query, key and value;
  gate and up; those of experts): the rows of each, and an expert's inner size, must be multiples of 128. Over more
  ranks this holds for a rank's part, of rows and of columns. `sglang_refuses` says which it does not read.
- transformers takes no notice of the 128: it divides each side evenly by the scales. That is the same where a side is
  at most 128 or a multiple of it. Of others it refuses those that do not divide evenly (576 by 5), and reads the rest
  WRONG without a word (192 by 2: 96 and 96, not 128 and 64). `transformers_reads` says which it reads.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

BLOCK: Final = 128
_IN_LAYER: Final = re.compile(r"(?:.+\.)?layers\.\d+\.(?P<module>.+)\.weight")
_NOT_QUANTIZED: Final = {  # of a layer, by the last part of the name: routers; what is there for further tokens
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
_BY_ROWS: Final = ("q_b_proj", "kv_b_proj")  # alone, cut by rows
_BY_COLUMNS: Final = ("o_proj", "down_proj")


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is one of those that an FP8 checkpoint has in blocks."""
    match = _IN_LAYER.fullmatch(name)
    return match is not None and len(shape) == 2 and match["module"].rpartition(".")[2] not in _NOT_QUANTIZED


def scale_name(name: str) -> str:
    """Under which name the scales of a matrix are."""
    return f"{name}_scale_inv"


def grid_of(shape: Sequence[int]) -> tuple[int, ...]:
    """How many blocks a matrix has each way."""
    return tuple(-(-side // BLOCK) for side in shape)


def quantization_config(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What config.json says under `quantization_config`, for readers to know an FP8 checkpoint.

    Args:
        shapes: of all tensors of the model by name, before or after the cast.
    """
    kept = {
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and not is_quantized(name, shape)
    }
    return SERVED | {"modules_to_not_convert": sorted(kept | {"lm_head"})}  # built even where its weight is tied


# What SGLang is started with for a model whose config.json does not say it: of the families that are trained it makes
# everything but the matrices of layers without a thought of quantization.
SERVED: Final[dict[str, Any]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def transformers_reads(shape: Sequence[int]) -> bool:
    """Whether transformers divides a matrix into the blocks that it has."""
    return all(side <= BLOCK or side % BLOCK == 0 for side in shape)


def sglang_refuses(
    shapes: Mapping[str, Sequence[int]], head_dim: int, *, tp_size: int = 1, ep_size: int = 1
) -> str | None:
    """Why SGLang cannot read a model in blocks, with the size that is in the way; none: it can.

    Args:
        shapes: of all tensors of the model by name.
        head_dim: of a head. Where there are more ranks than key-value heads, each has a whole one.
        tp_size: ranks of an engine.
        ep_size: ranks that share its experts out whole.
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
    """The side of a matrix that must be multiples of a block, and what a rank has of it; 0: neither."""
    rows, columns = shape
    if module in _HEADS:
        return rows, max(rows // ranks, head_dim)
    if module in _JOINED or (module in _BY_ROWS and ranks > 1):
        return rows, rows // ranks
    return (columns, columns // ranks) if module in _BY_COLUMNS and ranks > 1 else (0, 0)


def _key(name: str) -> str:
    """Which of config.json's keys a side comes from."""
    module = name.split(".")[-2]
    if ".experts." in name:
        return "moe_intermediate_size"
    if module in _HEADS:
        return _HEADS[module]
    return name if ".shared_experts." in name or module in (*_BY_ROWS, "o_proj") else "intermediate_size"
