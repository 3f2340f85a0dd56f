"""Quantized checkpoints as published: numbers, shards of ranks, what is refused, and what an export has."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.trainer.megatron.imports import quiet
from actors.trainer.models import dequantize
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.files import TensorShard, add_copied, copy_small_files, file_source, write_model
from actors.trainer.models.shapes import check_weights, hf_shapes
from actors.trainer.models.sharding import load_weights
from runtime.models.config import ModelError
from runtime.models.safetensors import SINGLE_FILE, read_tensors
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.hf import write_model as write_tiny
from tests.actors.trainer.measured import TensorPeak
from tests.actors.trainer.models.test_model_parity import built_of
from tests.actors.trainer.models.test_sharding import parameters_of, part_of
from tests.actors.trainer.tiny import VOCAB
from tests.actors.trainer.weights.test_cast import part_of_experts
from tests.build.model import rank_part
from tests.sglang.server import sglang_environment, sglang_python
from tests.support.quantized import FP8, INT4, MXFP4, fp8, int4, mxfp4

Draw = Callable[..., tuple[dict[str, Tensor], Tensor]]
METHODS: dict[str, tuple[Draw, dict[str, Any]]] = {"fp8": (fp8, FP8), "mxfp4": (mxfp4, MXFP4), "int4": (int4, INT4)}
SHAPES = {  # whole and partial blocks on both sides, and less than a block
    "fp8": [(300, 200), (128, 256), (5, 129), (3, 140, 130)],
    "mxfp4": [(3, 96, 5), (2, 32, 64)],
    "int4": [(7, 96), (130, 64)],
}
EXPERT = {"hidden_size": 64, "moe_intermediate_size": 32}  # sides that have groups of 32
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {  # family, sizes, and which of its tensors are quantized
    "fp8": ("deepseek_v3", {"hidden_size": 136, "intermediate_size": 264}, "_proj"),
    "mxfp4": ("gpt_oss", {"hidden_size": 64, "intermediate_size": 32}, ".experts."),
    "int4": ("deepseek_v3", EXPERT, ".mlp.experts."),
}


def written(directory: Path, method: str) -> dict[str, Tensor]:
    """Write a tiny model of a family that is published so; return the numbers of its quantized tensors."""
    kind, sizes, piece = MODELS[method]
    draw_one, config = METHODS[method]
    write_tiny(directory, kind, **sizes)
    tensors, numbers = load_file(directory / SINGLE_FILE), dict[str, Tensor]()
    draw = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if piece in name and "bias" not in name]:
        stored, numbers[name] = draw_one(name, tensors.pop(name).shape, draw)
        tensors |= stored
    assert numbers
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    values = json.loads((directory / "config.json").read_text()) | {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(values))
    return numbers


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("strip", [1 << 19, 1000])
@pytest.mark.parametrize("method", METHODS)
def test_any_part_of_a_tensor_has_the_numbers_of_its_definition(
    method: str, strip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantize, "STRIP", strip)
    draw_one, config = METHODS[method]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    draw = torch.Generator().manual_seed(0)
    for shape in SHAPES[method]:
        stored, numbers = draw_one("a.weight", shape, draw)
        save_file(stored, tmp_path / SINGLE_FILE)
        for dtype in (torch.float32, torch.bfloat16):
            source, expected = file_source(tmp_path, dtype), numbers.to(dtype)
            assert torch.equal(bits(source("a.weight")), bits(expected)), shape
            cuts = [TensorShard(0, 0, 1, number=1) if len(shape) == 3 else TensorShard(0, 0, 1, rows=(2, 3))]
            cuts += [TensorShard(dim, index, 2) for dim in (0, 1) for index in (0, 1)]
            for cut in cuts:
                assert torch.equal(bits(source("a.weight", cut)), bits(cut.of(expected))), (shape, cut)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_loaded_as_from_an_unquantized_copy_by_ranks_too(method: str, tmp_path: Path) -> None:
    """Parts of tensor-parallel ranks; experts are asked for one by one, and pipeline stages load their layers alone."""
    numbers = written(tmp_path, method)
    hf = read_hf_config(tmp_path)
    check_weights(tmp_path, hf)
    source = file_source(tmp_path)
    plain = {name: numbers[name] if name in numbers else source(name) for name in hf_shapes(hf)}

    def unquantized(name: str, cut: TensorShard | None = None) -> Tensor:
        return plain[name] if cut is None else cut.of(plain[name])

    for name, dim in parameters_of(hf):
        whole = rank_part(name, hf, unquantized, None)
        assert torch.equal(rank_part(name, hf, source, None), whole.float()), name
        is_undivided = hf.experts is not None and hf.experts.clamped is not None and ".experts." in name
        for rank in range(2) if dim is not None and not is_undivided else ():
            cut = TensorShard(dim, rank, 2)
            assert torch.equal(rank_part(name, hf, source, cut), part_of(whole, name, cut).float()), (name, rank)


@pytest.mark.parametrize("method", [*METHODS, "none"])
def test_a_load_takes_the_model_and_two_of_its_tensors_at_most(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strip = 1 << 12
    monkeypatch.setattr(dequantize, "STRIP", strip)
    if method in METHODS:
        written(tmp_path, method)
    else:
        write_tiny(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    hf = read_hf_config(tmp_path)
    with TensorPeak() as peak:
        built = built_of(hf)
        load_weights(built, hf, file_source(tmp_path))
    sizes = sorted((tensor.nbytes for tensor in (*built.parameters(), *built.buffers())), reverse=True)
    assert sum(sizes) <= peak.bytes <= sum(sizes) + sum(sizes[:2]) + 64 * strip


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_transformers_computes_the_same(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It divides sides evenly, so those of the model are at most one block."""
    import transformers

    monkeypatch.setitem(MODELS, "fp8", ("deepseek_v3", {"hidden_size": 128}, "_proj"))
    numbers = written(tmp_path, method)
    hf = read_hf_config(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        state, source = read.state_dict(), file_source(tmp_path, dtype)
        for name in numbers:
            theirs = state[name] if name in state else part_of_experts(state, name)
            assert torch.equal(bits(theirs), bits(source(name))), name
    built = built_of(hf)
    load_weights(built, hf, file_source(tmp_path))
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        theirs = read(tokens).logits
        torch.testing.assert_close(built(tokens, None, None), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_an_export_has_no_trace_of_the_quantization(tmp_path: Path) -> None:
    directory, out = tmp_path / "model", tmp_path / "out"
    directory.mkdir()
    out.mkdir()
    numbers = written(directory, "fp8")
    hf = read_hf_config(directory)
    built = built_of(hf)
    load_weights(built, hf, file_source(directory))
    write_model(whole_weights([built], hf), out, model_directory=directory)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert {name: each.shape for name, each in read_tensors(out).items()} == hf_shapes(hf)
    assert all(torch.equal(file_source(out)(name), tensor) for name, tensor in numbers.items())
    nested = {"text_config": {"quantization_config": FP8, "hidden_size": 8}}
    (directory / "config.json").write_text(json.dumps(nested))
    copy_small_files(directory, out, tokenizer=False)
    assert json.loads((out / "config.json").read_text()) == {"text_config": {"hidden_size": 8}}


def test_quantized_tensors_that_are_not_built_are_dequantized_in_an_export(tmp_path: Path) -> None:
    directory, out = tmp_path / "model", tmp_path / "out"
    directory.mkdir()
    out.mkdir()
    write_tiny(directory, "qwen3")
    write_tiny(out, "qwen3")
    stored, numbers = fp8("mtp.fc.weight", (140, 20), torch.Generator().manual_seed(0))
    tensors = load_file(directory / SINGLE_FILE) | stored | {"mtp.norm.weight": torch.ones(3)}
    save_file(tensors, directory / SINGLE_FILE)
    values = json.loads((directory / "config.json").read_text()) | {"quantization_config": FP8}
    (directory / "config.json").write_text(json.dumps(values))
    import msgspec

    hf = msgspec.structs.replace(read_hf_config(directory), copied=("mtp",))
    check_weights(directory, hf)
    add_copied(directory, out, hf)
    read = read_tensors(out)
    assert {name for name in read if name.startswith("mtp.")} == {"mtp.fc.weight", "mtp.norm.weight"}
    assert torch.equal(file_source(out)("mtp.fc.weight"), numbers.bfloat16())
    assert torch.equal(file_source(out)("mtp.norm.weight"), torch.ones(3))


OF_WEIGHTS = INT4["config_groups"]["group_0"]["weights"]
GROUP = "quantization_config.config_groups.group_0"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "gptq"}, 'quantization_config with quant_method "gptq" is not supported'),
    "blocks": (
        FP8 | {"weight_block_size": [64, 64]},
        "quantization_config.weight_block_size [64, 64] is not supported",
    ),
    "one scale": (FP8 | {"weight_block_size": None}, "quantization_config.weight_block_size null is not supported"),
    "static": (FP8 | {"activation_scheme": "static"}, 'activation_scheme "static" is not supported; supported: "dyn'),
    "another format": (INT4 | {"format": "float-quantized"}, 'quantization_config.format "float-quantized" is not'),
    "no groups": (INT4 | {"config_groups": {}}, "quantization_config.config_groups {} is not supported"),
    "sparse": (INT4 | {"sparsity_config": {"format": "dense"}}, 'sparsity_config {"format": "dense"} is not'),
    **{
        key: (
            INT4 | {"config_groups": {"group_0": {"weights": OF_WEIGHTS | {key: value}}}},
            f"{GROUP}.weights.{key} {json.dumps(value)} is not supported",
        )
        for key, value in {"num_bits": 8, "group_size": 128, "symmetric": False, "actorder": "group"}.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_quantization_is_refused_by_its_key_and_value(name: str, tmp_path: Path) -> None:
    value, message = REFUSED[name]
    write_tiny(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": value}))
    with pytest.raises(ModelError) as refused:
        read_hf_config(tmp_path)
    (problem,) = refused.value.problems
    assert message in problem


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("fp8", {"_scale_inv": None}, "is F8_E4M3, and the files have no .*down_proj.weight_scale_inv; allowed: F64"),
        ("fp8", {"_scale_inv": (1, 1)}, r"down_proj.weight_scale_inv is \[1, 1\], and \[2, 3\] in the model"),
        ("int4", {"_shape": None}, r"has no tensor .*_proj.weight_shape"),
        ("int4", {"_packed": (1, 1)}, r"weight_packed is \[1, 1\], and \[64, 4\] in the model"),
        ("mxfp4", {"_blocks": None}, r"has no tensor .*_proj_blocks"),
    ],
)
def test_files_that_do_not_fit_are_refused_with_the_tensor(
    method: str, change: dict[str, tuple[int, int] | None], message: str, tmp_path: Path
) -> None:
    written(tmp_path, method)
    tensors = load_file(tmp_path / SINGLE_FILE)
    for ending, shape in change.items():
        name = next(name for name in tensors if name.endswith(ending))
        own = tensors.pop(name)
        tensors |= {} if shape is None else {name: own.flatten()[: shape[0] * shape[1]].reshape(shape).clone()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match=message):
        check_weights(tmp_path, read_hf_config(tmp_path))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_compressed_tensors_gives_the_same_integers_of_4_bits(tmp_path: Path) -> None:
    """compressed-tensors is in the environment of SGLang alone, and is asked for the numbers there."""
    directory, found = tmp_path / "model", tmp_path / "found.safetensors"
    directory.mkdir()
    numbers = written(directory, "int4")
    script = (
        "import sys, torch\n"
        "from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32\n"
        "from compressed_tensors.quantization.lifecycle.forward import dequantize\n"
        "from safetensors.torch import load_file, save_file\n"
        "stored, read = load_file(sys.argv[1]), {}\n"
        "for name in [name for name in stored if name.endswith('_packed')]:\n"
        "    one = name.removesuffix('_packed')\n"
        "    codes = unpack_from_int32(stored[name], 4, torch.Size(stored[one + '_shape'].tolist()))\n"
        "    read[one] = dequantize(codes, stored[one + '_scale'])\n"
        "save_file(read, sys.argv[2])\n"
    )
    command = [sglang_python(), "-c", script, str(directory / SINGLE_FILE), str(found)]
    subprocess.run(command, env=sglang_environment(), check=True)
    read, source = load_file(found), file_source(directory, torch.bfloat16)
    assert read.keys() == numbers.keys()
    for name, tensor in read.items():
        assert torch.equal(bits(tensor), bits(source(name))), name
