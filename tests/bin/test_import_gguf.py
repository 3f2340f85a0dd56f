"""bin/import-gguf, on small files that the package gguf wrote. A released file: tests/smollm2."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from actors.trainer.models.gguf import NUMBERS
from bin.import_gguf import main
from tests.support.commands import called

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 1, 2, 1, 32, 64, 96
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghij", "ab", "cd", *(f"w{number}" for number in range(48))]
SHAPES = {
    "token_embd.weight": (len(WORDS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def values(name: str) -> np.ndarray:
    rng = np.random.default_rng(sorted(SHAPES).index(name))
    return rng.normal(0.0, 0.1, SHAPES[name]).astype(np.float32)


def written(file: Path, kind: str) -> Path:
    """A llama whose matrices have this type, as llama.cpp stores one."""
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(len(WORDS))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    for name in SHAPES:
        array, is_matrix = values(name), len(SHAPES[name]) == 2
        writer.add_tensor(
            name, gguf.quantize(array, number) if is_matrix else array, raw_dtype=number if is_matrix else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def by_heads(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo what llama.cpp does to rotated rows: it puts the two halves of a head side by side."""
    return rows.reshape(heads, HEAD_DIM // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_file_of_each_type_becomes_the_tensors_that_its_numbers_mean(kind: str, tmp_path: Path) -> None:
    file, out = written(tmp_path / "tiny.gguf", kind), tmp_path / "out"
    done = called(main, file, out, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    number = gguf.GGMLQuantizationType[kind]

    def stored(name: str) -> np.ndarray:
        return gguf.dequantize(gguf.quantize(values(name), number), number)

    tensors: dict[str, Any] = load_file(out / "model.safetensors")
    layer = "model.layers.0"
    expected = {
        "model.embed_tokens.weight": stored("token_embd.weight"),
        "model.norm.weight": values("output_norm.weight"),
        f"{layer}.self_attn.q_proj.weight": by_heads(stored("blk.0.attn_q.weight"), HEADS),
        f"{layer}.self_attn.k_proj.weight": by_heads(stored("blk.0.attn_k.weight"), KV_HEADS),
        f"{layer}.self_attn.v_proj.weight": stored("blk.0.attn_v.weight"),
        f"{layer}.self_attn.o_proj.weight": stored("blk.0.attn_output.weight"),
        f"{layer}.input_layernorm.weight": values("blk.0.attn_norm.weight"),
        f"{layer}.post_attention_layernorm.weight": values("blk.0.ffn_norm.weight"),
        f"{layer}.mlp.gate_proj.weight": stored("blk.0.ffn_gate.weight"),
        f"{layer}.mlp.up_proj.weight": stored("blk.0.ffn_up.weight"),
        f"{layer}.mlp.down_proj.weight": stored("blk.0.ffn_down.weight"),
    }
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)
    count = sum(array.size for array in expected.values())
    types = f"8 of type {kind}, 3 of type F32" if kind != "F32" else "11 of type F32"
    assert done.stdout == f"{out}: LlamaForCausalLM with {count:,} parameters; tensors: {types}\n"


def test_the_directory_has_what_a_released_one_has(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    out = tmp_path / "out"
    assert called(main, written(tmp_path / "tiny.gguf", "F16"), out).returncode == 0
    config: Any = AutoConfig.from_pretrained(out)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"], str(config.dtype)) == (
        1e-5,  # not 9.999999747378752e-06
        10000.0,
        "torch.bfloat16",
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab</s>"
    generation: Any = GenerationConfig.from_pretrained(out)
    assert (tokenizer.eos_token_id, generation.eos_token_id) == (2, 2)


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    file = written(tmp_path / "tiny.gguf", "Q5_0")
    done = called(main, file, tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{file}: tensors of type Q5_0; F32, F16, BF16, Q8_0, Q4_1 are read\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model", b"GGUF\3\0\0\0" + b"\xff" * 64])
def test_what_is_no_gguf_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    done = called(main, tmp_path / "model.gguf", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{tmp_path / 'model.gguf'} is no GGUF file, or it is damaged: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_ends_too_early_leaves_no_directory(tmp_path: Path) -> None:
    file = written(tmp_path / "tiny.gguf", "F16")
    file.write_bytes(file.read_bytes()[:-4096])
    done = called(main, file, tmp_path / "out")
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_missing_files_full_directories_and_the_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    missing = called(main, tmp_path / "no.gguf", tmp_path / "out")
    assert (missing.returncode, missing.stderr) == (2, f"{tmp_path / 'no.gguf'}: there is no such file\n")
    full = called(main, tmp_path / "no.gguf", tmp_path / "full")
    assert full.stderr == f"{tmp_path / 'full'} already exists: name a new or an empty directory\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("actors.trainer.models.gguf.find_spec", lambda name: None)
    bare = called(main, tmp_path / "no.gguf", tmp_path / "out")
    assert 'pip install "physarum[run,trainer,gguf]"' in bare.stderr
    assert "gguf and accelerate" in bare.stderr
