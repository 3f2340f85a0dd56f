"""Directories as the hub has them: trainer, tiny engine and transformers read the same model, ends and prompts."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from actors.buffer.prompts.tokenizing import load_tokenizing
from actors.rollout.sglang.served_model import ServedModel
from actors.tiny_engine.http.chat import ChatTemplate
from actors.trainer.megatron.imports import quiet
from actors.trainer.models.files import add_copied, copy_small_files, write_model
from actors.trainer.models.shapes import check_weights
from runtime.models.config import read_model
from runtime.models.family import families, family_of
from runtime.models.quantization import quantization_of
from runtime.models.safetensors import INDEX_FILE, SINGLE_FILE, read_tensors
from tests.actors.tiny_engine.test_tiny_numerics import ATOL, request_of, run_out, scheduler_of
from tests.actors.trainer.hf import classes_of, whole_weights
from tests.actors.trainer.models.test_model_parity import load
from tests.support.hub_layouts import LAYOUTS, TALK, Layout

TYPES = {name for family in families().values() for name in family.model_types}
DECLARED = {name: layout for name, layout in LAYOUTS.items() if layout.config["model_type"] in TYPES}
PUBLISHED = pytest.mark.parametrize("name", DECLARED)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Write a family's directory with random weights in bfloat16, unquantized; also return transformers' model."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = directory, written(LAYOUTS[name], directory)
        return made[name]

    return make


def written(layout: Layout, directory: Path) -> Any:
    layout.write(directory, quantization_config=None)
    config = json.loads((directory / "config.json").read_text())
    torch.manual_seed(3)
    model = built_by_transformers(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + torch.randn_like(parameter) * 0.1).bfloat16())
    deepcopy(model).to(torch.bfloat16).save_pretrained(
        directory, **({"max_shard_size": "20KB"} if layout.shards else {})
    )
    layout.write(directory, quantization_config=None)  # transformers wrote its own
    return model


def built_by_transformers(config: dict[str, Any]) -> Any:
    if "text_config" in config:
        of_whole = transformers.AutoConfig.for_model(**config)
        return transformers.AutoModelForImageTextToText.from_config(of_whole, dtype=torch.float32)
    kind = family_of(config["model_type"], None).model_type
    config_type, model_type = classes_of(kind)
    return model_type(config_type.from_dict(config | {"model_type": kind}))


@PUBLISHED
def test_a_published_model_is_trained_as_transformers_computes_it(
    name: str, published: Callable[[str], tuple[Path, Any]]
) -> None:
    directory, model = published(name)
    built, hf = load(directory)
    check_weights(directory, hf)
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    with quiet(), torch.no_grad():
        torch.testing.assert_close(built(tokens, None, None), model(tokens).logits, rtol=0, atol=1e-4)


@PUBLISHED
def test_the_tiny_engine_serves_a_published_model(name: str, published: Callable[[str], tuple[Path, Any]]) -> None:
    """As transformers' model computes it, which wrote the directory: its own config.json, shards and tied weights."""
    directory, model = published(name)
    with torch.inference_mode():
        scheduler, request = scheduler_of(directory), request_of("a", [5, 6, 7], limit=6)
        scheduler.submit([request])
        run_out(scheduler)
        logits = model(torch.tensor([request.prompt_ids + request.output_ids])).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.log_probs), expected, rtol=0, atol=ATOL)


@PUBLISHED
def test_its_files_are_those_of_the_hub(name: str, published: Callable[[str], tuple[Path, Any]]) -> None:
    directory, _ = published(name)
    layout, read = LAYOUTS[name], read_model(directory)
    assert (directory / INDEX_FILE).exists() == layout.shards != (directory / SINGLE_FILE).exists()
    assert (read.unread_keys, read.dtype) == (tuple(key for key in layout.config if key in layout.unread), "bfloat16")
    ends = [values["eos_token_id"] for values in (layout.config, layout.generation)]
    ids = {layout.ids(text) for value in ends for text in ([value] if isinstance(value, str) else value)}
    assert read.eos_token_ids == ids
    assert ServedModel.read(directory).end_ids >= ids


@PUBLISHED
def test_its_chat_template_makes_the_prompt_of_the_family(name: str, tmp_path: Path) -> None:
    """The prompts are written by hand; transformers renders the same, and special tokens are one token each."""
    layout = LAYOUTS[name]
    layout.write(tmp_path)
    tokenizing = load_tokenizing(str(tmp_path))
    assert tokenizing.render(TALK) == layout.prompt
    other: Any = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert other.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == layout.prompt
    engine = ChatTemplate.load(tmp_path)
    assert engine is not None
    assert engine.render(TALK, {}) == layout.prompt
    (ids,) = tokenizing.encode([layout.prompt])
    assert [*ids] == other(layout.prompt, add_special_tokens=False)["input_ids"]
    special = sum(layout.prompt.count(text) for text in layout.specials)
    assert sum(token >= 256 for token in ids) == special > 0


@PUBLISHED
def test_a_copy_has_what_others_read_of_the_directory(name: str, tmp_path: Path) -> None:
    """All that an export holds besides its weights."""
    LAYOUTS[name].write(tmp_path)
    (tmp_path / "out").mkdir()
    copy_small_files(tmp_path, tmp_path / "out", tokenizer=True)
    expected = {"config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "LICENSE"}
    named = {LAYOUTS[name].template_file}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected | named
    assert load_tokenizing(str(tmp_path / "out")).render(TALK) == LAYOUTS[name].prompt


def test_mtp_weights_that_are_not_built_are_copied_into_an_export(
    published: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    given, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(published("ERNIE-4.5-21B-A3B-PT")[0], given)
    out.mkdir()
    parts = ("mtp_block.0.input_layernorm", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    further = {f"model.{part}.weight": torch.randn(32, dtype=torch.bfloat16) for part in parts}
    own = load_file(given / SINGLE_FILE)
    save_file(own | further, given / SINGLE_FILE, metadata={"format": "pt"})
    built, hf = load(given)
    check_weights(given, hf)
    write_model(whole_weights([built], hf), out, model_directory=given)
    add_copied(given, out, hf)
    after = read_tensors(out)
    assert after.keys() == own.keys() | further.keys()
    assert all(bytes(after[name].data()) == bytes(read_tensors(given)[name].data()) for name in further)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.quantized])
def test_a_config_of_a_model_published_in_fp8_is_read(name: str, tmp_path: Path) -> None:
    LAYOUTS[name].write(tmp_path)
    found = quantization_of(tmp_path)
    assert found is not None
    assert found.method == "fp8"
    assert "quantization_config" not in read_model(tmp_path).unread_keys


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2-Instruct", "Qwen3-0.6B"])
def test_code_of_a_model_changes_nothing_and_is_named(name: str, tmp_path: Path) -> None:
    """No code of a model is run, whatever it is called."""
    LAYOUTS[name].write(tmp_path, quantization_config=None, auto_map=None)
    without = read_model(tmp_path)
    assert "auto_map" not in without.unread_keys
    for code in ({"AutoModel": "modeling_other.X"}, {"AutoTokenizer": ["tokens.X", None]}):
        LAYOUTS[name].write(tmp_path, quantization_config=None, auto_map=code)
        found = read_model(tmp_path)
        assert found.shape == without.shape
        assert {*found.unread_keys} == {*without.unread_keys, "auto_map"}
