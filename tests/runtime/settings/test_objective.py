"""The objective that --plan shows: the recipe's terms with their values, and nothing else."""

from typing import Any, get_args

import msgspec
import pytest

from runtime.settings.load import load_topology
from runtime.settings.objective import LEVELS, objective_of
from runtime.settings.recipe import Recipe
from runtime.settings.tables.algorithm import Level
from tests.build.topology import algorithm_of
from tests.runtime.settings.shipped import LAPTOP

MIXED = {"type": "mixed", "coef": 1, "mixed_kl_weight": 0.25}
RECIPE: Recipe = load_topology(LAPTOP, ("rollout.max_response_len=32", "rollout.max_token_staleness=3")).topology


def shown(**algorithm: Any) -> dict[str, list[str]]:
    """The formulas by name of the term."""
    found: dict[str, list[str]] = {}
    for term in objective_of(msgspec.structs.replace(RECIPE, algorithm=algorithm_of(**algorithm))):
        assert term.source
        found.setdefault(term.name, []).append(term.formula)
    return found


def test_every_level_has_a_name() -> None:
    assert set(get_args(Level)) == set(LEVELS)


def test_the_default_is_grpo_without_other_terms() -> None:
    assert shown() == {
        "advantage": ["A = (R - mean of group) / (std of group + 1e-6)"],
        "policy loss": ["max(-r A, -clip(r, 0.8, 1.2) A), r = policy / old policy"],
        "reduction": ["mean over rollouts of their means over tokens"],
    }


def test_demonstrations_have_a_likelihood_alone() -> None:
    assert shown(loss={"type": "sft"}, kl={"type": "k1", "loss_coef": 0.1})["loss"] == ["-log p"]


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({"loss": {"type": "dpo"}}, "-log sigmoid(0.1 h)"),
        (
            {"loss": {"type": "dpo", "label_smoothing": 0.25, "beta": 0.5}},
            "-0.75 log sigmoid(0.5 h) - 0.25 log sigmoid(-0.5 h)",
        ),
        ({"loss": {"type": "preference_ipo"}}, "(h - 5)^2"),
    ],
)
def test_preference_pairs_have_a_loss_of_their_margin(settings: dict[str, Any], formula: str) -> None:
    found = shown(**settings)
    assert (found["loss"], found["reduction"]) == ([formula], ["mean over pairs"])


@pytest.mark.parametrize(
    ("smoothing", "formula"), [(0.0, "-log sigmoid(h)"), (0.25, "-0.75 log sigmoid(h) - 0.25 log sigmoid(-h)")]
)
def test_a_reward_model_has_a_loss_of_rewards_without_a_reference(smoothing: float, formula: str) -> None:
    assert shown(loss={"type": "rm", "label_smoothing": smoothing}) == {
        "margin": ["h = reward at the last token, chosen - rejected"],
        "loss": [formula],
        "reduction": ["mean over pairs"],
    }


