"""What combines in [algorithm]: the one declaration of which setting applies to which estimator, loss or reduction."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, get_args

import msgspec

from runtime.settings.derived import (
    agg_mode,
    asks_teachers,
    estimator,
    has_critic,
    keeps_teacher,
    loss_mode,
    measures_all,
    replays_experts,
    trains_demonstrations,
    trains_pairs,
    uses_groups,
    uses_reference,
    uses_teacher,
    uses_topk,
)
from runtime.settings.reading.config import Problem
from runtime.settings.recipe import Recipe
from runtime.settings.slime.functions import PREFIX
from runtime.settings.tables.algorithm import AlgorithmConfig, Custom, Estimator, LossMode
from runtime.settings.tables.training import CriticConfig

GRPO: Final = ("grpo", "gspo", "cispo")  # the same advantages
GROUP_MEANS: Final = (*GRPO, "reinforce_plus_plus_baseline", "rloo", "opo", "gpg", "custom")
# "maxrl" expects rewards that are not negative, and "gdpo" trains named rewards
SHAPED: Final = (*GROUP_MEANS, "grpo_passk", "reinforce", "reinforce_plus_plus", "remax", "ppo")
WITH_RETURNS: Final = ("reinforce_plus_plus", "ppo")  # of each token
CLIPPED: Final = ("ppo", "gspo", "decoupled_ppo")
CORRECTED: Final = (
    "ppo",
    "gspo",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "sapo",
    "gmpo",
    "gpg",
    "custom",
)  # others compare with the engine
WITH_OLD: Final = (*CLIPPED, "cispo", "dppo_tv", "dppo_kl", "gmpo")


class Applies(NamedTuple):
    """The choices of another key with which a setting has an effect."""

    key: str
    choices: tuple[str | bool, ...]


APPLIES: Final[Mapping[str, Applies]] = {
    "preference_loss": Applies("loss_type", ("dpo_loss",)),
    "dpo_beta": Applies("loss_type", ("dpo_loss",)),
    "label_smoothing": Applies("preference_loss", ("sigmoid",)),
    "disable_rewards_normalization": Applies(
        "advantage_estimator", (*GRPO, "reinforce_plus_plus_baseline", "reinforce")
    ),
    "disable_grpo_std_normalization": Applies("advantage_estimator", (*GRPO, "grpo_passk", "gdpo")),
    "group_of_one": Applies(
        "advantage_estimator", (*GRPO, "reinforce_plus_plus_baseline", "rloo", "opo", "gpg", "grpo_passk", "gdpo")
    ),
    "gdpo_reward_keys": Applies("advantage_estimator", ("gdpo", "custom")),
    "gdpo_reward_weights": Applies("advantage_estimator", ("gdpo",)),
    "gamma": Applies("advantage_estimator", WITH_RETURNS),
    "discount_tool_tokens": Applies("advantage_estimator", WITH_RETURNS),
    "lambd": Applies("advantage_estimator", ("ppo",)),
    "kl_before_normalization": Applies(
        "advantage_estimator",
        (*GRPO, "reinforce_plus_plus_baseline", "rloo", "opo", "gpg", "grpo_passk", "reinforce"),
    ),
    "overlong_buffer_len": Applies("advantage_estimator", SHAPED),
    "length_penalty": Applies("advantage_estimator", GROUP_MEANS),
    **{
        name: Applies("length_penalty", ("linear",))
        for name in ("num_output_tokens_weight", "num_input_tokens_weight", "num_turns_weight")
    },
    "eps_clip": Applies("loss_mode", WITH_OLD),
    "eps_clip_high": Applies("loss_mode", WITH_OLD),
    "eps_clip_c": Applies("loss_mode", (*CLIPPED, "dppo_tv", "dppo_kl")),
    "use_rollout_logprobs": Applies(
        "loss_mode", (*(mode for mode in WITH_OLD if mode != "decoupled_ppo"), "sapo", "custom")
    ),
    "behav_imp_weight_cap": Applies("loss_mode", ("decoupled_ppo",)),
    "dppo_mask_low": Applies("loss_mode", ("prime_rl",)),
    "dppo_mask_high": Applies("loss_mode", ("prime_rl",)),
    "ipo_threshold": Applies("loss_mode", ("prime_rl_ipo",)),
    "adv_tau": Applies("loss_mode", ("prime_rl", "prime_rl_ipo")),
    "kl_tau": Applies("loss_mode", ("prime_rl", "prime_rl_ipo")),
    "tau_pos": Applies("loss_mode", ("sapo",)),
    "tau_neg": Applies("loss_mode", ("sapo",)),
    "use_tis": Applies("loss_mode", CORRECTED),
    "use_rs": Applies("loss_mode", CORRECTED),
    "use_opsm": Applies("loss_mode", CORRECTED),
    **{
        name: Applies("use_tis", (True,))
        for name in ("tis_clip_low", "tis_level", "tis_mode", "tis_batch_normalize", "custom_tis")
    },
    **{name: Applies("use_rs", (True,)) for name in ("rs_level", "rs_metric", "rs_upper_bound", "rs_veto_threshold")},
    "opsm_delta": Applies("use_opsm", (True,)),
    "opd_type": Applies("use_opd", (True,)),
    "opd_kl_coef": Applies("use_opd", (True,)),
    "distillation_loss_coef": Applies("use_opd", (True,)),
    "mixed_kl_weight": Applies("distillation_kl_type", ("mixed",)),
    "zero_outside_topk": Applies("distillation_kl_type", ("reverse", "mixed")),
    **{
        name: Applies("advantage_estimator", ("ppo",))
        for name in (
            "gae_lambda_value",
            "length_adaptive_alpha",
            "value_clip",
            "value_loss_coef",
            "num_critic_only_steps",
        )
    },
    "loss_scale_factor": Applies("loss_agg_mode", ("seq-mean-token-sum-norm",)),
    "count_masked_rollouts": Applies(
        "loss_agg_mode", ("rollout-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ),
}

CUSTOM: Final = {  # function of the user in place of a named choice
    "advantage_estimator": "custom_advantage",
    "loss_mode": "custom_loss",
    "loss_agg_mode": "custom_pg_loss_reducer",
}
REPLACED: Final[Mapping[str, tuple[str, ...]]] = {  # what a function of the user takes the place of
    "custom_advantage": ("advantage_estimator",),
    "custom_loss": ("loss_mode",),
    "custom_tis": ("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "tis_batch_normalize", "bypass_mode"),
    "custom_pg_loss_reducer": ("loss_agg_mode", "calculate_per_token_loss"),
    "rollout_data_postprocess": (),
}

TOPK: Final = ("distillation_topk", "distillation_kl_type")  # keys of the divergence over a teacher's likeliest tokens


class Refusal(NamedTuple):
    """Estimators and losses that cannot be combined, with the reason."""

    estimators: tuple[Estimator, ...]
    losses: tuple[LossMode, ...]
    reason: str


REFUSALS: Final[tuple[Refusal, ...]] = tuple(
    Refusal(
        (named,),
        tuple(loss for loss in get_args(LossMode) if loss != named),
        f'contradicts algorithm.advantage_estimator = "{named}", which names its loss; use "grpo" there',
    )
    for named in ("gspo", "cispo")
)  # all other pairs are allowed


def refusal(estimator: Estimator, loss: LossMode | Custom) -> str:
    """Return why an estimator cannot be combined with a loss. Empty if it can."""
    found = (item.reason for item in REFUSALS if estimator in item.estimators and loss in item.losses)
    return next(found, "")


def algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield combinations of algorithm settings that have no effect or no meaning."""
    yield from _without_effect(recipe.algorithm)
    if not trains_demonstrations(recipe):
        yield from _groups_of_one(recipe)
        yield from _estimators(recipe.algorithm)
        yield from _rewards(recipe)
        yield from _corrections(recipe.algorithm)
        yield from _distillation(recipe)
    yield from _old_actor(recipe)
    yield from _custom(recipe)
    yield from _reductions(recipe.algorithm)
    yield from _divergence(recipe)
    yield from _terms(recipe)
    yield from _critic(recipe)


