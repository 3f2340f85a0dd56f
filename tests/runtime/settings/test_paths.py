"""Files that a topology names: where they are looked up, and what is refused of them."""

import os
from pathlib import Path

import pytest

from runtime.settings.load import LoadedTopology, load_topology
from runtime.settings.reading.config import TopologyError
from tests.runtime.settings.shipped import LAPTOP, ROOT
from tests.support.checks import checked_here

# What is looked for on this machine


def test_paths_of_a_file_are_found_beside_it_before_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "demo/data/reverse-digits/train.jsonl"
    shadow.parent.mkdir(parents=True)
    shadow.write_text('{"input": "1", "label": "1"}\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # of which ../demo is the shadow
    topology = load_topology(LAPTOP).topology
    assert topology.data[0].path == str(ROOT / "topologies/demo/data/reverse-digits/train.jsonl")
    assert topology.model.hf_checkpoint == str(ROOT / "topologies/demo/models/reverse-digits")
    assert topology.run.dir == str(tmp_path / "here/runs")


@pytest.mark.parametrize("name", ["laptop.toml", "recipes/reverse-digits.toml", "boxed-copy-sft.toml"])
def test_a_topology_of_ones_own_may_include_a_shipped_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f'include = "{name}"\nrun.name = "mine"\ntrainer.device = "cpu"\nengines.policy = {{ kind = "tiny" }}\n'
        if "recipes" in name
        else f'include = "{name}"\nrun.name = "mine"\n'
    )
    topology = load_topology(Path("mine.toml")).topology
    for path in (topology.model.hf_checkpoint, topology.data[0].path):
        assert str(path).startswith(str(ROOT / "topologies/demo"))
        assert Path(str(path)).exists()


def test_paths_of_an_override_are_found_in_the_current_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"input": "1", "label": "1"}\n')
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    overrides = ("data.0.path=mine.jsonl", "data.0.rm_type=mine.py:grade", "rollout.dynamic_filter=mine.py:keep",
                 "rollout.buffer_filter=mine.py:first", "rollout.custom_generate=mine.py:talk")  # fmt: skip
    topology = load_topology(LAPTOP, overrides).topology
    assert topology.data[0].path == str(tmp_path / "mine.jsonl")
    assert topology.data[0].rm_type == f"{tmp_path}/mine.py:grade"
    assert topology.rollout.dynamic_filter == f"{tmp_path}/mine.py:keep"
    assert topology.rollout.buffer_filter == f"{tmp_path}/mine.py:first"
    assert topology.rollout.custom_generate == f"{tmp_path}/mine.py:talk"


def test_the_file_of_a_function_is_found_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    loaded = load_topology(LAPTOP, ("data.0.path=none", "data.0.source=mine.py:source", "rollout.shuffle=false"))
    assert loaded.topology.data[0].source == f"{tmp_path}/mine.py:source"
    assert checked_here(loaded).problems == ()


def test_the_file_of_a_slice_is_found_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("data.0.path=demo/data/reverse-digits/train.jsonl@[10:20]", "eval.0.path=mine.jsonl@[:1]")
    monkeypatch.chdir(tmp_path)
    loaded = load_topology(LAPTOP, overrides)
    assert loaded.topology.data[0].path == f"{ROOT}/topologies/demo/data/reverse-digits/train.jsonl@[10:20]"
    assert [str(problem) for problem in checked_here(loaded).problems] == [
        f'--set: eval.0.path = "mine.jsonl@[:1]": no such file (looked in {tmp_path}, {ROOT / "topologies"})'
    ]
    (tmp_path / "mine.jsonl@[:1]").write_text('{"input": "1", "label": "1"}\n')
    assert load_topology(LAPTOP, overrides).topology.eval[0].path == f"{tmp_path}/mine.jsonl@[:1]"


