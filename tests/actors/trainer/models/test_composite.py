"""A text model published inside of one with an image tower trains, and its export has all that the directory had."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.tiny_engine.model.receiving import write
from actors.trainer.megatron.imports import quiet
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.files import add_copied, copy_small_files, set_dtype, write_model
from actors.trainer.models.shapes import check_weights, hf_shapes
from runtime.models import config
from runtime.models.blocks import Attention
from runtime.models.config import ModelError, read_model, read_tiny_engine_model
from runtime.models.family import families
from runtime.models.safetensors import SINGLE_FILE, read_tensors
from tests.actors.tiny_engine.test_tiny_numerics import ATOL, request_of, run_out, scheduler_of
from tests.actors.trainer.hf import BUFFERS, whole_weights
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.tiny import VOCAB, config_of

VISION = {
    **{"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16, "patch_size": 2},
    **{"spatial_merge_size": 1, "temporal_patch_size": 1, "num_position_embeddings": 4},
}
OF_TEXT = {  # keys of published files that the class does not read
    **{"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
    **{"mtp_use_dedicated_embeddings": False, "full_attention_interval": 2, "dtype": "float32"},
}
PARTS = ("gate", "up", "down")
KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe, expert by expert")


class Published(NamedTuple):
    """A directory of a model with an image tower: the model type of its text, keys of the whole, and of the tower."""

    kind: str
    text: str
    whole: dict[str, Any]
    vision: dict[str, Any]
    of_text: dict[str, Any]  # published keys of the text beside those of the tiny configuration
    left_out: tuple[str, ...] = ()  # keys of it that published files lack
    prefix: str = ""  # of all its tensors


SIGLIP = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
KIMI_CODE = {
    "AutoConfig": "configuration_kimi_k25.KimiK25Config",
    "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
}
PUBLISHED = {
    "gemma3": Published(
        "gemma3",
        "gemma3_text",
        {"mm_tokens_per_image": 4, "boi_token_index": 29, "eoi_token_index": 28, "image_token_index": 30},
        SIGLIP | {"model_type": "siglip_vision_model"},
        {},
        ("tie_word_embeddings",),
    ),
    "gemma4": Published(
        "gemma4",
        "gemma4_text",
        {
            # beyond the vocabulary: transformers reads padding in their place, and engines may sample any token
            **{"image_token_id": VOCAB, "video_token_id": VOCAB + 1, "audio_token_id": VOCAB + 2},
            **{"boi_token_id": 27, "eoi_token_id": 26, "boa_token_id": 25, "eoa_token_index": 24},
            "vision_soft_tokens_per_image": 4,
        },
        {
            **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": 4, "patch_size": 2, "position_embedding_size": 4},
            **{"model_type": "gemma4_vision", "pooling_kernel_size": 1},
        },
        {"use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 32, "num_kv_shared_layers": 0},
        ("tie_word_embeddings",),
        "model.",
    ),
    "mistral3": Published(
        "mistral3",
        "ministral3",
        {"image_token_index": 30, "tie_word_embeddings": False, "projector_hidden_act": "gelu"},
        SIGLIP | {"model_type": "pixtral", "head_dim": 4},
        {},
    ),
    "mistral3 of Mistral": Published(
        "mistral3",
        "mistral",
        {"image_token_index": 30, "tie_word_embeddings": False, "multimodal_projector_bias": False},
        SIGLIP | {"model_type": "pixtral", "head_dim": 4},
        {},
    ),
    "kimi_k25": Published(
        "kimi_k25",
        "kimi_k2",
        {
            **{"architectures": ["KimiK25ForConditionalGeneration"], "auto_map": KIMI_CODE, "ignore_index": -100},
            **{"media_placeholder_token_id": 30, "use_unified_vision_chunk": True, "tie_word_embeddings": False},
        },
        {
            **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"patch_size": 2, "pos_emb_height": 2, "pos_emb_width": 2, "pos_emb_time": 2},
        },
        {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "topk_method": "noaux_tc"},
    ),
}


def written(directory: Path, kind: str) -> tuple[Any, dict[str, Tensor]]:
    """Write a directory as published; also return transformers' model, and the tensors that no text model has."""
    kind, _, single = kind.partition(", ")
    text = {key: value for key, value in config_of(f"{kind}_text").items() if key != "tie_word_embeddings"}
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    named = {"model_type": kind, "tie_word_embeddings": False, "image_token_id": 30, "video_token_id": 29}
    config: Any = transformers.AutoConfig.for_model(**named, text_config=text, vision_config=VISION)
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    tensors = load_file(directory / SINGLE_FILE)
    tensors = tensors if single else stacked(tensors)
    further = {"mtp.fc.weight": torch.randn(16, 32), "mtp.norm.weight": torch.randn(16).bfloat16()}
    save_file(tensors | further, directory / SINGLE_FILE, metadata={"format": "pt"})
    by_hand = named | {"architectures": [type(model).__name__], "vision_start_token_id": 28, "vision_end_token_id": 27}
    by_hand |= {"text_config": text | OF_TEXT, "vision_config": VISION | {"model_type": kind}}
    (directory / "config.json").write_text(json.dumps(by_hand))
    return model, further | {name: each for name, each in tensors.items() if name.startswith("model.visual.")}


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of all experts as one, as published; transformers writes one of each expert."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        own = [[tensors[f"{layer}.experts.{number}.{part}_proj.weight"] for number in range(4)] for part in PARTS]
        gate, up, down = (torch.stack(part) for part in own)
        found |= {f"{layer}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.experts.down_proj": down}
    return found


