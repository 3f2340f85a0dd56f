"""What combines in [algorithm]. The class of a loss or an estimator says which keys it has."""

from collections.abc import Iterator
from typing import Any, Final, get_args

import msgspec

from runtime.functions.load import project_of
from runtime.settings.derived import (
    asks_teachers,
    has_critic,
    keeps_teacher,
    measures_all,
    normalizes_weights,
    replays_experts,
    reward_keys,
    trains_demonstrations,
    trains_pairs,
    uses_reference,
    uses_teacher,
)
from runtime.settings.reading.config import Problem, type_of
from runtime.settings.recipe import Recipe
from runtime.settings.tables.algorithm import AlgorithmConfig, ClipTis, CustomReduction, CustomTis, MegatronTeacher
from runtime.settings.tables.estimators import Estimator, EstimatorTable, Gdpo
from runtime.settings.tables.losses import Loss, LossTable
from runtime.settings.tables.training import CriticConfig

CORRECTIONS: Final = ("tis", "rs", "opsm_delta")
OF_LOSS: Final = (*CORRECTIONS, "use_rollout_logprobs")  # settings that not every loss allows
OF_ESTIMATOR: Final = ("overlong_buffer_len", "length_penalty", "kl.before_normalization")  # nor every estimator


def allows(table: type[EstimatorTable | LossTable], setting: str) -> bool:
    """Return whether an estimator or a loss allows a setting in another table."""
    if issubclass(table, EstimatorTable):
        return setting in table.allows
    return not table.reads_engine and (table.reads_old or setting in CORRECTIONS)


def algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield combinations of algorithm settings that have no effect or no meaning."""
    yield from _without_effect(recipe.algorithm)
    if not trains_demonstrations(recipe):
        yield from _groups_of_one(recipe)
        yield from _rewards(recipe)
        yield from _corrections(recipe.algorithm)
        yield from _distillation(recipe)
    yield from _old_actor(recipe)
    yield from _custom(recipe)
    yield from _divergence(recipe)
    yield from _critic(recipe)


def _without_effect(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield settings that the loss or the estimator does not allow."""
    for key, chosen, settings, tables in (
        ("loss", algorithm.loss, OF_LOSS, get_args(Loss)),
        ("estimator", algorithm.estimator, OF_ESTIMATOR, get_args(Estimator)),
    ):
        for setting in settings:
            value: Any = algorithm
            for part in setting.split("."):
                value = getattr(value, part)
            if value is None or value is False or allows(type(chosen), setting):
                continue
            needs = ", ".join(type_of(table) for table in tables if allows(table, setting))
            message = f'has no effect with algorithm.{key}.type = "{chosen.type}"; it applies to {needs}'
            shown = getattr(value, "type", value)
            yield Problem.of(f"algorithm.{setting}{'' if shown is value else '.type'}", shown, message)


def _groups_of_one(recipe: Recipe) -> Iterator[Problem]:
    estimator, samples = recipe.algorithm.estimator, recipe.rollout.n_samples_per_prompt
    kept = not getattr(estimator, "normalize", True) or getattr(estimator, "group_of_one", "zero") == "reward"
    if samples > 1 or kept or not estimator.compares or uses_teacher(recipe.algorithm):
        return
    centred = hasattr(estimator, "normalize")
    how = "algorithm.estimator." + ("normalize = false" if centred else 'group_of_one = "reward"')
    yield Problem.of(
        "rollout.n_samples_per_prompt",
        samples,
        f"the normalized reward of a group of one is always 0: use at least 2, or set {how}",
    )


def _rewards(recipe: Recipe) -> Iterator[Problem]:
    algorithm, longest = recipe.algorithm, recipe.rollout.max_response_len
    estimator, keys = algorithm.estimator, reward_keys(algorithm)
    if estimator.whitens and not algorithm.normalize_advantages:
        message = "whitens its advantages: set algorithm.normalize_advantages = true"
        yield Problem.of("algorithm.estimator.type", estimator.type, message)
    if len(set(keys)) < len(keys):
        yield Problem.of("algorithm.estimator.reward_keys", keys, "names a reward twice")
    if isinstance(estimator, Gdpo):
        weights = estimator.reward_weights
        if not keys:
            message = "GDPO trains several rewards: name those of the grader's dict"
            yield Problem.of("algorithm.estimator.reward_keys", keys, message)
        if weights and len(weights) != len(keys):
            message = f"has {len(weights)} weights for the {len(keys)} names in algorithm.estimator.reward_keys"
            yield Problem.of("algorithm.estimator.reward_weights", weights, message)
    if algorithm.overlong_buffer_len is not None and algorithm.overlong_buffer_len > longest:
        message = f"must be at most rollout.max_response_len = {longest}"
        yield Problem.of("algorithm.overlong_buffer_len", algorithm.overlong_buffer_len, message)
    if algorithm.overlong_buffer_len is None and algorithm.overlong_penalty_factor != 1.0:
        message = "has no effect unless algorithm.overlong_buffer_len is set"
        yield Problem.of("algorithm.overlong_penalty_factor", algorithm.overlong_penalty_factor, message)


