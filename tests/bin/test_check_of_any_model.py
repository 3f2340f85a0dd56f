"""`--check` of any model directory ends within seconds, in little memory, and names what asks for more."""

import json
import shutil
import struct
from pathlib import Path

import pytest

import actors.preflight  # noqa: F401 - here once, not in the process of each check
from actors.buffer.prompts.tokenizing import FastTokenizing
from bin.start_topology import main
from runtime.data.chat_template import RENDERING_BYTES, TooMuch
from runtime.models.config import LARGEST, ModelError, read_model
from runtime.models.safetensors import MAX_HEADER_BYTES, MAX_TENSORS, read_tensors
from runtime.util.memory import MemoryLimit

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "topologies/laptop.toml"
MODEL = ROOT / "topologies/demo/models/reverse-digits"
DEEP = '{"a":' * 100_000
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4096,
    "moe_intermediate_size": 1,
    "num_hidden_layers": 2048,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def set_keys(model: Path, **values: object) -> Path:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return model


def checked(model: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What `--check` says against a model directory."""
    given = ("run.name=any-model", "eval=[]", f"model.hf_checkpoint={model}", *overrides)
    code = main([str(LAPTOP), "--check", *(word for item in given for word in ("--set", item))])
    said = capsys.readouterr().err
    assert code == 2, said
    assert "model.hf_checkpoint" in said
    return said


@pytest.mark.parametrize("key", LARGEST)
@pytest.mark.parametrize("size", [10**9, 10**18, 10**30])
def test_a_size_beyond_all_models_is_refused_by_its_key(model: Path, key: str, size: int) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{key}"):
        read_model(set_keys(model, **{key: size}))


def test_sizes_that_are_too_many_tensors_together_are_refused(model: Path) -> None:
    with pytest.raises(ModelError, match=rf"num_hidden_layers 2048 with 4096 experts .* at most {MAX_TENSORS:,}"):
        read_model(set_keys(model, **MOE))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *((name, DEEP, f"{name}: JSON is nested too deeply") for name in ("config.json", "tokenizer_config.json")),
        ("generation_config.json", '{"eos_token_id":' + "[" * 100_000, "generation_config.json: "),
        ("tokenizer.json", DEEP, "tokenizer.json: "),
        ("config.json", '{"a": ' + "[" * 5_000 + "]" * 5_000 + "}", "nested too deeply"),
        ("config.json", " " * (17 << 20) + "{}", "has more than 16,777,216 bytes"),
    ],
    ids=("config", "tokenizer config", "generation config", "tokenizer", "an unknown key", "a long file"),
)
def test_a_hostile_file_is_named(
    model: Path, name: str, content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / name).write_text(content)
    assert says in checked(model, capsys)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": "x", "low_freq_factor": 1, "high_freq_factor": 4}},
        {"rope_scaling": {"type": [1]}},
        {"rope_parameters": {"rope_theta": [1]}},
        {"rope_theta": 1e400},
        {"rope_scaling": {"rope_type": "yarn", "factor": 10**400, "original_max_position_embeddings": 1}},
        {"eos_token_id": {"a": 1}},
        {"num_hidden_layers": 1.5},
        {"architectures": []},
    ],
)
def test_a_value_of_another_kind_is_an_error_that_names_the_file(model: Path, keys: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"config\.json: "):
        read_model(set_keys(model, **keys))


HEADERS = {
    "nested": (DEEP.encode(), "nested too deeply"),
    "many tensors": (b"{" + b'"a":{},' * (MAX_TENSORS + 5) + b'"b":{}}', f"more than {MAX_TENSORS:,} tensors"),
    "no offsets": (b'{"a":{"dtype":"F32","shape":[1]}}', "a has no dtype or no data_offsets"),
    "numbers": (b'{"a":1}', "Expected `object`"),
    "too long": (b"{" + b" " * MAX_HEADER_BYTES + b"}", f"at most {MAX_HEADER_BYTES:,} are read"),
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_hostile_header_is_named(model: Path, header: str) -> None:
    content, says = HEADERS[header]
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{says}"):
        read_tensors(model)


def test_an_index_of_too_many_names_is_not_decoded(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        '{"weight_map": {' + '"a":"b",' * (2 * MAX_TENSORS) + '"c":"d"}}'
    )
    with pytest.raises(ValueError, match=f"names more than {MAX_TENSORS:,} tensors"):
        read_tensors(model)


TEMPLATES = {
    "a product": "{{ 'x' * 1000000000 }}",
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "a filter": "{{ 'x'|center(1000000000) }}",
    "a method": "{{ 'x'.ljust(1000000000) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "an indent": "{{ messages|tojson(indent=1000000000) }}",
    "a list": "{{ ([0] * 1000000000)|length }}",
    "a replacement": "{{ ('x' * 60000).replace('x', 'y' * 60000) }}",
    "a long literal": "{{ '" + "x" * 1_000_000 + "' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_makes_a_huge_text_is_refused(
    model: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    said = checked(model, capsys, "data.0.apply_chat_template=true")
    assert "the chat template of " in said
    assert f"asks for more than {RENDERING_BYTES >> 20} MiB of memory" in said or "makes a text of " in said


def test_a_template_may_add_to_its_messages_but_not_without_end(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ '-' * 60000 }}{{ messages[0].content|upper * 4 }}")
    tokenizing = FastTokenizing(model)
    long = "a" * 200_000
    assert tokenizing.render([{"role": "user", "content": long}]) == "-" * 60_000 + long.upper() * 4
    (model / "chat_template.jinja").write_text("{% for i in range(100) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(TooMuch, match="makes a text of"):
        FastTokenizing(model).render([{"role": "user", "content": long}])


def test_a_tokenizer_whose_normalizer_blows_texts_up_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ten_times = {"type": "Replace", "pattern": {"Regex": "."}, "content": "1" * 10}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [ten_times] * 9}
    file.write_text(json.dumps(tokenizer))
    assert "tokenising a short text with its tokenizer " in checked(model, capsys)


def test_memory_is_limited_in_a_block_alone() -> None:
    with pytest.raises(MemoryError), MemoryLimit(1 << 26):
        bytes(1 << 30)
    assert len(bytes(1 << 28)) == 1 << 28


def test_a_process_that_has_grown_since_the_last_block_may_allocate_as_much_again() -> None:
    """With the limit of an earlier block, Python blamed the template: "'Parser' object is not iterable"."""
    limit = MemoryLimit(1 << 26)
    with limit:
        pass
    grown = bytearray(1 << 28)
    with limit:
        assert not any(bytearray(1 << 25))
    with pytest.raises(MemoryError), limit:
        bytearray(1 << 28)
    del grown