def _without_effect(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    resolved = {
        "advantage_estimator": estimator(algorithm),
        "loss_mode": loss_mode(algorithm),
        "loss_agg_mode": agg_mode(algorithm),
    }
    for field in msgspec.structs.fields(AlgorithmConfig):
        applies, value = APPLIES.get(field.name), getattr(algorithm, field.name)
        if applies is None or value == field.default:
            continue
        chosen = resolved.get(applies.key, getattr(algorithm, applies.key))
        if chosen in applies.choices:
            continue
        needs = ", ".join(str(choice) for choice in applies.choices if choice != "custom")
        message = f'has no effect with algorithm.{applies.key} = "{chosen}"; it applies to {needs}'
        if chosen == "custom":
            message = f"has no effect with algorithm.{CUSTOM[applies.key]}; it applies to {needs}"
        if applies.choices == (True,):
            message = f"has no effect unless algorithm.{applies.key} = true"
        yield Problem.of(f"algorithm.{field.name}", value, message)


def _groups_of_one(recipe: Recipe) -> Iterator[Problem]:
    algorithm, samples = recipe.algorithm, recipe.rollout.n_samples_per_prompt
    kept = algorithm.disable_rewards_normalization or algorithm.group_of_one == "reward"
    if samples > 1 or kept or not uses_groups(algorithm) or uses_teacher(algorithm):
        return
    centred = algorithm.advantage_estimator in APPLIES["disable_rewards_normalization"].choices
    how = "algorithm.disable_rewards_normalization = true" if centred else 'algorithm.group_of_one = "reward"'
    yield Problem.of(
        "rollout.n_samples_per_prompt",
        samples,
        f"the normalized reward of a group of one is always 0: use at least 2, or set {how}",
    )


def _estimators(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if reason := refusal(algorithm.advantage_estimator, loss_mode(algorithm)):
        yield Problem.of("algorithm.loss_mode", loss_mode(algorithm), reason)
    if algorithm.advantage_estimator.startswith("reinforce_plus_plus") and not algorithm.normalize_advantages:
        message = "REINFORCE++ whitens its advantages: set algorithm.normalize_advantages = true"
        yield Problem.of("algorithm.advantage_estimator", algorithm.advantage_estimator, message)


def _rewards(recipe: Recipe) -> Iterator[Problem]:
    algorithm, longest = recipe.algorithm, recipe.rollout.max_response_len
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if estimator(algorithm) == "gdpo":
        if not keys:
            message = "GDPO trains several rewards: name those of the grader's dict"
            yield Problem.of("algorithm.gdpo_reward_keys", keys, message)
        if not algorithm.normalize_advantages:
            message = "GDPO whitens its advantages: set algorithm.normalize_advantages = true"
            yield Problem.of("algorithm.advantage_estimator", "gdpo", message)
    if len(set(keys)) < len(keys):
        yield Problem.of("algorithm.gdpo_reward_keys", keys, "names a reward twice")
    if weights and len(weights) != len(keys):
        message = f"has {len(weights)} weights for the {len(keys)} names in algorithm.gdpo_reward_keys"
        yield Problem.of("algorithm.gdpo_reward_weights", weights, message)
    if algorithm.overlong_buffer_len is not None and algorithm.overlong_buffer_len > longest:
        message = f"must be at most rollout.max_response_len = {longest}"
        yield Problem.of("algorithm.overlong_buffer_len", algorithm.overlong_buffer_len, message)
    if algorithm.overlong_buffer_len is None and algorithm.overlong_penalty_factor != 1.0:
        message = "has no effect unless algorithm.overlong_buffer_len is set"
        yield Problem.of("algorithm.overlong_penalty_factor", algorithm.overlong_penalty_factor, message)


def _corrections(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if algorithm.use_rollout_logprobs and (algorithm.use_tis or algorithm.use_rs) and not algorithm.bypass_mode:
        key = "use_tis" if algorithm.use_tis else "use_rs"
        message = "compares old log-probs with the engine's, which algorithm.use_rollout_logprobs makes the same"
        yield Problem.of(f"algorithm.{key}", True, message)
    if algorithm.use_tis and algorithm.tis_clip_low >= algorithm.tis_clip:
        message = f"must be below algorithm.tis_clip = {algorithm.tis_clip:g}"
        yield Problem.of("algorithm.tis_clip_low", algorithm.tis_clip_low, message)
    if algorithm.rs_lower_bound is not None and not (algorithm.use_rs and algorithm.rs_metric == "ratio"):
        message = 'has no effect unless algorithm.use_rs = true and algorithm.rs_metric = "ratio"'
        yield Problem.of("algorithm.rs_lower_bound", algorithm.rs_lower_bound, message)
    if algorithm.bypass_mode:
        yield from _bypass(algorithm)


def _bypass(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield what weights and rejections of the policy being trained cannot be combined with."""
    named, has_ratio = loss_mode(algorithm), loss_mode(algorithm) != "gpg"
    if not (algorithm.use_tis or algorithm.use_rs):
        message = "has no effect unless algorithm.use_tis or algorithm.use_rs is true"
    elif algorithm.use_tis and has_ratio:
        message = f'would count the ratio twice: algorithm.loss_mode = "{named}" has one, and algorithm.use_tis another'
    elif has_ratio and not algorithm.use_rollout_logprobs:
        message = f'needs algorithm.use_rollout_logprobs = true with algorithm.loss_mode = "{named}"'
    elif algorithm.tis_batch_normalize:
        message = "cannot be combined with algorithm.tis_batch_normalize: the weights change within the batch"
    else:
        return
    yield Problem.of("algorithm.bypass_mode", True, message)


def _old_actor(recipe: Recipe) -> Iterator[Problem]:
    """Yield what old log-probs of the weights that sampled a token cannot be combined with."""
    algorithm = recipe.algorithm
    if not algorithm.keep_old_actor:
        return
    if not measures_all(recipe):
        message = "has no effect: the loss does not read log-probs of an old policy that the trainer computes"
    elif loss_mode(algorithm) == "decoupled_ppo":
        message = (
            'contradicts algorithm.loss_mode = "decoupled_ppo", whose old policy is the one before the train step; '
            'use "ppo"'
        )
    elif replays_experts(algorithm):
        message = "cannot be combined with replayed experts, which are those of the policy before the train step"
    elif not recipe.rollout.max_token_staleness:
        message = "needs rollout.max_token_staleness of at least 1: the number of train steps to keep weights of"
    else:
        return
    yield Problem.of("algorithm.keep_old_actor", True, message)


def _custom(recipe: Recipe) -> Iterator[Problem]:
    """Yield functions of the user without effect, and named choices that such a function takes the place of."""
    algorithm = recipe.algorithm
    if algorithm.custom_loss is not None and algorithm.advantage_estimator in ("gspo", "cispo"):
        message = 'names a loss, which algorithm.custom_loss takes the place of; use "grpo" for the same advantages'
        yield Problem.of("algorithm.advantage_estimator", algorithm.advantage_estimator, message)
    if algorithm.custom_pg_loss_reducer is not None and algorithm.positive_example_nll_weight:
        message = "cannot be combined with algorithm.custom_pg_loss_reducer, whose weights may be 0"
        yield Problem.of("algorithm.positive_example_nll_weight", algorithm.positive_example_nll_weight, message)
    for function, names in REPLACED.items():
        if (named := getattr(algorithm, function)) is None:
            continue
        if trains_pairs(recipe) or (trains_demonstrations(recipe) and function != "custom_pg_loss_reducer"):
            message = f'has no effect with algorithm.loss_type = "{algorithm.loss_type}"'
            yield Problem.of(f"algorithm.{function}", named, message)
        if function == "custom_tis" and named.startswith(PREFIX):
            continue  # it reads them as slime's args
        for field in msgspec.structs.fields(AlgorithmConfig):
            value = getattr(algorithm, field.name)
            if field.name in names and value != field.default:
                message = f"contradicts algorithm.{function}, which takes its place; set one of them"
                yield Problem.of(f"algorithm.{field.name}", value, message)


def _distillation(recipe: Recipe) -> Iterator[Problem]:
    algorithm, teacher = recipe.algorithm, recipe.model.opd_teacher_load
    if algorithm.use_opd and algorithm.opd_type is None:
        message = 'missing: where the teacher is; allowed: "sglang" (an engine pool), "megatron" (the trainer)'
        yield Problem(key="algorithm.opd_type", message=message)
    if keeps_teacher(algorithm) and teacher is None:
        message = 'missing: the model of the teacher, which algorithm.opd_type = "megatron" needs'
        yield Problem(key="model.opd_teacher_load", message=message)
    if teacher is not None and not (algorithm.use_opd and algorithm.opd_type == "megatron"):
        message = 'has no effect without algorithm.use_opd = true and algorithm.opd_type = "megatron"'
        yield Problem.of("model.opd_teacher_load", teacher, message)
    if uses_topk(algorithm) and algorithm.opd_type == "megatron":
        message = 'needs algorithm.opd_type = "sglang": a teacher in the trainer computes no log-probs of other tokens'
        yield Problem.of("algorithm.distillation_loss_coef", algorithm.distillation_loss_coef, message)
    for name in () if uses_topk(algorithm) else TOPK:
        value = getattr(algorithm, name)
        if value != getattr(AlgorithmConfig(), name):
            message = "has no effect unless algorithm.use_opd = true and algorithm.distillation_loss_coef is above 0"
            yield Problem.of(f"algorithm.{name}", value, message)
    if asks_teachers(algorithm) and recipe.rollout.temperature != 1:
        message = (
            'must be 1 with algorithm.opd_type = "sglang": engines compute log-probs of given tokens at temperature 1; '
            'a teacher in the trainer ("megatron") computes them at any'
        )
        yield Problem.of("rollout.temperature", recipe.rollout.temperature, message)


def _critic(recipe: Recipe) -> Iterator[Problem]:
    """Yield keys of the critic without effect."""
    if has_critic(recipe):
        return
    for field in msgspec.structs.fields(CriticConfig):
        value = getattr(recipe.critic, field.name)
        if value != field.default:
            message = 'has no effect unless algorithm.advantage_estimator = "ppo"'
            yield Problem.of(f"critic.{field.name}", value, message)


def _reductions(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    if algorithm.calculate_per_token_loss and algorithm.loss_agg_mode not in (None, "token-mean"):
        message = "contradicts algorithm.calculate_per_token_loss = true; set one of them"
        yield Problem.of("algorithm.loss_agg_mode", algorithm.loss_agg_mode, message)


def _divergence(recipe: Recipe) -> Iterator[Problem]:
    """Yield settings of the divergence from the reference that contradict each other or have no effect."""
    algorithm = recipe.algorithm
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        message = "would count the divergence twice, in the reward and with algorithm.kl_loss_coef in the loss"
        yield Problem.of("algorithm.kl_coef", algorithm.kl_coef, message)
    if algorithm.kl_before_normalization and not algorithm.kl_coef:
        message = "has no effect unless algorithm.kl_coef is above 0"
        yield Problem.of("algorithm.kl_before_normalization", True, message)
    if algorithm.kl_metric_interval and (algorithm.kl_loss_coef or algorithm.kl_coef):
        key = "kl_loss_coef" if algorithm.kl_loss_coef else "kl_coef"
        message = f"has no effect with algorithm.{key}, which measures the divergence at each train step"
        yield Problem.of("algorithm.kl_metric_interval", algorithm.kl_metric_interval, message)
    if not uses_reference(algorithm):
        message = "has no effect unless algorithm.kl_loss_coef, kl_coef or kl_metric_interval is above 0"
        if recipe.model.ref_load is not None:
            yield Problem.of("model.ref_load", recipe.model.ref_load, message)
        if algorithm.ref_update_interval is not None:
            yield Problem.of("algorithm.ref_update_interval", algorithm.ref_update_interval, message)


def _terms(recipe: Recipe) -> Iterator[Problem]:
    algorithm = recipe.algorithm
    if algorithm.positive_example_nll_weight and algorithm.custom_pg_loss_reducer is not None:
        message = "cannot be combined with algorithm.custom_pg_loss_reducer: it may give a token no weight"
        yield Problem.of("algorithm.positive_example_nll_weight", algorithm.positive_example_nll_weight, message)
    if algorithm.use_unbiased_kl and (algorithm.kl_loss_coef == 0 or algorithm.kl_loss_type == "k3+"):
        message = "has no effect unless algorithm.kl_loss_coef is above 0"
        if algorithm.kl_loss_coef:
            message = 'cannot be combined with algorithm.kl_loss_type = "k3+", whose gradient is unbiased without it'
        yield Problem.of("algorithm.use_unbiased_kl", True, message)
    if algorithm.eps_clip >= 1 and loss_mode(algorithm) in CLIPPED:
        message = "must be below 1: ratios are clipped at 1 - eps_clip"
        yield Problem.of("algorithm.eps_clip", algorithm.eps_clip, message)
