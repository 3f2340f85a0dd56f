"""Prompts from JSONL: order over epochs, columns, filtering, and what bad input is told."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.buffer.prompts.prompts import LoadedData, PromptReader, fingerprint_of
from actors.buffer.prompts.source import (
    PromptSet,
    epoch_order,
    first_of_evaluation,
    first_prompts,
    load_data,
    load_prompts,
    mixture_of,
    place_of,
)
from actors.buffer.prompts.tokenizing import Tokenizing, load_tokenizing
from messages import Prompt
from messages.arrays import Int32Array
from runtime.data.data_files import DataError
from runtime.data.rows import read_rows
from runtime.settings.derived import MIX_BLOCK
from runtime.settings.load import load_topology
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import Topology

ROOT = Path(__file__).resolve().parents[4]
LAPTOP = ROOT / "topologies/laptop.toml"
MODEL = ROOT / "topologies/demo/models/reverse-digits"


def laptop(*overrides: str) -> Topology:
    return load_topology(LAPTOP, overrides).topology


@pytest.fixture(scope="module")
def tokenizing() -> Tokenizing:
    return load_tokenizing(str(MODEL))


def source(size: int, *, name: str = "d", **options: Any) -> PromptSet:
    return PromptSet([data(size, name)], **options)


def data(size: int, name: str = "d") -> LoadedData:
    prompts = tuple(
        Prompt(data=name, row=row, text=str(row), prompt_ids=Int32Array([row]), rm_type="x") for row in range(size)
    )
    return LoadedData(name=name, prompts=prompts, num_too_long=0, took_s=0.0)


def test_the_first_prompts_of_a_run_come_from_files_functions_and_classes_alike(tmp_path: Path) -> None:
    """In the order of issue, at most all that there are, and rendered as the run renders them."""
    prompts = load_prompts(laptop())
    assert [each.row for each in first_prompts(laptop(), 5)] == [prompts.prompt(number).row for number in range(5)]
    rows = tmp_path / "two.jsonl"
    rows.write_text('{"input": "12", "label": "21"}\n{"input": "34", "label": "43"}\n')
    few = first_prompts(laptop(f"data.0.path={rows}", "eval=[]"), 5)
    assert sorted((each.label, "12" in each.text or "34" in each.text) for each in few) == [("21", True), ("43", True)]
    (tmp_path / "makes.py").write_text("""
def row(number):
    return {"input": str(number), "label": str(number)}

class Rows:
    def draw(self, number):
        return row(number)
    def state(self):
        return None
    def restore(self, state):
        pass
