"""The files of the boxed-copy recipes: as generated, split well; and the rules of a run on demonstrations."""

import json
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from actors.processes import process_specs
from actors.registry import hosted
from actors.rollout.actor import RolloutActor
from actors.rollout.offline.actor import OfflineRolloutActor
from messages import Int32Array, Prompt, RolloutRequested, SamplingParams, UInt8Array, encode
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.sizes import needed_sizes
from tests.support.checks import checked_here

TOPOLOGIES = Path(__file__).resolve().parents[3] / "topologies"
SFT, RL = TOPOLOGIES / "boxed-copy-sft.toml", TOPOLOGIES / "boxed-copy.toml"
GENERATED: dict[str, str] = runpy.run_path(str(TOPOLOGIES / "demo" / "make_boxed_copy.py"))["files"]()


@pytest.mark.parametrize("name", GENERATED)
def test_committed_files_equal_what_the_script_writes(name: str) -> None:
    assert (TOPOLOGIES / "demo" / name).read_text(encoding="utf-8") == GENERATED[name]


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in GENERATED[f"data/boxed-copy/{name}.jsonl"].splitlines()]


def test_a_run_sees_every_row_once() -> None:
    for path, name in ((SFT, "demonstrations"), (RL, "train")):
        topology = load_topology(path).topology
        assert len(rows(name)) == topology.train.num_steps * topology.rollout.rollout_batch_size
    assert len(rows("eval")) == 200


def test_held_out_prompts_of_several_digits_are_not_trained() -> None:
    held_out = {row["input"] for row in rows("eval") if len(row["input"]) > 1}
    assert held_out.isdisjoint(row["input"] for name in ("demonstrations", "train") for row in rows(name))


def test_demonstrations_have_the_length_and_half_of_the_habit() -> None:
    pairs = [(row["input"], row["label"].removeprefix("\\boxed{").removesuffix("}")) for row in rows("demonstrations")]
    assert all(len(asked) == len(shown) for asked, shown in pairs)
    kept = Counter(a == b for asked, shown in pairs for a, b in zip(asked, shown, strict=True))
    assert kept[True] / kept.total() == pytest.approx(0.55, abs=0.01)  # half of them, and 1 in 10 by chance


def test_lengths_have_a_long_tail() -> None:
    lengths = sorted(len(row["input"]) for row in rows("train"))
    assert (lengths[0], lengths[len(lengths) // 2], lengths[-1]) == (1, 5, 32)
    assert sum(lengths) / len(lengths) == pytest.approx(6.3, abs=0.2)  # exp(1.6 + 0.7 ** 2 / 2), cut at 32


def test_the_model_has_as_many_parameters_as_the_recipe_says() -> None:
    config = json.loads(GENERATED["models/boxed-copy/config.json"])
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = hidden * (queries + 2 * keys) + queries * hidden + 2 * head + 3 * hidden * inner + 2 * hidden
    assert config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden + hidden == 100_800


# Rules


def problems(path: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(TopologyError) as caught:
        load_topology(path, overrides)
    return {problem.key: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("rollout.n_samples_per_prompt=2", "rollout.n_samples_per_prompt", "a demonstration is one sample"),
        ("rollout.temperature=0.5", "rollout.temperature", "the loss is computed at temperature 1"),
        ("rollout.dynamic_filter=nonzero_std", "rollout.dynamic_filter", "demonstrations have no reward"),
        (
            "rollout.over_sampling_filter=sort_by_reward_std",
            "rollout.over_sampling_filter",
            "demonstrations have no reward",
        ),
        ("rollout.on_surplus=drop", "rollout.on_surplus", "would drop demonstrations"),
        ("algorithm.entropy_coef=0.1", "algorithm.entropy_coef", "has no effect"),
        ("algorithm.kl.loss_coef=0.1", "algorithm.kl.loss_coef", "has no effect"),
        ("algorithm.loss.type=ppo", "engines.policy", "only demonstrations"),
        ('engines.policy={kind = "tiny"}', "engines.policy", "no actor uses this pool with algorithm.loss.type"),
    ],
)
def test_rules_of_demonstrations(override: str, key: str, message: str) -> None:
    assert message in problems(SFT, override)[key]


def test_an_evaluation_needs_an_engine() -> None:
    assert "which runs no engine" in problems(SFT, 'eval=[{name = "e", path = "x", interval = 1}]')["eval.0.name"]


def test_policy_loss_needs_engines() -> None:
    assert "missing: the pool" in problems(RL, "engines={}")["engines.policy"]


def test_neither_engines_nor_graders_are_started_for_demonstrations() -> None:
    alone = process_specs(load_topology(SFT).topology, "local", Path("runs/r"))
    assert [spec.name for spec in alone] == ["trainer", "rollout", "buffer"]
    shared = load_topology(SFT, ('share=[["reward", "filter"], ["buffer"]]',)).topology
    assert [spec.name for spec in process_specs(shared, "local", Path("runs/r"))] == [
        "trainer",
        "buffer",
        "rollout",
    ]


def test_the_role_of_rollout_is_played_by_whom_the_loss_asks_for() -> None:
    for file, chosen in ((SFT, OfflineRolloutActor), (RL, RolloutActor)):
        assert hosted("rollout", load_topology(file).topology, Path()).actor_type is chosen


def test_a_start_without_the_export_says_which_run_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = checked_here(load_topology(RL), node="local").problems
    assert problem.key == "model.hf_checkpoint"
    assert "run boxed-copy-sft writes it" in problem.message
    assert checked_here(load_topology(RL), elsewhere=True).problems == ()


def test_a_task_with_its_demonstration_fits_the_largest_message() -> None:
    length = 400_000  # tokens, of which each has its id, its mask and its text in the task
    limits = (f"rollout.max_prompt_len={length}", f"rollout.max_response_len={length}", "train.num_steps=1")
    needed = needed_sizes(load_topology(SFT, limits).topology)
    prompt = Prompt(
        data="d",
        row=0,
        text="0123456789" * length,
        prompt_ids=Int32Array(np.zeros(length, np.int32)),
        response_ids=Int32Array(np.zeros(length, np.int32)),
        loss_mask=UInt8Array(np.ones(length, np.uint8)),
        response="0123456789" * length,
    )
    task = RolloutRequested(
        group_id=0,
        attempt=0,
        round=0,
        min_version=1,
        prompt=prompt,
        num_samples=1,
        sampling=SamplingParams(max_new_tokens=length),
    )
    assert len(encode(task).payload) < needed.max_payload_bytes