def written_as(published: Published, directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """Write a directory with the names that the files of the hub have; return as `written` does."""
    kind = {"kimi_k2": "deepseek_v3"}.get(published.text, published.text)
    text = {key: value for key, value in config_of(kind).items() if key not in published.left_out}
    text |= {"num_key_value_heads": 4} if "kv_lora_rank" in text else {}
    text = {key: value for key, value in text.items() if value is not None and key != "tie_word_embeddings"}
    keys = {key: value for key, value in published.whole.items() if key not in ("architectures", "auto_map")}
    config: Any = transformers.AutoConfig.for_model(
        published.kind, text_config=dict(text), vision_config=dict(published.vision), **keys
    )
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        scales = [buffer for name, buffer in model.named_buffers() if name.endswith(BUFFERS)]
        for parameter in (*model.parameters(), *scales):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    tensors = {  # of Kimi's, transformers writes the layers of the text as those of the tower, and a norm with a prefix
        re.sub("^language_model.model.blocks", "language_model.model.layers", renamed(name, published)): tensor
        for name, tensor in load_file(directory / SINGLE_FILE).items()
    }
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    by_hand = {"architectures": [type(model).__name__], "model_type": published.kind, **published.whole}
    by_hand["text_config"] = text | published.of_text | {"model_type": published.text, "dtype": "float32"}
    by_hand["vision_config"] = published.vision
    (directory / "config.json").write_text(json.dumps(by_hand))
    of_text = f"{published.prefix}language_model."
    return model, {name: each for name, each in tensors.items() if not name.startswith(of_text)}


def renamed(name: str, published: Published) -> str:
    """The name of a tensor in published files, given the one that transformers writes."""
    return name if published.prefix else name.removeprefix("model.")


def is_declared(name: str) -> bool:
    """Whether a published directory and its text model have declarations."""
    types = {kind for family in families().values() for kind in family.model_types}
    return {PUBLISHED[name].kind, PUBLISHED[name].text} <= types


@pytest.mark.parametrize("kind", [*KINDS, *filter(is_declared, PUBLISHED)])
def test_its_text_is_computed_and_all_its_tensors_are_exported(kind: str, tmp_path: Path) -> None:
    directory, out = tmp_path / "model", tmp_path / "out"
    directory.mkdir()
    out.mkdir()
    reference, copied = written_as(PUBLISHED[kind], directory) if kind in PUBLISHED else written(directory, kind)
    assert copied
    read = read_hf_config(directory)
    check_weights(directory, read)
    built, hf = load(directory)
    tokens = torch.randint(0, VOCAB - 6, (2, 17), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        found, expected = built(tokens, None, None), reference(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))

    exported = whole_weights([built], hf)
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == hf_shapes(hf)
    write_model(exported, out, model_directory=directory)
    add_copied(directory, out, hf)
    before, after = read_tensors(directory), read_tensors(out)
    assert before.keys() == after.keys() == exported.keys() | copied.keys()
    assert all(bytes(after[name].data()) == bytes(tensor.data()) for name, tensor in before.items())
    assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
    again = transformers.AutoModelForImageTextToText.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=tokens).logits, expected)


