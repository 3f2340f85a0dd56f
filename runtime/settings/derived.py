"""What follows from a recipe's settings: which models, log-probs, samples and functions a run needs."""

from pathlib import Path
from typing import Final

import msgspec

from messages import EvalRequested, Prompt, SamplingParams
from runtime.functions.limits import UserLimits
from runtime.models.config import ModelDescription, read_model
from runtime.models.quantization import Quantization, quantization_of
from runtime.settings.recipe import Recipe
from runtime.settings.tables.algorithm import AlgorithmConfig, RatioRs, SglangTeacher, TisTable, TopkKl
from runtime.settings.tables.estimators import Gae, Remax
from runtime.settings.tables.prompts import DataConfig, EvalConfig
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.tables.rollout import RolloutConfig
from runtime.settings.tables.training import OptimizerConfig

MIX_BLOCK: Final = 1000  # prompts after which the order of sources with weights begins again


class FilledSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings with every default filled in."""

    temperature: float
    top_p: float
    top_k: int
    max_response_len: int  # tokens


def policy_model(recipe: Recipe) -> ModelDescription:
    """Read the model that a run starts from, without the keys of its config.json that the recipe ignores.

    Raises:
        ModelError: as in `read_model`.
    """
    return read_model(Path(recipe.model.hf_checkpoint), recipe.model.ignore_config_keys)


def quantization(recipe: Recipe) -> Quantization | None:
    """Return how the weights are stored that a run starts from. None: not quantized, or drawn at random.

    Raises:
        ModelError: config.json cannot be read.
    """
    return None if recipe.model.random_init else quantization_of(Path(recipe.model.hf_checkpoint))


def trains_demonstrations(recipe: Recipe) -> bool:
    """Return whether training uses demonstrations or preference pairs, so that nothing is generated and graded."""
    return recipe.algorithm.loss.learns_from != "samples"


def trains_pairs(recipe: Recipe) -> bool:
    """Return whether training uses preference pairs: each is a rollout with two parts, chosen and rejected."""
    return recipe.algorithm.loss.learns_from == "pairs"


def trains_reward_model(recipe: Recipe) -> bool:
    """Return whether the run's model is a reward model: it has a value head in place of its output layer."""
    return recipe.algorithm.loss.type == "rm"


def reads_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether every train step computes log-probs of the reference model."""
    return (
        algorithm.kl.loss_coef > 0 or algorithm.kl.reward_coef > 0 or algorithm.loss.type in ("dpo", "preference_ipo")
    )


def uses_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether the trainer has a reference model: for each train step, or for a metric of some."""
    return reads_reference(algorithm) or algorithm.kl.metric_interval > 0


def reads_old_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss, a correction of it or the advantages compare with the old policy."""
    weighs = (algorithm.tis is not None or algorithm.rs is not None) and not algorithm.bypass_mode
    corrects = weighs or algorithm.opsm_delta is not None or algorithm.kl.is_unbiased
    before = _reads_old_before(algorithm)
    return corrects or before or algorithm.loss.reads_old


def _reads_old_before(algorithm: AlgorithmConfig) -> bool:
    """Return whether old log-probs are read before the first optimizer step of a batch."""
    changes = algorithm.kl.reward_coef > 0 or algorithm.rollout_data_postprocess is not None
    return teaches_advantages(algorithm) or changes


def rejection_bounds(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """Return the lower and upper bound of `rs`: as set, or the defaults of a ratio."""
    rs = algorithm.rs
    if not isinstance(rs, RatioRs):
        return 0.0, 0.0 if rs is None else rs.upper_bound
    high = rs.upper_bound or (algorithm.tis or TisTable()).upper_bound
    return 1.0 / high if rs.lower_bound is None else rs.lower_bound, high


def needs_all_old_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Return whether old log-probs of all samples are needed before the first optimizer step of a batch."""
    before = _reads_old_before(algorithm)
    return normalizes_weights(algorithm) or (before and not algorithm.use_rollout_logprobs)


