"""FP8 checkpoints in Hugging Face's format: quantized matrices and config.json.

The scheme is that of arXiv 2412.19437, section 3.3. A matrix `X.weight` [R, C] is divided into blocks of 128 x 128; the
last block of a side may be smaller. The matrix is stored as float8_e4m3fn. `X.weight_scale_inv`, float32
[ceil(R / 128), ceil(C / 128)], has the factor of each block. The matrices of layers are quantized, those of experts
too. Embeddings, lm_head, norms, biases and routers stay bfloat16; a router's `e_score_correction_bias` is float32.

Supported shapes:

- SGLang: actors/rollout/sglang/model_support.py.
- transformers 5.23 (`Fp8Dequantize`) does not use the 128: it divides each side evenly by the number of scales. The
  result is the same if a side is at most 128, or a multiple of it. It refuses other sides that do not divide evenly
  (576 by 5). It reads the rest WRONG without an error (192 by 2: 96 and 96, not 128 and 64).
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
