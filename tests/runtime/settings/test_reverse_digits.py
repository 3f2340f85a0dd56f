"""The files of the laptop recipe: as generated, split well, and known to the libraries that read them."""

import json
import runpy
from pathlib import Path

import pytest

TOPOLOGIES = Path(__file__).resolve().parents[3] / "topologies"
GENERATED: dict[str, str] = runpy.run_path(str(TOPOLOGIES / "demo" / "make_reverse_digits.py"))["files"]()


@pytest.mark.parametrize("name", GENERATED)
def test_committed_files_equal_what_the_script_writes(name: str) -> None:
    assert (TOPOLOGIES / "demo" / name).read_text(encoding="utf-8") == GENERATED[name]


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in GENERATED[f"data/reverse-digits/{name}.jsonl"].splitlines()]


def test_the_hundred_prompts_are_split_into_78_and_22() -> None:
    train, held_out = rows("train"), rows("eval")
    assert (len(train), len(held_out)) == (78, 22)
    assert sorted(row["input"] for row in train + held_out) == [f"{number:02}" for number in range(100)]
    assert all(row["label"] == row["input"][::-1] for row in train + held_out)


def test_every_digit_is_seen_in_both_places() -> None:
    for place in (0, 1):
        assert {row["input"][place] for row in rows("train")} == set("0123456789")


def test_the_model_has_as_many_parameters_as_the_recipe_says() -> None:
    config = json.loads(GENERATED["models/reverse-digits/config.json"])
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = hidden * (queries + 2 * keys) + queries * hidden + 2 * head + 3 * hidden * inner + 2 * hidden
    assert config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden + hidden == 39_136