def normalizes_weights(algorithm: AlgorithmConfig) -> bool:
    """Return whether importance weights are divided by their mean over the batch."""
    return algorithm.tis is not None and algorithm.tis.batch_normalize


def teaches_advantages(algorithm: AlgorithmConfig) -> bool:
    """Return whether log-probs of a teacher change the advantages."""
    return algorithm.opd is not None and algorithm.opd.kl_coef > 0


def topk_divergence(algorithm: AlgorithmConfig) -> TopkKl | None:
    """Return the divergence over a teacher's likeliest tokens in the loss, if there is one."""
    return algorithm.opd.distillation if isinstance(algorithm.opd, SglangTeacher) else None


def uses_teacher(algorithm: AlgorithmConfig) -> bool:
    """Return whether a teacher changes advantages or loss. With both weights 0 it computes no log-probs."""
    return teaches_advantages(algorithm) or topk_divergence(algorithm) is not None


def keeps_teacher(algorithm: AlgorithmConfig) -> bool:
    """Return whether the trainer keeps the weights of a teacher."""
    return uses_teacher(algorithm) and not isinstance(algorithm.opd, SglangTeacher)


def asks_teachers(algorithm: AlgorithmConfig) -> bool:
    """Return whether teachers in engine pools compute log-probs of the samples."""
    return uses_teacher(algorithm) and isinstance(algorithm.opd, SglangTeacher)


def has_critic(recipe: Recipe) -> bool:
    """Return whether a critic estimates values."""
    return isinstance(recipe.algorithm.estimator, Gae) and not trains_demonstrations(recipe)


def first_policy_step(recipe: Recipe) -> int:
    """Return the first train step that trains the policy: earlier ones train the critic alone."""
    estimator = recipe.algorithm.estimator
    return estimator.num_critic_only_steps if isinstance(estimator, Gae) and has_critic(recipe) else 0


def critic_optimizer(recipe: Recipe) -> OptimizerConfig:
    """Return the critic's optimizer table: its own keys, completed by the actor's."""
    own = {name: getattr(recipe.critic, name) for name in OptimizerConfig.__struct_fields__}
    given = {name: value for name, value in own.items() if value is not None}
    return msgspec.structs.replace(recipe.optimizer, **given)


