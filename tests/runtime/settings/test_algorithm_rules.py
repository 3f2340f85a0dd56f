"""What combines in [algorithm]: each refused combination, with its key and message."""

from typing import get_args

import msgspec
import pytest

from runtime.settings.load import load_topology
from runtime.settings.objective import formula_of
from runtime.settings.reading.schema import type_at
from runtime.settings.rules.algorithm import OF_ESTIMATOR, OF_LOSS, allows
from runtime.settings.tables.algorithm import AlgorithmConfig, Reduction, Tis
from runtime.settings.tables.estimators import Estimator
from runtime.settings.tables.losses import Loss
from tests.runtime.settings.shipped import LAPTOP, problems

CUSTOM = 'algorithm.loss={type="custom", function="a.py:f"}'


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (
            ("algorithm.estimator.type=rloo", "algorithm.estimator.normalize_std=false"),
            "algorithm.estimator.normalize_std",
            'is a key of type = "grpo" or "grpo_passk" or "gdpo", not of "rloo"; allowed: type, group_of_one',
        ),
        (
            ("algorithm.estimator.type=reinforce", "algorithm.estimator.group_of_one=reward"),
            "algorithm.estimator.group_of_one",
            'not of "reinforce"; allowed: type, normalize',
        ),
        (
            ("algorithm.loss.type=gpg", "algorithm.loss.eps_clip=0.3"),
            "algorithm.loss.eps_clip",
            'is a key of type = "ppo" or "gspo" or "cispo"',
        ),
        (
            ("algorithm.loss.type=decoupled_ppo", "algorithm.use_rollout_logprobs=true"),
            "algorithm.use_rollout_logprobs",
            'has no effect with algorithm.loss.type = "decoupled_ppo"',
        ),
        (
            ("algorithm.estimator.type=gspo",),
            "algorithm.estimator.type",
            'a loss, not an estimator: write "grpo" and algorithm.loss.type = "gspo"',
        ),
        (("algorithm.loss.type=gsp",), "algorithm.loss.type", "unknown type; allowed: 'ppo', 'gspo', 'cispo'"),
        (("algorithm.loss.typo=1",), "algorithm.loss.typo=1", "unknown key, did you mean type?"),
        (
            ("algorithm.loss=gspo",),
            "algorithm.loss",
            "expected a table with a type; allowed: 'ppo', 'gspo'",
        ),
        (
            ("algorithm.tis.upper_bound=3",),
            "algorithm.tis.type",
            "missing; allowed: 'clip', 'truncate', 'mask', 'custom'",
        ),
        (("algorithm.loss.type=custom",), "algorithm.loss.function", "missing; expected a string"),
        (
            ("algorithm.tis.type=clip", "algorithm.use_rollout_logprobs=true"),
            "algorithm.tis.type",
            "which algorithm.use_rollout_logprobs makes the same",
        ),
        (
            ("algorithm.loss.type=prime_rl", "algorithm.tis.type=clip", "algorithm.use_rollout_logprobs=false"),
            "algorithm.tis.type",
            'has no effect with algorithm.loss.type = "prime_rl"',
        ),
        (
            ("algorithm.tis.type=clip", "algorithm.tis.lower_bound=3"),
            "algorithm.tis.lower_bound",
            "must be below algorithm.tis.upper_bound = 2",
        ),
        (
            ("algorithm.rs.type=binary_kl", "algorithm.rs.lower_bound=0.1"),
            "algorithm.rs.lower_bound",
            'is a key of type = "ratio", not of "binary_kl"; allowed: type, level, veto_threshold, upper_bound',
        ),
        (("algorithm.bypass_mode=true",), "algorithm.bypass_mode", "without algorithm.tis or algorithm.rs"),
        (
            ("algorithm.bypass_mode=true", "algorithm.tis.type=clip"),
            "algorithm.bypass_mode",
            "would count the ratio twice",
        ),
        (
            ("algorithm.bypass_mode=true", "algorithm.rs.type=ratio", "algorithm.use_rollout_logprobs=false"),
            "algorithm.bypass_mode",
            'needs algorithm.use_rollout_logprobs = true with algorithm.loss.type = "ppo"',
        ),
        (
            (
                "algorithm.loss.type=gpg",
                "algorithm.use_rollout_logprobs=false",
                "algorithm.bypass_mode=true",
                "algorithm.tis.type=clip",
                "algorithm.tis.batch_normalize=true",
            ),
            "algorithm.bypass_mode",
            "cannot be combined with algorithm.tis.batch_normalize",
        ),
        (
            ("algorithm.kl.unbiased=true",),
            "algorithm.kl.unbiased",
            "has no effect unless algorithm.kl.loss_coef is above 0",
        ),
        (
            ("algorithm.kl.unbiased=true", "algorithm.kl.loss_coef=0.1", "algorithm.kl.type='k3+'"),
            "algorithm.kl.unbiased",
            'is a key of type = "k1" or "k2" or "k3" or "low_var_kl", not of "k3+"',
        ),
        (
            ("algorithm.kl.reward_coef=0.1", "algorithm.kl.loss_coef=0.1"),
            "algorithm.kl.reward_coef",
            "would count the divergence twice, in the reward and with algorithm.kl.loss_coef in the loss",
        ),
        (
            ("algorithm.kl.before_normalization=true",),
            "algorithm.kl.before_normalization",
            "has no effect unless algorithm.kl.reward_coef is above 0",
        ),
        (
            (
                "algorithm.kl.before_normalization=true",
                "algorithm.kl.reward_coef=0.1",
                "algorithm.estimator.type=reinforce_plus_plus",
                "algorithm.normalize_advantages=true",
            ),
            "algorithm.kl.before_normalization",
            'has no effect with algorithm.estimator.type = "reinforce_plus_plus"',
        ),
        (
            ("algorithm.kl.metric_interval=5", "algorithm.kl.reward_coef=0.1"),
            "algorithm.kl.metric_interval",
            "has no effect with algorithm.kl.reward_coef, which measures the divergence at each train step",
        ),
        (
            ("algorithm.estimator.gamma=0.9",),
            "algorithm.estimator.gamma",
            'is a key of type = "reinforce_plus_plus" or "ppo"',
        ),
        (
            ("algorithm.estimator.type=reinforce_plus_plus",),
            "algorithm.estimator.type",
            "whitens its advantages",
        ),
        (
            ("algorithm.reduction.scale_factor=128",),
            "algorithm.reduction.scale_factor",
            'is a key of type = "seq-mean-token-sum-norm", not of "token-mean"',
        ),
        (
            ("algorithm.reduction.type=token-mean", "algorithm.reduction.count_masked_rollouts=false"),
            "algorithm.reduction.count_masked_rollouts",
            'is a key of type = "rollout-mean" or "seq-mean-token-mean"',
        ),
        (
            ("algorithm.estimator.type=reinforce_plus_plus_baseline",),
            "algorithm.estimator.type",
            "set algorithm.normalize_advantages = true",
        ),
        (
            ("algorithm.estimator.function=a.py:f", "algorithm.estimator.type=rloo"),
            "algorithm.estimator.function",
            'is a key of type = "custom", not of "rloo"',
        ),
        (
            ("algorithm.keep_old_actor=true", "algorithm.use_rollout_logprobs=false"),
            "algorithm.keep_old_actor",
            "needs rollout.max_token_staleness of at least 1",
        ),
        (
            ("algorithm.keep_old_actor=true", "algorithm.use_rollout_logprobs=false", "rollout.max_token_staleness=0"),
            "algorithm.keep_old_actor",
            "needs rollout.max_token_staleness of at least 1",
        ),
        (
            ("algorithm.keep_old_actor=true", "algorithm.use_rollout_logprobs=true"),
            "algorithm.keep_old_actor",
            "has no effect",
        ),
        (("algorithm.keep_old_actor=true", "algorithm.loss.type=gpg"), "algorithm.keep_old_actor", "has no effect"),
        (
            (
                "algorithm.keep_old_actor=true",
                "algorithm.use_rollout_logprobs=false",
                "algorithm.loss.type=decoupled_ppo",
            ),
            "algorithm.keep_old_actor",
            "is the one before the train step",
        ),
        (
            (
                "algorithm.keep_old_actor=true",
                "algorithm.use_rollout_logprobs=false",
                "algorithm.use_routing_replay=true",
            ),
            "algorithm.keep_old_actor",
            "cannot be combined with replayed experts",
        ),
        (
            ('algorithm.reduction={type="custom", function="a.py:f"}', "algorithm.positive_example_nll_weight=0.1"),
            "algorithm.positive_example_nll_weight",
            "cannot be combined with algorithm.reduction.function",
        ),
        (
            (CUSTOM, "algorithm.loss.eps_clip=0.1"),
            "algorithm.loss.eps_clip",
            'not of "custom"; allowed: type, function',
        ),
        (
            ('algorithm.estimator={type="custom", function="a.py:f"}', "algorithm.loss.type=sft"),
            "algorithm.estimator.function",
            'has no effect with algorithm.loss.type = "sft"',
        ),
        (
            ('algorithm.tis={type="custom", function="a.py:f", upper_bound=3.0}',),
            "algorithm.tis.upper_bound",
            "contradicts algorithm.tis.function, which takes its place",
        ),
        (
            ("algorithm.estimator.type=rloo", "rollout.n_samples_per_prompt=1"),
            "rollout.n_samples_per_prompt",
            'or set algorithm.estimator.group_of_one = "reward"',
        ),
    ],
)
def test_a_combination_without_meaning_is_refused(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(LAPTOP, *overrides)
    assert message in found[key]


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.estimator.type=reinforce", "rollout.n_samples_per_prompt=1"),
        ("algorithm.loss.type=cispo", "algorithm.loss.eps_clip=1.0"),
        ("algorithm.loss.type=prime_rl", "algorithm.use_rollout_logprobs=false"),
        ("algorithm.tis.type=mask", "algorithm.use_rollout_logprobs=false"),
        ("algorithm.rs.type=ratio", "algorithm.bypass_mode=true", "algorithm.use_rollout_logprobs=true"),
        ("algorithm.rs.type=binary_kl", "algorithm.use_rollout_logprobs=false"),
        ("algorithm.estimator.group_of_one=reward", "rollout.n_samples_per_prompt=1"),
        ('algorithm.estimator={type="custom", function="a.py:f"}', "rollout.n_samples_per_prompt=1"),
        (
            CUSTOM,
            "algorithm.use_rollout_logprobs=false",
            'algorithm.tis={type="custom", function="a.py:g"}',
            'algorithm.reduction={type="custom", function="a.py:h"}',
        ),
        (
            "algorithm.estimator.normalize_std=false",
            "algorithm.reduction.type=seq-mean-token-sum-norm",
        ),
        ("algorithm.estimator.type=reinforce_plus_plus_baseline", "algorithm.normalize_advantages=true"),
    ],
)
def test_a_combination_that_means_something_is_accepted(overrides: tuple[str, ...]) -> None:
    load_topology(LAPTOP, overrides)


def test_what_a_type_allows_are_settings_that_exist() -> None:
    for union, settings in ((Loss, OF_LOSS), (Estimator, OF_ESTIMATOR)):
        for setting in settings:
            assert type_at(AlgorithmConfig, setting.split(".")) is not None
            answers = {allows(table, setting) for table in get_args(union)}
            assert answers == {True, False}
    assert {name for table in get_args(Estimator) for name in table.allows} == set(OF_ESTIMATOR)


def test_the_formula_of_every_type_names_keys_that_it_has() -> None:
    for union in (Loss, Estimator, Reduction, Tis):
        for table in get_args(union):
            given = {field.name: "f" for field in msgspec.structs.fields(table) if field.required}
            formula = formula_of(table(**given), old="old policy", scale="8")
            assert formula
            assert "{" not in formula
