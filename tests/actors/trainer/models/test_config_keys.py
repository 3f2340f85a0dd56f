"""Which keys of config.json a start refuses, ignores or takes, against what transformers' classes do with them."""

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import actors.rollout.preflight as rollout
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.files import copy_small_files
from actors.trainer.preflight import check_model
from bin import describe_models
from runtime.models.config import ModelError, read_model
from runtime.models.config_keys import WITHOUT_EFFECT, config_table, sort_keys, without_effect
from runtime.models.family import families
from runtime.node.checks.context import CheckContext
from runtime.settings.load import load_topology
from runtime.settings.plan import draw, plan_of
from tests.actors.trainer.hf import classes_of, write_model
from tests.actors.trainer.tiny import TINY, VOCAB, config_of
from tests.runtime.settings.shipped import LAPTOP

OF_THE_HUB = {  # keys of published configs that transformers' classes do not read
    **{"is_llama_config": True, "rope_interleaved": False, "unk_token_id": 0, "model_max_length": 8192},
    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "unsloth_fixed": True},
    **{"_name_or_path": "./sft", "_attn_implementation_autoset": True, "logits_scaling": 8.0, "seq_aux": True},
}
ODD: dict[str, Any] = {  # values that are not the default; keys that are missing get the value of `odd`
    **{"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}, "num_labels": 3},
    **{"problem_type": "regression", "name_or_path": "x", "transformers_version": "1.0"},
    **{"attn_implementation": "eager", "experts_implementation": "eager", "max_window_layers": 1},
    **{"architectures": ["OtherForCausalLM"]},
}


RETURN_TUPLES = "return_dict"  # its other value makes transformers' causal models fail: they ask a tuple for its names


def odd(default: Any) -> Any:
    """Return a value of a default's type that differs from it."""
    return not default if isinstance(default, bool) else 0.5 if isinstance(default, float) else 3


def reads_of(kind: str) -> Mapping[str, Any]:
    return config_table().reads(families()[kind].architecture)


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(tokens, return_dict=True)
    return found.logits


def with_keys(model: Any, kind: str, keys: dict[str, Any]) -> Any:
    """Make the same model of transformers from the config with further keys."""
    config_type, model_type = classes_of(kind)
    config = config_type.from_dict(json.loads(model.config.to_json_string()) | deepcopy(keys))
    other = model_type(config).float().eval()
    other.load_state_dict(model.state_dict())
    return other


def test_the_table_and_its_page_are_those_of_the_pinned_transformers() -> None:
    """The page of a checkout lies in docs/reference, where the command looks for it."""
    assert describe_models.main(["--check"]) == 0


def test_a_stale_table_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    table = tmp_path / "config_keys.json"
    table.write_text(describe_models.TABLE.read_text().replace('"is_causal": true', '"is_causal": false'))
    monkeypatch.setattr(describe_models, "TABLE", table)
    assert describe_models.main(["--check", "--docs", str(tmp_path)]) == 1
    assert f"{table}: not current: run bin/describe-models" in capsys.readouterr().err
    assert describe_models.main(["--docs", str(tmp_path)]) == 0
    assert describe_models.main(["--check", "--docs", str(tmp_path)]) == 0


def test_the_table_has_the_keys_that_the_classes_document() -> None:
    """By hand, from the classes of 5.23: a field, one of the base class, an old name, an alias, and a key of masks."""
    llama, deepseek = (reads_of(kind) for kind in ("llama", "deepseek_v3"))
    assert {"mlp_bias", "is_causal", "torch_dtype", "rope_scaling", "per_layer_config", "attention_chunk_size"} <= {
        *llama
    }
    assert (llama["mlp_bias"], llama["is_causal"], llama["rms_norm_eps"]) == (False, True, 1e-6)
    assert {"q_lora_rank", "num_mtp_layers", "num_nextn_predict_layers", "num_local_experts"} <= {*deepseek}
    assert not {*OF_THE_HUB} & {*llama, *deepseek}


@pytest.mark.parametrize("kind", families())
def test_keys_without_effect_and_keys_that_no_class_reads_change_no_logits(tmp_path: Path, kind: str) -> None:
    model, reads = write_model(tmp_path, kind), reads_of(kind)
    silent = WITHOUT_EFFECT | {*families()[kind].without_effect}
    keys = {key: ODD.get(key, odd(reads[key])) for key in (silent - {RETURN_TUPLES}) & {*reads}}
    further = OF_THE_HUB | dict.fromkeys({*config_table().dropped} - silent, 3)
    expected = logits(model)
    for each in (further, *({key: value} for key, value in keys.items())):
        torch.testing.assert_close(logits(with_keys(model, kind, each)), expected, rtol=0, atol=1e-5)


def test_the_comparison_sees_a_key_that_has_an_effect(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama")
    assert not torch.equal(logits(with_keys(model, "llama", {"is_causal": False})), logits(model))


def test_no_key_is_called_without_effect_that_no_class_reads_or_that_is_built() -> None:
    assert {key for kind in families() for key in reads_of(kind)} >= WITHOUT_EFFECT
    for kind, family in families().items():
        assert reads_of(kind).keys() >= {*family.without_effect}
        assert without_effect(family) & family.built_keys <= {"architectures"}


@pytest.mark.parametrize("kind", families())
def test_an_ignored_key_is_as_if_it_were_absent_and_one_that_is_built_cannot_be_ignored(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind)))
    plain = read_model(tmp_path)
    wrong = {"is_causal": False, "quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoModel": "m.X"}}
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, **wrong)))
    found = read_model(tmp_path, (*wrong,))
    assert (found.shape, found.ignored_keys, found.unread_keys) == (plain.shape, (*wrong,), plain.unread_keys)
    for key in sorted(families()[kind].built_keys):
        with pytest.raises(ModelError) as refused:
            read_model(tmp_path, (*wrong, key))
        assert [problem.partition(": ")[2] for problem in refused.value.problems] == [
            f"model.ignore_config_keys: {key} cannot be ignored, as the model is built from it"
        ]