@pytest.mark.parametrize(
    ("algorithm", "name", "formula"),
    [
        ({"estimator": {"type": "grpo", "normalize_std": False}}, "advantage", "A = R - mean of group"),
        ({"estimator": {"type": "grpo", "normalize": False}}, "advantage", "A = R"),
        (
            {"normalize_advantages": True, "estimator": {"type": "rloo"}},
            "advantage",
            "A = R - mean of the group's others, whitened over the batch's tokens",
        ),
        (
            {"use_rollout_logprobs": True, "loss": {"type": "ppo", "eps_clip_high": 0.28, "eps_clip_c": 3.0}},
            "policy loss",
            "max(-r A, -clip(r, 0.8, 1.28) A), at most -3 A for A < 0, r = policy / engine",
        ),
        (
            {"estimator": {"type": "gdpo", "reward_keys": ("a", "b"), "reward_weights": (1.0, 0.5)}},
            "advantage",
            "A = sum of w (R_k - mean of group) / (std of group + 1e-6) over 1 a, 0.5 b",
        ),
        (
            {"overlong_buffer_len": 8, "overlong_penalty_factor": 0.5},
            "reward",
            "R + 0.5 min((24 - length) / 8, 0)",
        ),
        (
            {"length_penalty": {"type": "linear"}},
            "reward",
            "R - mean of group (0.25 output + 0.1 input + 0.1 turns), each / max of group",
        ),
        ({"loss": {"type": "custom", "function": "mine.py:loss"}}, "policy loss", "mine.py:loss"),
        ({"tis": {"type": "custom", "function": "mine.py:weights"}}, "weight", "x mine.py:weights"),
        ({"reduction": {"type": "custom", "function": "mine.py:reduce"}}, "reduction", "mine.py:reduce"),
        ({"opd": {"type": "megatron"}}, "teacher", "A - 1 log(old policy / teacher)"),
        (
            {"opd": {"type": "sglang", "distillation": {"type": "forward", "coef": 0.5, "topk": 8}}},
            "distillation",
            "+ 0.5 sum of p log(p / q) over the teacher's 8 likeliest tokens, p = teacher, q = policy",
        ),
        (
            {"opd": {"type": "sglang", "distillation": MIXED | {"zero_outside_topk": True}}},
            "distillation",
            "+ 1 sum of 0.25 p log(p / q) + 0.75 q log(q / p) over the teacher's 32 likeliest tokens, "
            "and q log(q / p) of all others with log p = -100, p = teacher, q = policy",
        ),
        ({"tis": {"type": "clip"}}, "weight", "x clip(w, 0, 2), w = old policy / engine"),
        (
            {"tis": {"type": "mask", "lower_bound": 0.5, "level": "geometric"}},
            "weight",
            "x w, or 0 outside of [0.5, 2], w = old policy / engine of the sample's geometric mean",
        ),
        ({"rs": {"type": "ratio"}}, "rejection", "x 0 where old policy / engine is outside of [0.5, 2]"),
        (
            {"bypass_mode": True, "rs": {"type": "binary_kl"}, "loss": {"type": "gpg"}},
            "rejection",
            "x 0 where the binary divergence of policy and engine is above 0.1",
        ),
        (
            {"kl": {"type": "k3", "loss_coef": 0.01, "unbiased": True}},
            "divergence",
            "+ 0.01 k3(policy, reference) x policy / old policy",
        ),
        ({"keep_old_actor": True}, "old policy", "= the weights that sampled the token, kept for 3 train steps"),
        (
            {"kl": {"type": "k3", "reward_coef": 0.05}},
            "advantage",
            "A = (R - mean of group) / (std of group + 1e-6) - 0.05 k3(old policy, reference)",
        ),
        (
            {"estimator": {"type": "rloo"}, "kl": {"type": "k1", "reward_coef": 0.05, "before_normalization": True}},
            "reward",
            "R - 0.05 sum of k1(old policy, reference) over the sample",
        ),
        (
            {"normalize_advantages": True, "estimator": {"type": "reinforce_plus_plus", "gamma": 0.99}},
            "advantage",
            "A = r + 0.99 A of the next token, whitened over the batch's tokens",
        ),
        (
            {
                "normalize_advantages": True,
                "estimator": {"type": "reinforce_plus_plus"},
                "kl": {"type": "k1", "reward_coef": 0.1},
            },
            "token reward",
            "r = R at the last trained token - 0.1 k1(old policy, reference)",
        ),
        (
            {"kl": {"type": "k1", "reward_coef": 0.01}, "ref_update_interval": 2},
            "reference",
            "= policy every 2 train steps",
        ),
        (
            {"ref_update_interval": 40, "kl": {"type": "k1", "loss_coef": 0.01}},
            "reference",
            "= policy every 40 train steps",
        ),
        ({"ref_update_interval": 1, "loss": {"type": "dpo"}}, "reference", "= policy every train step"),
        ({"entropy_coef": 0.1, "entropy_coef_end": 0.0}, "entropy", "- 0.1 entropy, 0 at the last step"),
        (
            {"positive_example_nll_weight": 0.1},
            "likelihood",
            "+ 0.1 mean of -log p over tokens of samples with R > 0",
        ),
        (
            {"reduction": {"type": "seq-mean-token-sum-norm"}},
            "reduction",
            "mean over rollouts of their sums over tokens / 32",
        ),
    ],
)
def test_a_term_has_the_values_of_the_recipe(algorithm: dict[str, Any], name: str, formula: str) -> None:
    assert shown(**algorithm)[name] == [formula]