""")
    for made in (f"data.0.source={tmp_path}/makes.py:row", f"data.0.source_class={tmp_path}/makes.py:Rows"):
        found = first_prompts(laptop("data.0.path=none", made, "eval=[]", "rollout.shuffle=false"), 3)
        assert [each.label for each in found] == ["0", "1", "2"]
        assert found[1].text == few[0].text.replace(few[0].label[::-1], "1")
    held_out = laptop(f"eval=[{{name='e', path='{rows}', interval=1}}]")
    assert [each.label for each in first_of_evaluation(held_out, 1)] == ["21"]


# Order


@given(st.integers(1, 400), st.integers(-(2**70), 2**70), st.integers(0, 10**12))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(size, seed, epoch).tolist()) == list(range(size))


@given(st.integers(1, 20), st.integers(0, 2**64), st.integers(0, 10**9), st.integers(1, 200), st.booleans())
def test_any_stretch_of_numbers_is_the_same_however_it_is_asked_for(
    size: int, seed: int, start: int, count: int, shuffle: bool
) -> None:
    """Many wraps in one stretch (the reference allowed one), and again one by one after a restart."""
    numbers = range(start, start + count)
    first = [place_of(number, size, shuffle=shuffle, seed=seed) for number in numbers]
    epoch_order.cache_clear()
    again = [place_of(number, size, shuffle=shuffle, seed=seed) for number in reversed(numbers)]
    assert first == again[::-1]
    assert [place.epoch for place in first] == [number // size for number in numbers]


@given(st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_each_epoch_issues_every_prompt_once(size: int, epoch: int, shuffle: bool) -> None:
    prompts = source(size, shuffle=shuffle, seed=3)
    rows = [prompts.prompt(number).row for number in range(epoch * size, (epoch + 1) * size)]
    assert sorted(rows) == list(range(size))


def test_without_shuffle_rows_come_in_file_order_and_begin_again() -> None:
    assert [source(3).prompt(number).row for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_are_ordered_differently() -> None:
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def philox_words(seed: int, epoch: int, count: int) -> list[int]:
    """Philox4x64-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); blocks from counter 1."""
    mask, words = 2**64 - 1, []
    for block in range(1, count // 4 + 2):
        x, key = [block, 0, 0, 0], [seed, epoch]
        for _ in range(10):
            low, high = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
            x = [high >> 64 ^ x[1] ^ key[0], high & mask, low >> 64 ^ x[3] ^ key[1], low & mask]
            key = [key[0] + 0x9E3779B97F4A7C15 & mask, key[1] + 0xBB67AE8584CAA73B & mask]
        words += x
    return words[:count]


@given(st.integers(1, 40), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_the_order_sorts_the_words_of_philox_so_that_it_stays_the_same_for_good(
    size: int, seed: int, epoch: int
) -> None:
    words = philox_words(seed, epoch, size)
    assert epoch_order(size, seed, epoch).tolist() == sorted(range(size), key=words.__getitem__)


def test_a_negative_number_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="prompt -1 does not exist"):
        source(3).prompt(-1)


def test_several_sources_are_laid_end_to_end_and_mixed_by_the_shuffle() -> None:
    plain = PromptSet([data(2, "a"), data(3, "b")])
    assert [(plain.prompt(n).data, plain.prompt(n).row) for n in range(6)] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("a", 0),
    ]  # fmt: skip
    mixed = PromptSet([data(20, "a"), data(30, "b")], shuffle=True, seed=1)
    names = [mixed.prompt(number).data for number in range(50)]
    assert names.count("a") == 20
    assert names != sorted(names)


def test_sources_of_a_recipe_keep_their_columns_names_and_graders_through_the_mix(tmp_path: Path) -> None:
    sums, facts = tmp_path / "sums.jsonl", tmp_path / "facts.jsonl"
    sums.write_text("".join(json.dumps({"input": str(n), "label": str(n)}) + "\n" for n in range(10, 30)))
    facts.write_text("".join(json.dumps({"q": str(n), "a": [str(n)]}) + "\n" for n in range(40, 50)))
    columns = {"input_key": "q", "label_key": "a", "apply_chat_template": False, "rm_type": "f1"}
    overrides = [f"data.0.path={sums}@[:15]", "data.1.name=facts", f"data.1.path={facts}"]
    overrides += [f"data.1.{key}={json.dumps(value)}" for key, value in columns.items()]
    prompts = load_prompts(laptop(*overrides))
    assert [(loaded.data, loaded.num_prompts) for loaded in prompts.loaded[:2]] == [
        ("reverse-digits", 15),
        ("facts", 10),
    ]
    epoch = [prompts.prompt(number) for number in range(25)]
    assert sorted(prompt.row for prompt in epoch if prompt.data == "reverse-digits") == list(range(15))
    assert sorted(prompt.row for prompt in epoch if prompt.data == "facts") == list(range(10))
    assert {(prompt.data, prompt.rm_type, type(prompt.label)) for prompt in epoch} == {
        ("reverse-digits", "positional_match", str),
        ("facts", "f1", list),
    }
    assert all(prompt.text.startswith("<user>") == (prompt.data == "reverse-digits") for prompt in epoch)


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptSet([])


@pytest.mark.parametrize(
    "change",
    [
        {"data": "e"},
        {"row": 9},
        {"text": "x"},
        {"prompt_ids": Int32Array([7])},
        {"label": 1},
        {"metadata": {"k": 1}},
        {"rm_type": "f1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_changes_with_anything_of_any_prompt(change: dict[str, Any]) -> None:
    prompts = data(3).prompts
    changed = (*prompts[:2], msgspec.structs.replace(prompts[2], **change))
    assert fingerprint_of(prompts) == data(3).event.fingerprint
    assert fingerprint_of(changed) != fingerprint_of(prompts)


def test_the_fingerprint_changes_with_order_and_length() -> None:
    prompts = data(3).prompts
    assert len({fingerprint_of(items) for items in (prompts, prompts[::-1], prompts[:2], data(4).prompts)}) == 4


# The laptop recipe


def test_laptop_prompts_are_rendered_and_tokenised() -> None:
    prompts = load_prompts(laptop())
    assert len(prompts) == 78
    assert [(loaded.data, loaded.num_prompts, loaded.num_too_long) for loaded in prompts.loaded] == [
        ("reverse-digits", 78, 0),
        ("reverse-digits-held-out", 22, 0),
    ]
    prompt = next(prompts.prompt(number) for number in range(78) if prompts.prompt(number).label == "21")
    assert prompt.text == "<user>12<assistant>"
    assert prompt.prompt_ids.tolist() == [2, 7, 8, 3]
    assert prompt.prompt_ids.dtype == np.int32
    assert (prompt.data, prompt.rm_type, prompt.metadata) == ("reverse-digits", "positional_match", {})
    held_out = prompts.evals["reverse-digits-held-out"]
    assert {item.rm_type for item in held_out} == {"exact_match"}
    assert {item.text for item in held_out}.isdisjoint({prompts.prompt(number).text for number in range(78)})


def test_prompts_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from pathlib import Path; from runtime.settings.load import load_topology; "
        "from actors.buffer.prompts.source import load_prompts; "
        f"load_prompts(load_topology(Path({str(LAPTOP)!r})).topology); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=200, text=True
    )
    assert result.stdout.strip() == "[]"


# Columns


def config(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(**{"name": "d", "path": str(path), "rm_type": "exact_match", **settings})


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(path: Path, tokenizing: Tokenizing, limit: int | None = None, **settings: Any) -> LoadedData:
    return load_data(config(path, **settings), PromptReader(tokenizing, limit))


def error(path: Path, tokenizing: Tokenizing, limit: int | None = None, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, tokenizing, limit, **settings)
    return str(caught.value)


def test_metadata_is_an_object_or_a_string_with_its_json(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(
        tmp_path,
        {"input": "1", "metadata": {"a": 1}},
        {"input": "2", "metadata": '{"a": 2}'},
        {"input": "3", "metadata": None},
        {"input": "4", "metadata": ""},
        {"input": "5"},
    )
    assert [prompt.metadata for prompt in load(path, tokenizing).prompts] == [{"a": 1}, {"a": 2}, {}, {}, {}]


def test_columns_go_by_the_names_of_the_recipe(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(tmp_path, {"q": "12", "a": ["3", "4"], "m": {"k": 1}, "t": [{"type": "function"}]})
    settings = {"input_key": "q", "label_key": "a", "metadata_key": "m", "tool_key": "t"}
    (prompt,) = load(path, tokenizing, **settings).prompts
    assert prompt.text == "12"
    assert prompt.label == ["3", "4"]
    assert prompt.metadata == {"k": 1, "tools": [{"type": "function"}]}


def test_input_may_be_a_text_or_chat_messages(tmp_path: Path, tokenizing: Tokenizing) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    path = write(tmp_path, {"input": "12"}, {"input": turns})
    prompts = load(path, tokenizing, apply_chat_template=True).prompts
    assert [prompt.text for prompt in prompts] == ["<user>12<assistant>", "<user>1<assistant>2<end><user>3<assistant>"]
    assert "set apply_chat_template = true" in error(path, tokenizing)


def test_template_arguments_are_passed_on(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(tmp_path, {"input": "12"})
    options = {"apply_chat_template": True, "apply_chat_template_kwargs": {"add_generation_prompt": False}}
    assert load(path, tokenizing, **options).prompts[0].text == "<user>12"


def test_tools_are_shown_to_the_template_and_kept_for_graders(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    turns = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(turns)
    tools = [{"name": "1"}, {"name": "2"}]
    path = write(
        tmp_path,
        {"input": "9", "tools": tools, "metadata": {"k": 1}},
        {"input": "9", "tools": json.dumps(tools)},
        {"input": "9", "metadata": {"tools": tools}},
        {"input": "9", "tools": None},
    )
    prompts = load(path, load_tokenizing(str(model)), apply_chat_template=True).prompts
    assert [prompt.text for prompt in prompts] == ["129", "129", "129", "9"]
    assert [prompt.metadata for prompt in prompts] == [{"k": 1, "tools": tools}, *[{"tools": tools}] * 2, {}]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(tmp_path, '\ufeff{"input": "1"}', "", '  {"input": "2"}  ')
    rows = list(read_rows(config(path)))
    assert [(row.number, row.place) for row in rows] == [(0, f"{path}:1"), (1, f"{path}:3")]
    assert len(load(path, tokenizing).prompts) == 2


def test_a_row_may_name_another_built_in_grader_but_no_code(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(tmp_path, {"input": "1", "metadata": {"rm_type": "f1"}}, {"input": "2"})
    assert [prompt.rm_type for prompt in load(path, tokenizing).prompts] == ["f1", "exact_match"]
    assert ":2: no grader: set rm_type" in error(path, tokenizing, rm_type=None)
    path = write(tmp_path, {"input": "1", "metadata": {"rm_type": "os:system"}})
    assert "a row may name only a built-in grader" in error(path, tokenizing)


# Filtering


def test_prompts_over_the_limit_are_left_out_and_counted(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(tmp_path, {"input": "1"}, {"input": "12345"}, {"input": "123"})
    loaded = load(path, tokenizing, 3)
    assert [(prompt.row, prompt.text) for prompt in loaded.prompts] == [(0, "1"), (2, "123")]
    assert loaded.num_too_long == 1
    assert loaded.event.num_too_long == 1


def test_every_prompt_over_the_limit_is_an_error(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(tmp_path, {"input": "1234"}, {"input": "12345"})
    assert error(path, tokenizing, 3) == (
        f"{path}: no row is short enough; in the shortest one the prompt has 4 tokens, over the limit of 3 tokens "
        "(rollout.max_prompt_len, or rollout.max_context_len - 1)"
    )


def test_the_limit_follows_from_the_context_length() -> None:
    with pytest.raises(DataError, match="over the limit of 3 tokens"):
        load_prompts(laptop("rollout.max_prompt_len=none", "rollout.max_context_len=4"))


# Bad input


@pytest.mark.parametrize(
    ("turn", "said"), [({"from": "human", "value": "1"}, "from, value"), ({"role": None}, "role"), ({}, "nothing")]
)
def test_messages_without_a_role_are_refused(
    tmp_path: Path, tokenizing: Tokenizing, turn: dict[str, Any], said: str
) -> None:
    path = write(tmp_path, {"input": [{"role": "user", "content": "1"}, turn]})
    assert error(path, tokenizing, apply_chat_template=True).endswith(f":1: input: message 1 has no role, but {said}")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"input": "1"'], ":1: not a JSON object: "),
        ([{"input": "1"}, "", "[1]"], ":3: not a JSON object: "),
        ([{"input": "1"}, "nonsense " * 50], ":2: not a JSON object: "),
        ([{"inputs": "1", "x": 2}], ":1: no column 'input' (input_key); there are: inputs, x"),
        ([{"input": ""}], ":1: input is empty"),
        ([{"input": 12}], ":1: input = 12: expected a string or a list of chat messages"),
        ([{"input": "1", "metadata": "{"}], ':1: metadata = "{": expected an object, or a string with its JSON'),
        ([{"input": "1", "metadata": [1]}], ":1: metadata = [1]: expected an object"),
        ([{"input": "1", "tools": "x"}], ':1: tools = "x": expected a list of objects'),
        ([{"input": "1"}, {"input": "1a"}], ":2: cannot be tokenised: "),
        ([""], ": the file has no rows"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(
    tmp_path: Path, tokenizing: Tokenizing, rows: Sequence[Any], message: str
) -> None:
    path = write(tmp_path, *rows)
    text = error(path, tokenizing)
    assert text.startswith(f"{path}{message}")
    assert len(text) < 500


def test_a_label_that_is_asked_for_must_be_there(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = write(tmp_path, {"input": "1", "answer": "2"})
    assert error(path, tokenizing, label_key="label").endswith(
        ":1: no column 'label' (label_key); there are: input, answer"
    )


def test_a_missing_file_is_named(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = tmp_path / "no.jsonl"
    assert error(path, tokenizing) == f"{path}: cannot be read: No such file or directory"


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path: Path, tokenizing: Tokenizing) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"input": "1"}\n{"input": "\xff"}\n')
    assert error(path, tokenizing).startswith(f"{path}:2: not a JSON object")


def test_a_model_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=f"{tmp_path}: no tokenizer here"):
        load_tokenizing(str(tmp_path))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: "):
        load_tokenizing(str(tmp_path))


def weighted(sizes: Sequence[int], weights: Sequence[float], **settings: Any) -> PromptSet:
    return PromptSet([data(size, f"d{number}") for number, size in enumerate(sizes)], weights=weights, **settings)


def test_weights_mix_sources_evenly_and_a_source_that_ends_begins_again() -> None:
    prompts = weighted([3, 2], [3.0, 1.0])
    found = [(prompts.prompt(number).data, prompts.prompt(number).row) for number in range(12)]
    assert [source for source, _ in found] == ["d0", "d0", "d1", "d0"] * 3
    assert [row for source, row in found if source == "d0"] == [0, 1, 2] * 3
    assert [row for source, row in found if source == "d1"] == [0, 1, 0]
    assert prompts.place(11).epoch == 2  # of its source


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8), st.integers(0, 10**6))
def test_a_number_means_one_prompt_and_each_prompt_of_a_source_has_its_turn(weights: list[float], block: int) -> None:
    mixture = mixture_of(tuple(weights))
    drawn = [mixture.draw(block * MIX_BLOCK + place) for place in range(MIX_BLOCK)]
    for source, weight in enumerate(weights):
        own = [draw for one, draw in drawn if one == source]
        assert own == list(range(own[0], own[0] + len(own)))
        assert own[0] == block * len(own)
        assert abs(len(own) - MIX_BLOCK * weight / sum(weights)) < len(weights)


def test_shuffled_sources_with_weights_have_orders_of_their_own_in_each_epoch() -> None:
    prompts = weighted([50, 2], [1.0, 1.0], shuffle=True, seed=3)
    rows = [prompt.row for prompt in map(prompts.prompt, range(200)) if prompt.data == "d0"]
    assert sorted(rows[:50]) == sorted(rows[50:]) == list(range(50))
    assert rows[:50] != rows[50:]
    again = weighted([50, 2], [1.0, 1.0], shuffle=True, seed=3)
    assert [again.prompt(number).row for number in range(200)] == [prompts.prompt(n).row for n in range(200)]


def test_other_weights_are_other_data() -> None:
    """The buffer compares fingerprints, and resumes no run whose numbers would mean other prompts."""
    one, other, none = (weighted([3, 2], weights).loaded for weights in ([3.0, 1.0], [1.0, 3.0], []))
    fingerprints = {event.fingerprint for events in (one, other, none) for event in events}
    assert len(fingerprints) == 6