def reward_keys(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Return the names of the rewards that the estimator reads in place of one reward."""
    return getattr(algorithm.estimator, "reward_keys", ())


def needs_baseline(algorithm: AlgorithmConfig) -> bool:
    """Return whether each prompt group has a greedy sample, which is scored and not trained."""
    return isinstance(algorithm.estimator, Remax)


def replays_experts(algorithm: AlgorithmConfig) -> bool:
    """Return whether tokens are trained with recorded experts: of the engine, or of the pass for old log-probs."""
    return algorithm.use_routing_replay or algorithm.use_rollout_routing_replay


def measures_all(recipe: Recipe) -> bool:
    """Return whether the trainer computes old log-probs for all samples, not only for the first optimizer step."""
    algorithm = recipe.algorithm
    needed = reads_old_log_probs(algorithm) and not algorithm.use_rollout_logprobs
    return not trains_demonstrations(recipe) and (algorithm.get_mismatch_metrics or needed)


def precomputes_old_log_probs(recipe: Recipe) -> bool:
    """Return whether old log-probs can be computed before a batch is ready.

    They can if no train step changes the weights before the batch is trained.
    """
    steps, experts = recipe.algorithm.num_steps_per_rollout, replays_experts(recipe.algorithm)
    return measures_all(recipe) and steps > 1 and not experts and recipe.rollout.max_staleness == 0


def over_sampling_batch_size(rollout: RolloutConfig) -> int:
    """Return the number of groups to issue at a time."""
    return rollout.over_sampling_batch_size or rollout.rollout_batch_size


def truncates(rollout: RolloutConfig) -> bool:
    """Return whether top-p or top-k remove tokens before one is sampled."""
    return rollout.top_p < 1.0 or rollout.top_k > 0


def rollout_sampling(recipe: Recipe) -> FilledSampling:
    """Return the sampling settings of training samples."""
    rollout = recipe.rollout
    return FilledSampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_response_len=rollout.max_response_len,
    )


def eval_sampling(recipe: Recipe, item: EvalConfig) -> FilledSampling:
    """Return the sampling settings of an evaluation set: its own, completed by the rollout's."""
    rollout = recipe.rollout
    return FilledSampling(
        temperature=rollout.temperature if item.temperature is None else item.temperature,
        top_p=rollout.top_p if item.top_p is None else item.top_p,
        top_k=rollout.top_k if item.top_k is None else item.top_k,
        max_response_len=item.max_response_len or rollout.max_response_len,
    )


def sampling_params(
    rollout: RolloutConfig, sampling: FilledSampling, prompt_len: int, *, trains: bool
) -> SamplingParams:
    """Return the sampling parameters of a prompt's samples.

    Args:
        rollout: the recipe's settings.
        sampling: of training samples, or of an evaluation set.
        prompt_len: tokens of the prompt, which leave room for a response.
        trains: whether the samples are trained, so that the tokens that top-p and top-k kept are recorded.
    """
    room = sampling.max_response_len
    if rollout.max_context_len is not None:
        room = max(1, min(room, rollout.max_context_len - prompt_len))
    return SamplingParams(
        max_new_tokens=room,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        skip_special_tokens=rollout.skip_special_tokens,
        return_sampling_mask=trains and rollout.return_sampling_mask,
    )


def eval_request(
    recipe: Recipe, item: EvalConfig, number: int, prompt: Prompt, *, step: int, version: int, num_samples: int
) -> EvalRequested:
    """Return the task of one prompt of an evaluation set, with the set's sampling settings.

    Args:
        recipe: the recipe.
        item: the evaluation set.
        number: of the prompt in the set.
        prompt: to generate from.
        step: train steps before the evaluation.
        version: weight version to evaluate.
        num_samples: of the prompt.
    """
    sampling = eval_sampling(recipe, item)
    return EvalRequested(
        step=step,
        set=item.name,
        item=number,
        version=version,
        prompt=prompt,
        num_samples=num_samples,
        sampling=sampling_params(recipe.rollout, sampling, len(prompt.prompt_ids), trains=False),
    )


def eval_data(recipe: Recipe, item: EvalConfig) -> DataConfig:
    """Return an evaluation set as a data source: its own columns and grader, completed by the first data source's."""
    first = recipe.data[0]
    kwargs = item.apply_chat_template_kwargs
    template, continues = item.apply_chat_template, item.continue_final_message
    return DataConfig(
        name=item.name,
        path=item.path,
        input_key=item.input_key or first.input_key,
        label_key=item.label_key or first.label_key,
        chosen_key=first.chosen_key,
        rejected_key=first.rejected_key,
        metadata_key=item.metadata_key or first.metadata_key,
        tool_key=item.tool_key or first.tool_key,
        apply_chat_template=first.apply_chat_template if template is None else template,
        apply_chat_template_kwargs=first.apply_chat_template_kwargs if kwargs is None else kwargs,
        continue_final_message=first.continue_final_message if continues is None else continues,
        rm_type=item.rm_type or first.rm_type,
        max_row_bytes=first.max_row_bytes,
    )


def limits_of(reward: RewardConfig) -> UserLimits:
    """Return the limits of processes of users' functions."""
    return UserLimits(memory_bytes=reward.memory_bytes, max_files=reward.max_files, env=reward.env)


def max_prompt_len(rollout: RolloutConfig) -> int | None:
    """Return the maximum prompt length in tokens: as set, else one less than the context, else none (no limit)."""
    if rollout.max_prompt_len is not None or rollout.max_context_len is None:
        return rollout.max_prompt_len
    return rollout.max_context_len - 1
