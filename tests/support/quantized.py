"""Tensors of quantized checkpoints with random numbers, and the same numbers by the definition of each method."""

from collections.abc import Sequence

import torch
from torch import Tensor

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {  # as gpt-oss has it
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
INT4 = {  # as Kimi-K2-Thinking has it
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4},
                **{"observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"},
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"),
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8(name: str, shape: Sequence[int], draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix, or a stack of them, in blocks of 128 x 128: its stored tensors, and its numbers in float32."""
    *_, rows, columns = shape
    stored = (torch.randn(*shape, generator=draw) * 100).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], -(-rows // 128), -(-columns // 128))
    scales = torch.rand(grid, generator=draw) * 1e-3 + 1e-4
    spread = torch.kron(scales, torch.ones(128, 128))[..., :rows, :columns]
    return {name: stored, f"{name}_scale_inv": scales}, stored.float() * spread


def mxfp4(name: str, shape: Sequence[int], draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """A stack [experts, in, out] of floats of 4 bits: its stored tensors, and its numbers in float32."""
    count, inner, outer = shape
    codes = torch.randint(0, 16, (count, outer, inner // 32, 16, 2), generator=draw)
    exponents = torch.randint(117, 128, (count, outer, inner // 32), generator=draw)
    values = torch.tensor([*E2M1, *(-number for number in E2M1)])[codes].flatten(3)
    numbers = (values * 2.0 ** (exponents - 127).float().unsqueeze(-1)).flatten(2).transpose(1, 2)
    packed = (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8)
    return {f"{name}_blocks": packed, f"{name}_scales": exponents.to(torch.uint8)}, numbers.contiguous()


def int4(name: str, shape: Sequence[int], draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix of integers of 4 bits in groups of 32 columns: its stored tensors, and its numbers in bfloat16."""
    rows, columns = shape
    numbers = torch.randint(-8, 8, (rows, columns), generator=draw)
    scales = (torch.rand(rows, columns // 32, generator=draw) * 0.02 + 1e-3).bfloat16()
    words = ((numbers + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(2)  # the lowest bits first
    packed = torch.where(words < 2**31, words, words - 2**32).int()
    spread = scales.repeat_interleave(32, dim=1)
    stored = {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_shape": torch.tensor([rows, columns])}
    return stored, (numbers.float() * spread.float()).bfloat16()
