"""Names of verl, prime-rl and NeMo-RL: each has an answer that exists, in hints and on the page."""

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from runtime.compat.peers.names import Setting, find_peer, peer_names, peers_page
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.reading.schema import keys_of, type_at
from runtime.settings.topology import Topology

LAPTOP = Path(__file__).resolve().parents[4] / "topologies/laptop.toml"
FURTHER_KEYS = ("engines.policy", "engines.teacher", "data.teacher")
PEERS_OWN = ("use_policy_gradient = true",)  # a setting of verl
SETTINGS = [(project.name, setting) for project in peer_names().projects for setting in project.settings]
SGLANG = "engines.policy.sglang."


def overridden(key: str, value: str = "1") -> str:
    """What the checker says of one key, by --set."""
    with pytest.raises(TopologyError) as caught:
        load_topology(LAPTOP, [f"{key}={value}"])
    (problem,) = caught.value.problems
    return problem.message


@pytest.mark.parametrize(("project", "setting"), SETTINGS, ids=[setting.name for _, setting in SETTINGS])
def test_every_name_has_an_answer_that_exists_and_no_key_here_has_that_name(project: str, setting: Setting) -> None:
    key = setting.answer.key
    if key is not None:
        assert key.startswith(SGLANG) or type_at(Topology, key.split(".")) is not None
    assert setting.name not in keys_of(Topology)
    said = overridden(f"algorithm.{setting.name}")
    assert said.startswith("unknown key, "), said
    assert f"{project}'s {setting.name} " in said
    assert (f"is {key} here" if key is not None else setting.answer.remark.partition("`")[0].partition("[")[0]) in said


def test_names_are_unique_and_texts_name_keys_that_exist() -> None:
    assert Counter(setting.name for _, setting in SETTINGS).most_common(1)[0][1] == 1
    keys = set(keys_of(Topology))
    names = {key.rpartition(".")[2] for key in keys} | {"false", "true"}
    for _, setting in SETTINGS:
        if setting.slime is None:
            for quoted in re.findall(r"`([^`]+)`", setting.answer.remark):
                first = quoted.partition(" ")[0]
                assert (
                    quoted.startswith(('"', "--"))
                    or first in keys | names
                    or first in FURTHER_KEYS
                    or quoted in PEERS_OWN
                ), quoted


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("algorithm.clip_ratio", "verl's clip_ratio is algorithm.loss.eps_clip here"),
        ("actor_rollout_ref.actor.clip_ratio_high", "verl's clip_ratio_high is algorithm.loss.eps_clip_high here"),
        ("actor_rollout_ref.rollout.n", "verl's rollout.n is rollout.n_samples_per_prompt here"),
        ("actor_rollout_ref", "verl's actor_rollout_ref has no key here: the actor's keys are in algorithm, optimizer"),
        (
            "algorithm.rollout_correction.rollout_is",
            "verl's rollout_is is algorithm.tis.level here",
        ),
        ("algorithm.overlong_buffer.len", "verl's overlong_buffer.len is algorithm.overlong_buffer_len here"),
        (
            "trainer.loss.token_mask_low",
            "prime-rl's token_mask_low is algorithm.loss.dppo_mask_low here (a change of the",
        ),
        ("orchestrator.group-size", "prime-rl's group_size is rollout.n_samples_per_prompt here"),
        ("loss_fn.ratio_clip_max", "NeMo-RL's ratio_clip_max is algorithm.loss.eps_clip_high here"),
        ("optimizer.betas", "verl's betas is optimizer.adam_beta1 here (the second one is optimizer.adam_beta2)"),
        ("algorithm.use_kl_loss", "slime's --use-kl-loss is algorithm.kl.loss_coef here"),  # slime's name comes first
    ],
)
def test_what_is_said_of_a_key(key: str, said: str) -> None:
    message = overridden(key)
    assert message.startswith(f"unknown key, {said}") or message.startswith(
        "unknown key, removed: algorithm.kl.loss_coef"
    )


def test_a_name_is_found_by_its_end_alone() -> None:
    assert find_peer("algorithm.my_clip_ratio") is None
    assert find_peer("algorithm.n") is None
    assert find_peer("--clip-ratio") is not None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("algorithm.estimator.type", "rloo_vectorized", 'did you mean "rloo"? allowed: '),
        ("algorithm.loss.type", "vanilla", 'did you mean "ppo"? allowed: '),
        ("algorithm.kl.type", "mse", 'did you mean "k2"? allowed: '),
        ("algorithm.reduction.type", "token-sum", "unknown type; allowed: "),
    ],
)
def test_a_value_of_another_project_is_recognised(key: str, value: str, said: str) -> None:
    message = overridden(key, f"'{value}'")
    assert said in message


def test_values_of_other_projects_are_none_of_ours() -> None:
    for values in peer_names().values:
        allowed = set(get_args(type_at(Topology, values.key.split("."))))
        assert not set(values.ours) & allowed
        assert set(values.ours.values()) - {"ppo"} <= allowed | {"ppo"}


@pytest.mark.parametrize(
    "wrong",
    [{"key": "algorithm.loss.eps_clip", "slime": "lambd"}, {"slime": "no-such-flag"}, {}, {"key": "a", "no": "b"}],
)
def test_a_name_without_exactly_one_answer_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"exactly one|has to exist"):
        _ = Setting(name="lam", **wrong).answer


def test_the_page_has_every_name() -> None:
    page = peers_page()
    assert all(f"| `{setting.name}` | " in page for _, setting in SETTINGS)
    assert "](../train/own-functions.md#losses)" in page


def test_functions_here_exist_and_have_a_page() -> None:
    pages = Path(__file__).resolve().parents[4] / "docs" / "reference" / "algorithms"
    rows = [row for project in peer_names().functions for row in project.rows]
    for row in rows:
        module, _, name = row.here.partition(".")
        assert callable(getattr(importlib.import_module(f"actors.trainer.algorithms.{module}"), name))
        assert f"## `{name}`" in (pages / f"{module}.md").read_text(encoding="utf-8")
    assert len({row.there for row in rows}) == len(rows)