def test_an_empty_slice_is_an_input_error_with_the_length_of_its_file() -> None:
    loaded = load_topology(LAPTOP, ("data.0.path=demo/data/reverse-digits/train.jsonl@[78:]",))
    (problem,) = checked_here(loaded).problems
    assert problem.message.endswith("the slice is empty: " + loaded.topology.data[0].path[:-6] + " has 78 rows")


def test_a_path_found_nowhere_is_kept_and_reported_with_the_places() -> None:
    loaded = load_topology(LAPTOP, ("data.0.path=no/such.jsonl",))
    assert loaded.topology.data[0].path == "no/such.jsonl"
    (problem,) = checked_here(loaded).problems
    assert problem.key == "data.0.path"
    assert problem.file == "--set"
    assert problem.message == f"no such file (looked in {Path.cwd()}, {ROOT / 'topologies'})"


def checked(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return [str(problem) for problem in checked_here(load_topology(LAPTOP, (f"data.0.path={path}",))).problems]


def test_a_malformed_line_is_an_input_error_with_its_number(tmp_path: Path) -> None:
    (line,) = checked(tmp_path, '{"input": "12", "label": "21"}\n{"input": "1\n')
    assert line.startswith(f'--set: data.0.path = "{tmp_path}/rows.jsonl": {tmp_path}/rows.jsonl:2: not a JSON object')


def test_a_missing_column_is_an_input_error_that_names_the_columns_there(tmp_path: Path) -> None:
    (line,) = checked(tmp_path, '{"input": "12", "answer": "21"}\n')
    assert line.endswith("rows.jsonl:1: no column 'label' (label_key); there are: input, answer")


def test_an_empty_file_is_an_input_error(tmp_path: Path) -> None:
    (line,) = checked(tmp_path, "\n")
    assert line.endswith("the file has no rows")


def model_problems(directory: Path, *overrides: str) -> list[str]:
    loaded: LoadedTopology = load_topology(LAPTOP, (f"model.hf_checkpoint={directory}", *overrides))
    return [problem.message for problem in checked_here(loaded).problems]


def test_a_model_directory_needs_config_tokenizer_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_problems(tmp_path) == [
        "no tokenizer in this directory: tokenizer.json, tokenizer.model, vocab.json or tiktoken.model",
    ]
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert model_problems(tmp_path, "model.random_init=false") == [
        "no config.json in this directory",
        "no weights in this directory: model.safetensors or model.safetensors.index.json; "
        "model.random_init = true draws them from run.seed",
    ]


def test_a_misspelt_model_directory_is_not_taken_for_a_hub_name() -> None:
    loaded = load_topology(LAPTOP, ("model.hf_checkpoint=demo/models/reverse-digit",))
    (problem,) = checked_here(loaded).problems
    assert problem.message.startswith("no such directory (looked in ")


def test_directories_of_an_engines_import_path_are_looked_up_beside_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shim").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    file = tmp_path / "mine.toml"
    path = os.pathsep.join(["shim", "/elsewhere", "nowhere", ""])
    file.write_text(f'include = "laptop.toml"\n[engines.policy.env]\nPYTHONPATH = "{path}"\nA = "shim"\n')
    env = load_topology(file).topology.engines["policy"].env
    assert env == {"PYTHONPATH": os.pathsep.join([str(tmp_path / "shim"), "/elsewhere", "nowhere", ""]), "A": "shim"}


def test_a_missing_file_of_a_function_is_named_before_other_problems_of_the_settings() -> None:
    wrong = (
        "algorithm.loss={type = 'custom', function = 'no_such_file.py:loss'}",
        "rollout.temperature=1",
        "algorithm.num_steps_per_rollout=3",
    )
    with pytest.raises(TopologyError) as error:
        load_topology(LAPTOP, (*wrong, "reward.graders.own=neither.py:grade"))
    first, second, *others = error.value.problems
    assert [(one.key, one.message[:12]) for one in (first, second)] == [
        ("algorithm.loss.function", "no such file"),
        ("reward.graders.own", "no such file"),
    ]
    assert "allowed" not in first.message
    assert others
