"""What combines in [algorithm]: each refused combination, with its key and message."""

import msgspec
import pytest

from runtime.settings.load import load_topology
from runtime.settings.rules.algorithm import APPLIES
from runtime.settings.tables.algorithm import AlgorithmConfig
from tests.runtime.settings.shipped import LAPTOP, problems


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (
            ("algorithm.advantage_estimator=rloo", "algorithm.disable_grpo_std_normalization=true"),
            "algorithm.disable_grpo_std_normalization",
            'has no effect with algorithm.advantage_estimator = "rloo"; it applies to grpo',
        ),
        (
            ("algorithm.advantage_estimator=reinforce", "algorithm.group_of_one=reward"),
            "algorithm.group_of_one",
            'has no effect with algorithm.advantage_estimator = "reinforce"',
        ),
        (
            ("algorithm.loss_mode=gpg", "algorithm.eps_clip=0.3"),
            "algorithm.eps_clip",
            'has no effect with algorithm.loss_mode = "gpg"; it applies to ppo, gspo',
        ),
        (
            ("algorithm.loss_mode=decoupled_ppo", "algorithm.use_rollout_logprobs=true"),
            "algorithm.use_rollout_logprobs",
            'has no effect with algorithm.loss_mode = "decoupled_ppo"',
        ),
        (
            ("algorithm.advantage_estimator=gspo", "algorithm.loss_mode=ppo"),
            "algorithm.loss_mode",
            'contradicts algorithm.advantage_estimator = "gspo"',
        ),
        (
            ("algorithm.tis_mode=mask",),
            "algorithm.tis_mode",
            "has no effect unless algorithm.use_tis = true",
        ),
        (
            ("algorithm.use_tis=true", "algorithm.use_rollout_logprobs=true"),
            "algorithm.use_tis",
            "which algorithm.use_rollout_logprobs makes the same",
        ),
        (
            ("algorithm.loss_mode=prime_rl", "algorithm.use_tis=true", "algorithm.use_rollout_logprobs=false"),
            "algorithm.use_tis",
            'has no effect with algorithm.loss_mode = "prime_rl"',
        ),
        (
            ("algorithm.use_tis=true", "algorithm.tis_clip_low=3"),
            "algorithm.tis_clip_low",
            "must be below algorithm.tis_clip = 2",
        ),
        (
            ("algorithm.use_rs=true", "algorithm.rs_metric=binary_kl", "algorithm.rs_lower_bound=0.1"),
            "algorithm.rs_lower_bound",
            'unless algorithm.use_rs = true and algorithm.rs_metric = "ratio"',
        ),
        (("algorithm.bypass_mode=true",), "algorithm.bypass_mode", "unless algorithm.use_tis or algorithm.use_rs"),
        (
            ("algorithm.bypass_mode=true", "algorithm.use_tis=true"),
            "algorithm.bypass_mode",
            "would count the ratio twice",
        ),
        (
            ("algorithm.bypass_mode=true", "algorithm.use_rs=true", "algorithm.use_rollout_logprobs=false"),
            "algorithm.bypass_mode",
            'needs algorithm.use_rollout_logprobs = true with algorithm.loss_mode = "ppo"',
        ),
        (
            (
                "algorithm.loss_mode=gpg",
                "algorithm.use_rollout_logprobs=false",
                "algorithm.bypass_mode=true",
                "algorithm.use_tis=true",
                "algorithm.tis_batch_normalize=true",
            ),
            "algorithm.bypass_mode",
            "cannot be combined with algorithm.tis_batch_normalize",
        ),
        (
            ("algorithm.use_unbiased_kl=true",),
            "algorithm.use_unbiased_kl",
            "has no effect unless algorithm.kl_loss_coef is above 0",
        ),
        (
            ("algorithm.use_unbiased_kl=true", "algorithm.kl_loss_coef=0.1", "algorithm.kl_loss_type='k3+'"),
            "algorithm.use_unbiased_kl",
            'cannot be combined with algorithm.kl_loss_type = "k3+"',
        ),
        (
            ("algorithm.kl_coef=0.1", "algorithm.kl_loss_coef=0.1"),
            "algorithm.kl_coef",
            "would count the divergence twice, in the reward and with algorithm.kl_loss_coef in the loss",
        ),
        (
            ("algorithm.kl_before_normalization=true",),
            "algorithm.kl_before_normalization",
            "has no effect unless algorithm.kl_coef is above 0",
        ),
        (
            (
                "algorithm.kl_before_normalization=true",
                "algorithm.kl_coef=0.1",
                "algorithm.advantage_estimator=reinforce_plus_plus",
                "algorithm.normalize_advantages=true",
            ),
            "algorithm.kl_before_normalization",
            'has no effect with algorithm.advantage_estimator = "reinforce_plus_plus"',
        ),
        (
            ("algorithm.kl_metric_interval=5", "algorithm.kl_coef=0.1"),
            "algorithm.kl_metric_interval",
            "has no effect with algorithm.kl_coef, which measures the divergence at each train step",
        ),
        (("algorithm.gamma=0.9",), "algorithm.gamma", "it applies to reinforce_plus_plus, ppo"),
        (
            ("algorithm.advantage_estimator=reinforce_plus_plus",),
            "algorithm.advantage_estimator",
            "REINFORCE++ whitens its advantages",
        ),
        (
            ("algorithm.loss_scale_factor=128",),
            "algorithm.loss_scale_factor",
            'has no effect with algorithm.loss_agg_mode = "token-mean"; it applies to seq-mean-token-sum-norm',
        ),
        (
            ("algorithm.calculate_per_token_loss=true", "algorithm.count_masked_rollouts=false"),
            "algorithm.count_masked_rollouts",
            'has no effect with algorithm.loss_agg_mode = "token-mean"',
        ),
        (
            ("algorithm.calculate_per_token_loss=true", "algorithm.loss_agg_mode=rollout-mean"),
            "algorithm.loss_agg_mode",
            "contradicts algorithm.calculate_per_token_loss",
        ),
        (
            ("algorithm.advantage_estimator=reinforce_plus_plus_baseline",),
            "algorithm.advantage_estimator",
            "set algorithm.normalize_advantages = true",
        ),
        (
            ("algorithm.custom_advantage=a.py:f", "algorithm.advantage_estimator=rloo"),
            "algorithm.advantage_estimator",
            "contradicts algorithm.custom_advantage, which takes its place",
        ),
        (
            ("algorithm.custom_advantage=a.py:f", "algorithm.disable_grpo_std_normalization=true"),
            "algorithm.disable_grpo_std_normalization",
            "has no effect with algorithm.custom_advantage; it applies to grpo",
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
        (("algorithm.keep_old_actor=true", "algorithm.loss_mode=gpg"), "algorithm.keep_old_actor", "has no effect"),
        (
            (
                "algorithm.keep_old_actor=true",
                "algorithm.use_rollout_logprobs=false",
                "algorithm.loss_mode=decoupled_ppo",
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
            ("algorithm.custom_pg_loss_reducer=a.py:f", "algorithm.positive_example_nll_weight=0.1"),
            "algorithm.positive_example_nll_weight",
            "cannot be combined with algorithm.custom_pg_loss_reducer",
        ),
        (
            ("algorithm.custom_loss=a.py:f", "algorithm.loss_mode=gpg"),
            "algorithm.loss_mode",
            "contradicts algorithm.custom_loss, which takes its place",
        ),
        (
            ("algorithm.custom_loss=a.py:f", "algorithm.eps_clip=0.1"),
            "algorithm.eps_clip",
            "has no effect with algorithm.custom_loss; it applies to ppo, gspo",
        ),
        (
            ("algorithm.custom_loss=a.py:f", "algorithm.advantage_estimator=cispo"),
            "algorithm.advantage_estimator",
            'names a loss, which algorithm.custom_loss takes the place of; use "grpo"',
        ),
        (("algorithm.custom_tis=a.py:f",), "algorithm.custom_tis", "has no effect unless algorithm.use_tis = true"),
        (
            ("algorithm.custom_tis=a.py:f", "algorithm.use_tis=true", "algorithm.tis_clip=3.0"),
            "algorithm.tis_clip",
            "contradicts algorithm.custom_tis, which takes its place",
        ),
        (
            ("algorithm.custom_pg_loss_reducer=a.py:f",),
            "algorithm.calculate_per_token_loss",
            "contradicts algorithm.custom_pg_loss_reducer, which takes its place",
        ),
        (
            ("algorithm.custom_loss=a.py:f", "algorithm.loss_type=sft_loss"),
            "algorithm.custom_loss",
            'has no effect with algorithm.loss_type = "sft_loss"',
        ),
        (
            ("algorithm.advantage_estimator=rloo", "rollout.n_samples_per_prompt=1"),
            "rollout.n_samples_per_prompt",
            'or set algorithm.group_of_one = "reward"',
        ),
    ],
)
def test_a_combination_without_meaning_is_refused(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(LAPTOP, *overrides)
    assert message in found[key]


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.advantage_estimator=reinforce", "rollout.n_samples_per_prompt=1"),
        ("algorithm.advantage_estimator=cispo", "algorithm.eps_clip=1.0"),
        ("algorithm.loss_mode=prime_rl", "algorithm.use_rollout_logprobs=false", "algorithm.eps_clip_high=none"),
        ("algorithm.use_tis=true", "algorithm.tis_mode=mask", "algorithm.use_rollout_logprobs=false"),
        ("algorithm.use_rs=true", "algorithm.bypass_mode=true", "algorithm.use_rollout_logprobs=true"),
        ("algorithm.use_rs=true", "algorithm.rs_metric=binary_kl", "algorithm.use_rollout_logprobs=false"),
        ("algorithm.group_of_one=reward", "rollout.n_samples_per_prompt=1"),
        ("algorithm.custom_advantage=a.py:f", "rollout.n_samples_per_prompt=1"),
        (
            "algorithm.custom_loss=a.py:f",
            "algorithm.eps_clip_high=none",
            "algorithm.use_rollout_logprobs=false",
            "algorithm.use_tis=true",
            "algorithm.custom_tis=a.py:g",
            "algorithm.calculate_per_token_loss=false",
            "algorithm.custom_pg_loss_reducer=a.py:h",
        ),
        (
            "algorithm.disable_grpo_std_normalization=true",
            "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
            "algorithm.calculate_per_token_loss=false",
        ),
        ("algorithm.advantage_estimator=reinforce_plus_plus_baseline", "algorithm.normalize_advantages=true"),
    ],
)
def test_a_combination_that_means_something_is_accepted(overrides: tuple[str, ...]) -> None:
    load_topology(LAPTOP, overrides)


def test_the_declaration_names_settings_and_choices_that_exist() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(AlgorithmConfig)}
    for name, applies in APPLIES.items():
        assert name in fields
        assert applies.key in fields
        for choice in set(applies.choices) - {"custom"}:  # a function in place of a named choice
            assert msgspec.convert({applies.key: choice}, AlgorithmConfig) is not None
