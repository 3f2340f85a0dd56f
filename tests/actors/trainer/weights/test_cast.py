"""Weights in bfloat16 and in FP8: numbers by hand, any numbers, and what transformers reads of a checkpoint."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.trainer.models.config import read_hf_config
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.shards import Entry, entry_of, write_weights
from actors.trainer.weights.cast import (
    FORMS,
    entries_in_bfloat16,
    entries_in_fp8,
    quantized,
    to_bfloat16,
    to_fp8,
)
from actors.trainer.weights.export import weight_thread
from actors.trainer.weights.files import export_to_files
from actors.trainer.weights.gathering import own_parts
from actors.trainer.weights.publish import Versions
from runtime.models.checksums import checksums_of
from runtime.models.fp8 import is_quantized, quantization_config
from runtime.settings.tables.engines import WeightFormat
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.tiny import TINY, config_of
from tests.support.fp8 import dequantized, transformers_reads

FP8 = torch.float8_e4m3fn
MATRIX = "model.layers.0.mlp.up_proj.weight"


def shapes_of(entries: list[Entry]) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.shape for entry in entries}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_matrix_by_hand() -> None:
    matrix = torch.zeros(130, 256)  # four blocks, the lower two of two rows
    matrix[0, :4] = torch.tensor([448.0, -16.0, 17.0, 0.3])  # the scale is one
    matrix[5, 128] = -44.8  # a tenth
    matrix[129, 255] = 1e-3
    weight, scales = quantized(MATRIX, matrix)
    assert (weight.dtype, weight.shape, scales.dtype) == (FP8, (130, 256), torch.float32)
    expected = torch.tensor([[448.0, 44.8], [448.0, 1e-3]]) / 448
    assert torch.equal(scales, expected)
    # Between 16 and 32 FP8 has every second number, and ties go to the even one; 0.3 lies between 0.28125 and 0.3125.
    assert weight[0, :4].float().tolist() == [448.0, -16.0, 16.0, 0.3125]
    assert weight[5, 128].float() == -448.0
    assert weight[129, 255].float() == 448.0
    assert dequantized(weight, scales)[0, :4].tolist() == [448.0, -16.0, 16.0, 0.3125]


def test_a_block_of_zeros_stays_zeros_with_their_signs() -> None:
    matrix = torch.zeros(3, 200)
    matrix[1, 1] = -0.0
    weight, scales = quantized(MATRIX, matrix)
    assert scales.tolist() == [[1.0, 1.0]]
    assert torch.equal(bits(dequantized(weight, scales, torch.float32)), bits(matrix))


def test_the_largest_never_becomes_no_number() -> None:
    """Divided by a scale that was rounded down, it is a bit more than the largest of FP8."""
    largest = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 1000 + 1e-3
    matrix = torch.zeros(2000 * 128, 1)
    matrix[::128, 0] = largest
    weight, scales = quantized(MATRIX, matrix)
    assert bool((largest / scales[:, 0] > 448).any())
    assert bool((weight[::128, 0].float() == 448).all())


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 5e-36, 1.0, 3.3e38, torch.finfo(torch.bfloat16).max])
def test_the_largest_of_a_block_is_kept_to_three_bits(largest: float) -> None:
    matrix = torch.full((2, 2), largest, dtype=torch.float32)
    matrix[0, 0] = -largest
    weight, scales = quantized(MATRIX, matrix)
    assert bool((scales >= torch.finfo(torch.float32).tiny).all())
    back = dequantized(weight, scales, torch.float32)
    assert bool(back.isfinite().all())
    assert bool(((back - matrix).abs() <= torch.clamp(matrix.abs() / 16, min=1e-40)).all())


@settings(max_examples=60)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1e-6, 0.02, 1.0, 60.0]),
)
def test_any_matrix_reads_back_close_and_is_stable(
    rows: int, columns: int, seed: int, dtype: torch.dtype, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(rows, columns, generator=generator) * scale).to(dtype)
    matrix[: rows // 3] = 0
    weight, scales = quantized(MATRIX, matrix)
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    assert bool(weight.float().isfinite().all())
    back = dequantized(weight, scales, torch.float32)
    per_number = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    # Half of the last of three bits, or half of FP8's smallest number, 2 ** -9.
    bound = torch.maximum(matrix.float().abs() / 16, per_number * 2**-10) * (1 + 1e-6)
    assert bool(((back - matrix.float()).abs() <= bound).all())
    largest = per_number * 448
    assert bool((matrix.float().abs() <= largest * (1 + 1e-6)).all())
    again, _ = quantized(MATRIX, back)
    assert torch.equal(bits(again), bits(weight))  # nothing moves a second time


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 3.4e38])
@pytest.mark.parametrize("cast", [to_bfloat16, to_fp8])
@pytest.mark.parametrize("name", [MATRIX, "model.norm.weight"])
def test_what_is_not_finite_is_refused_by_name(wrong: float, cast: Any, name: str) -> None:
    tensor = torch.ones(2, 200)
    tensor[1, 150] = wrong
    with pytest.raises(ValueError, match=r"\[2, 200\]: 1 of its numbers .* at \[1, 150\]") as caught:
        cast([("model.layers.0.fine.weight", torch.ones(1, 1)), (name, tensor)])
    assert str(caught.value).startswith(f"{name} ")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), True),
        ("model.layers.61.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), True),
        ("model.layers.3.mlp.experts.12.down_proj.weight", (4, 4), True),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", (4, 4), True),
        ("model.layers.3.mlp.gate.weight", (4, 4), False),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 4), False),
        ("model.layers.3.mlp.gate.e_score_correction_bias", (4,), False),
        ("model.layers.3.self_attn.q_proj.bias", (4,), False),
        ("model.layers.3.input_layernorm.weight", (4,), False),
        ("model.layers.61.eh_proj.weight", (4, 8), False),
        ("model.layers.61.embed_tokens.weight", (4, 4), False),
        ("model.layers.61.shared_head.head.weight", (4, 4), False),
        ("model.embed_tokens.weight", (4, 4), False),
        ("lm_head.weight", (4, 4), False),
    ],
)
def test_matrices_of_layers_are_quantized(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_quantized(name, shape) is expected


def test_what_chooses_experts_stays_float32() -> None:
    name, bias = "model.layers.3.mlp.gate.e_score_correction_bias", torch.tensor([1.0009765625])
    for cast in (to_bfloat16, to_fp8):
        [(_, kept)] = cast([(name, bias)])
        assert torch.equal(kept, bias)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_what_comes_out_is_known_before(kind: str, tmp_path: Path) -> None:
    weights = list(drawn(write_config(tmp_path, TINY if kind == "qwen3" else config_of(kind))).items())
    entries = [entry_of(*pair) for pair in weights]
    assert entries_in_fp8(entries) == [entry_of(*pair) for pair in to_fp8(weights)]
    assert entries_in_bfloat16(entries) == [entry_of(*pair) for pair in to_bfloat16(weights)]
    assert quantization_config(shapes_of(entries)) == quantization_config(shapes_of(entries_in_fp8(entries)))


# Sides of at most 128 and multiples of it; 128 and more columns, so that blocks lie side by side.
DENSE = TINY | {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 130}
SPARSE = config_of("qwen3_moe") | {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 24}


@pytest.mark.parametrize(
    "config",
    [DENSE, DENSE | {"tie_word_embeddings": True}, SPARSE],
    ids=["dense", "tied", "experts"],
)
def test_transformers_reads_the_checkpoint_as_we_do(config: dict[str, Any], tmp_path: Path) -> None:
    weights = drawn(write_config(tmp_path, config))
    weights["model.layers.1.self_attn.o_proj.weight"][:, :100] = 0
    cast = dict(to_fp8(list(weights.items())))
    entries = [entry_of(*pair) for pair in cast.items()]
    assert all(transformers_reads(entry.shape) for entry in entries if entry.dtype == "F8_E4M3")
    # Without a GPU transformers dequantizes by itself; said here, it does so with one too.
    quantization = quantization_config(shapes_of(entries)) | {"dequantize": True}
    write_config(tmp_path, config | {"quantization_config": quantization, "dtype": "bfloat16"})
    write_weights(cast, tmp_path)
    read = read_by_transformers(tmp_path)
    for name in weights:
        expected = dequantized(cast[name], cast[f"{name}_scale_inv"]) if cast[name].dtype == FP8 else cast[name]
        got = read.pop(name) if name in read else part_of_experts(read, name)
        assert got.dtype == expected.dtype, name
        assert torch.equal(bits(got), bits(expected)), name
    assert not {name for name in read if "experts" not in name} - {"lm_head.weight"}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("weight_format", ["bfloat16", "fp8"])
def test_transformers_reads_a_published_version_as_we_do(
    kind: str, weight_format: WeightFormat, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 130}
    model = tmp_path / "model"
    write_model(model, kind, noise=0.02, **sizes | ({"moe_intermediate_size": 128} if kind == "qwen3_moe" else {}))
    built, hf = load(model)
    versions = Versions(tmp_path / "weights", model, weight_format=weight_format, shapes=hf_shapes(hf))
    begun = versions.begin(7)
    cpu = torch.device("cpu")
    form = FORMS[weight_format]
    with weight_thread() as thread:
        told = export_to_files(
            own_parts([built], hf), hf, begun.whole, thread, device=cpu, bucket_bytes=100_000, form=form
        ).finish()
    published = versions.complete(begun, told)
    path, size_bytes = published.path, published.size_bytes
    assert path is not None
    assert told.checksum == published.checksum == checksums_of(path).total
    trained = whole_weights([built], hf)
    cast = {"bfloat16": to_bfloat16, "fp8": to_fp8}[weight_format](list(trained.items()))
    expected = {name: tensor for name, tensor in cast if not name.endswith("_scale_inv")}
    scales = {name.removesuffix("_scale_inv"): tensor for name, tensor in cast if name.endswith("_scale_inv")}
    assert bool(scales) == (weight_format == "fp8")
    assert size_bytes < 0.55 * sum(tensor.nbytes for tensor in trained.values())
    read = read_by_transformers(path)
    for name, tensor in expected.items():
        right = dequantized(tensor, scales[name]) if name in scales else tensor
        assert torch.equal(bits(read[name] if name in read else part_of_experts(read, name)), bits(right)), name


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_transformers_quantizes_the_same_modules(kind: str, tmp_path: Path) -> None:
    """Those that config.json does not except, by its own reading of the list."""
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

    write_config(tmp_path, TINY if kind == "qwen3" else config_of(kind))
    entries = [entry_of(*pair) for pair in drawn(tmp_path).items()]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    config = FineGrainedFP8Config(**quantization_config(shapes_of(entries)))
    replace_with_fp8_linear(model, config.modules_to_not_convert, config, pre_quantized=True)
    theirs = {name for name, module in model.named_modules() if isinstance(module, FP8Linear | FP8Experts)}
    quantized_names = {entry.name.removesuffix(".weight") for entry in entries if is_quantized(entry.name, entry.shape)}
    assert {re.sub(r"\.experts\.\d+\..*", ".experts", name) for name in quantized_names} == theirs


@pytest.mark.parametrize(("rows", "reads", "divides"), [(128, True, True), (192, False, True), (576, False, False)])
def test_other_sides_transformers_reads_wrong_or_not_at_all(rows: int, reads: bool, divides: bool) -> None:
    """What the docstring says of it, so that a release that has learnt is noticed."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    matrix = torch.linspace(1.0, 1000.0, rows)[:, None] * torch.ones(1, 128)
    weight, scales = quantized(MATRIX, matrix)
    assert transformers_reads(matrix.shape) is reads

    def read() -> Tensor:
        return Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)

    if divides:
        assert torch.equal(read(), dequantized(weight, scales)) is reads
    else:
        with pytest.raises(ValueError, match="not divisible"):
            read()


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def drawn(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the model whose config lies in a directory."""
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(read_hf_config(directory))
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}


def read_by_transformers(directory: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict())


def part_of_experts(read: dict[str, Tensor], name: str) -> Tensor:
    """An expert's matrix; transformers has those of all experts in one tensor, gate and up joined."""
    prefix, _, rest = name.partition(".experts.")
    number, projection, _ = rest.split(".")
    if projection == "down_proj":
        return read[f"{prefix}.experts.down_proj"][int(number)]
    gate, up = read[f"{prefix}.experts.gate_up_proj"][int(number)].chunk(2)
    return gate if projection == "gate_proj" else up