@pytest.mark.parametrize("text", [None, "gpt2"])
def test_a_text_model_of_no_declared_family_is_refused(text: str | None, tmp_path: Path) -> None:
    """Where a text model may be of several families, text_config says which."""
    config = config_of("ministral3") | {"model_type": text}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": config}))
    with pytest.raises(ModelError, match=rf"text_config.model_type {text!r} is not supported; supported: .*'mistral'"):
        read_model(tmp_path)


def test_a_dtype_is_set_and_a_key_taken_out_in_the_text_model_too(tmp_path: Path) -> None:
    directory, out = tmp_path / "model", tmp_path / "out"
    directory.mkdir()
    out.mkdir()
    written(directory, "qwen3_5")
    copy_small_files(directory, out, tokenizer=False, ignored=["mamba_ssm_dtype"])
    set_dtype(out / "config.json", "bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["dtype"] == "bfloat16"
    assert "mamba_ssm_dtype" not in config["text_config"]
    assert "torch_dtype" not in config


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no text": ({"text_config": None}, {}, "text_config is missing, which model_type 'qwen3_5' has"),
    "tied elsewhere": ({}, {"tie_word_embeddings": True}, r"tie_word_embeddings and text_config\..* differ"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, {}, "quantization_config with quant_method"),
    "without a gate": ({}, {"attn_output_gate": False}, "attn_output_gate false is not supported"),
    "heads": ({}, {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not divisible by linear_num_key_heads 2"),
    "linear alone": ({}, {"layer_types": ["linear_attention"] * 2}, "no layer has full attention"),
    "interval": ({}, {"full_attention_interval": 0}, "full_attention_interval 0 is not positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_is_not_supported_is_named(name: str, tmp_path: Path) -> None:
    of_whole, of_text, message = REFUSED[name]
    text = config_of("qwen3_5_text") | {"tie_word_embeddings": False} | of_text
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    config |= {"tie_word_embeddings": False} | of_whole
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    with pytest.raises(ModelError, match=message):
        read_model(tmp_path)


@pytest.mark.parametrize("kind", [*KINDS, *filter(is_declared, ["gemma4"])])
def test_the_tiny_engine_serves_its_text_and_takes_its_export(kind: str, tmp_path: Path) -> None:
    reference, _ = written_as(PUBLISHED[kind], tmp_path) if kind in PUBLISHED else written(tmp_path, kind)
    exported = whole_weights([load(tmp_path)[0]], read_hf_config(tmp_path))
    scheduler, request = scheduler_of(tmp_path), request_of("a", [5, 6, 7], limit=6)
    for tensor in scheduler.slots.weights.named.values():
        tensor.zero_()
    with torch.inference_mode():
        write(scheduler.slots.weights, exported.items())
        scheduler.submit([request])
        run_out(scheduler)
        logits = reference(input_ids=torch.tensor([request.prompt_ids + request.output_ids])).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=ATOL, rtol=0)


def test_attention_that_the_tiny_engine_lacks_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_next")))
    assert read_tiny_engine_model(tmp_path) == read_model(tmp_path)
    monkeypatch.setattr(config, "IN_TINY_ENGINE", (Attention,))
    with pytest.raises(ModelError, match="the tiny engine does not support DeltaNet"):
        read_tiny_engine_model(tmp_path)