def test_a_copied_config_describes_the_model_without_the_ignored_keys(tmp_path: Path) -> None:
    """As an export and published weights have it; transformers then computes what was trained."""
    ignored, (first, second) = ("is_causal", "attention_chunk_size"), (tmp_path / "first", tmp_path / "second")
    model = write_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False, "attention_chunk_size": 2}))
    for source, copy, keys in ((tmp_path, first, ignored[:1]), (first, second, ignored)):
        copy.mkdir()
        copy_small_files(source, copy, tokenizer=False, ignored=keys)
        shutil.copyfile(tmp_path / "model.safetensors", copy / "model.safetensors")
    copied = json.loads((second / "config.json").read_text())
    assert copied == config | {"_ignored_config_keys": {"is_causal": False, "attention_chunk_size": 2}}
    assert read_model(second).shape == read_model(tmp_path, ignored).shape
    loaded = transformers.AutoModelForCausalLM.from_pretrained(second).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-6)


def test_a_start_names_the_ignored_keys_with_their_values_and_refuses_one_that_is_not_there(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False, "is_llama_config": True}))
    settings = [f"model.hf_checkpoint={tmp_path}", 'model.ignore_config_keys=["is_causal", "is_casual"]']
    context = CheckContext(load_topology(LAPTOP, settings))
    assert [(problem.key, problem.value) for problem in check_model(context)] == [
        ("model.ignore_config_keys", '"is_casual"')
    ]
    named, unread = context.notes
    assert named == "model.ignore_config_keys: the run trains a model without is_causal = false of config.json"
    assert unread.endswith("as transformers' Qwen3ForCausalLM does not read them: is_llama_config")
    assert "  ignored  keys of its config.json: is_causal, is_casual" in draw(
        context.topology, plan_of(context.topology, {})
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((), "engines.policy start without quantization and without that directory's weights"),
        (('engines.policy.urls=["http://127.0.0.1:1"]',), "updates wrongly; start it without quantization"),
    ],
)
def test_a_check_says_what_becomes_of_quantized_weights(settings: tuple[str, ...], says: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    here = [f"model.hf_checkpoint={tmp_path}", "model.random_init=false"]
    context = CheckContext(load_topology(LAPTOP, [*here, *settings]))
    assert not [*check_model(context)]
    first, second = context.notes
    assert first.startswith("model.hf_checkpoint is quantized (fp8): the trainer dequantizes its weights")
    assert says in second
    rollouts = CheckContext(load_topology(LAPTOP, [*here, 'run.only="rollout"']))
    (problem,) = rollout.check_model(rollouts)
    assert "a trainer dequantizes" in problem.message


@pytest.mark.parametrize("kind", families())
def test_keys_that_no_class_reads_are_ignored_and_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind)))
    plain = read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind, **OF_THE_HUB)))
    found = read_model(tmp_path)
    named = [key for key in OF_THE_HUB if not key.startswith("_")]
    assert (found.shape, [*found.unread_keys]) == (plain.shape, [key for key in named if key not in plain.unread_keys])


values = st.none() | st.booleans() | st.integers(-3, 9) | st.text("ab", max_size=2) | st.lists(st.integers(0, 3))


@given(kind=st.sampled_from([*families()]), data=st.data())
def test_a_key_that_a_class_reads_and_that_is_not_built_has_its_default_or_is_refused(kind: str, data: Any) -> None:
    reads, family = reads_of(kind), families()[kind]
    others = sorted({*reads} - family.built_keys - without_effect(family) - {"quantization_config"})
    key, value = data.draw(st.sampled_from(others)), data.draw(values)
    found = sort_keys({key: value, "of_no_class": value}, family)
    assert found.unread == ("of_no_class",)
    assert [problem.split()[0] for problem in found.problems] == ([] if value == reads[key] else [key])


def test_all_problems_of_a_config_are_named_at_once(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        **{"is_causal": False, "quantization_config": {"quant_method": "awq"}},
        **{"hidden_act": "gelu", "dtype": "int8", "layer_types": ["chunked_attention"], "max_position_embeddings": 1},
        **{"num_experts_per_tok": 9, "n_group": 2, "rope_theta": -1.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config_of("glm4_moe", **wrong) | {"rope_parameters": None}))
    with pytest.raises(ModelError) as refused:
        read_hf_config(tmp_path)
    file = str(tmp_path / "config.json")
    assert all(problem.startswith(f"{file}: ") for problem in refused.value.problems)
    for key in wrong:
        assert sum(problem.startswith(f"{file}: {key}") for problem in refused.value.problems) == 1, key
    assert len(refused.value.problems) == len(wrong)


def test_all_keys_with_values_of_another_type_are_named_at_once(tmp_path: Path) -> None:
    wrong = {"hidden_size": "wide", "vocab_size": None, "layer_types": [3], "num_experts_per_tok": "two"}
    (tmp_path / "config.json").write_text(json.dumps(TINY | config_of("qwen3_moe", **wrong)))
    with pytest.raises(ModelError) as refused:
        read_model(tmp_path)
    told = [problem.removeprefix(f"{tmp_path / 'config.json'}: ").split(":")[0] for problem in refused.value.problems]
    assert told == ["vocab_size", "hidden_size", "layer_types", "num_experts_per_tok"]