def _corrections(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    tis, correction = algorithm.tis, algorithm.tis or algorithm.rs
    if algorithm.use_rollout_logprobs and correction is not None and not algorithm.bypass_mode:
        key = "rs" if tis is None else "tis"
        message = "compares old log-probs with the engine's, which algorithm.use_rollout_logprobs makes the same"
        yield Problem.of(f"algorithm.{key}.type", correction.type, message)
    if isinstance(tis, ClipTis) and tis.lower_bound >= tis.upper_bound:
        message = f"must be below algorithm.tis.upper_bound = {tis.upper_bound:g}"
        yield Problem.of("algorithm.tis.lower_bound", tis.lower_bound, message)
    if algorithm.bypass_mode:
        yield from _bypass(algorithm)


def _bypass(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield what weights and rejections of the policy being trained cannot be combined with."""
    loss, weighs = f'algorithm.loss.type = "{algorithm.loss.type}"', algorithm.tis is not None
    if not weighs and algorithm.rs is None:
        message = "has no effect without algorithm.tis or algorithm.rs"
    elif weighs and algorithm.loss.has_ratio:
        message = f"would count the ratio twice: {loss} has one, and algorithm.tis another"
    elif algorithm.loss.has_ratio and not algorithm.use_rollout_logprobs:
        message = f"needs algorithm.use_rollout_logprobs = true with {loss}"
    elif normalizes_weights(algorithm):
        message = "cannot be combined with algorithm.tis.batch_normalize: the weights change within the batch"
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
    elif algorithm.loss.type == "decoupled_ppo":
        message = (
            'contradicts algorithm.loss.type = "decoupled_ppo", whose old policy is the one before the train step; '
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
    """Yield functions of the user without effect, and settings that such a function takes the place of."""
    algorithm = recipe.algorithm
    if isinstance(algorithm.reduction, CustomReduction) and algorithm.positive_example_nll_weight:
        message = "cannot be combined with algorithm.reduction.function: it may give a token no weight"
        yield Problem.of("algorithm.positive_example_nll_weight", algorithm.positive_example_nll_weight, message)
    functions = {key: getattr(getattr(algorithm, key), "function", None) for key in ("estimator", "tis", "reduction")}
    named = {f"{key}.function": value for key, value in functions.items()}
    for key, value in (named | {"rollout_data_postprocess": algorithm.rollout_data_postprocess}).items():
        without = trains_pairs(recipe) or (trains_demonstrations(recipe) and key != "reduction.function")
        if value is not None and without:
            message = f'has no effect with algorithm.loss.type = "{algorithm.loss.type}"'
            yield Problem.of(f"algorithm.{key}", value, message)
    if isinstance(algorithm.tis, CustomTis) and project_of(algorithm.tis.function) is None:
        yield from _replaced(algorithm, algorithm.tis)


def _replaced(algorithm: AlgorithmConfig, tis: CustomTis) -> Iterator[Problem]:
    """Yield settings of importance weights beside a function that is not slime's, which would read them."""
    message = "contradicts algorithm.tis.function, which takes its place; set one of them"
    for field in msgspec.structs.fields(CustomTis):
        value = getattr(tis, field.name)
        if not field.required and value != field.default:
            yield Problem.of(f"algorithm.tis.{field.name}", value, message)
    if algorithm.bypass_mode:
        yield Problem.of("algorithm.bypass_mode", True, message)


def _distillation(recipe: Recipe) -> Iterator[Problem]:
    algorithm, teacher = recipe.algorithm, recipe.model.opd_teacher_load
    if keeps_teacher(algorithm) and teacher is None:
        message = 'missing: the model of the teacher, which algorithm.opd.type = "megatron" needs'
        yield Problem(key="model.opd_teacher_load", message=message)
    if teacher is not None and not isinstance(algorithm.opd, MegatronTeacher):
        message = 'has no effect without algorithm.opd.type = "megatron"'
        yield Problem.of("model.opd_teacher_load", teacher, message)
    if asks_teachers(algorithm) and recipe.rollout.temperature != 1:
        message = (
            'must be 1 with algorithm.opd.type = "sglang": engines compute log-probs of given tokens at temperature 1; '
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
            message = 'has no effect unless algorithm.estimator.type = "ppo"'
            yield Problem.of(f"critic.{field.name}", value, message)


def _divergence(recipe: Recipe) -> Iterator[Problem]:
    """Yield settings of the divergence from the reference that contradict each other or have no effect."""
    algorithm, kl = recipe.algorithm, recipe.algorithm.kl
    if kl.reward_coef and kl.loss_coef:
        message = "would count the divergence twice, in the reward and with algorithm.kl.loss_coef in the loss"
        yield Problem.of("algorithm.kl.reward_coef", kl.reward_coef, message)
    if kl.before_normalization and not kl.reward_coef:
        message = "has no effect unless algorithm.kl.reward_coef is above 0"
        yield Problem.of("algorithm.kl.before_normalization", True, message)
    if kl.is_unbiased and not kl.loss_coef:
        yield Problem.of("algorithm.kl.unbiased", True, "has no effect unless algorithm.kl.loss_coef is above 0")
    if kl.metric_interval and (kl.loss_coef or kl.reward_coef):
        key = "loss_coef" if kl.loss_coef else "reward_coef"
        message = f"has no effect with algorithm.kl.{key}, which measures the divergence at each train step"
        yield Problem.of("algorithm.kl.metric_interval", kl.metric_interval, message)
    if not uses_reference(algorithm):
        message = "has no effect unless algorithm.kl.loss_coef, reward_coef or metric_interval is above 0"
        if recipe.model.ref_load is not None:
            yield Problem.of("model.ref_load", recipe.model.ref_load, message)
        if algorithm.ref_update_interval is not None:
            yield Problem.of("algorithm.ref_update_interval", algorithm.ref_update_interval, message)
