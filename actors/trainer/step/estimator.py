"""Advantages of a batch's tokens, by the estimator that the recipe names. `ESTIMATORS` declares them all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs, Advantages, Flags, Floats, sample_sums
from actors.trainer.algorithms.distillation import opd_advantages
from actors.trainer.algorithms.group_baselines import (
    GroupOfOne,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    reinforce_advantages,
    remax_advantages,
    rloo_advantages,
)
from actors.trainer.algorithms.kl import kl_clamped, kl_divergence
from actors.trainer.algorithms.returns import (
    ppo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from actors.trainer.algorithms.whitening import whiten
from actors.trainer.data.batch import TrainBatch
from actors.trainer.plugins.functions import custom_advantage
from runtime.settings.derived import trains_demonstrations, uses_teacher
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.estimators import CustomEstimator
from runtime.settings.topology import Topology

log = structlog.get_logger()


class Estimate(NamedTuple):
    """An estimator: a pure function, the inputs that it needs, and the settings that it takes."""

    function: Callable[..., Floats | Advantages]  # one advantage per sample, [B], or Advantages per token
    inputs: tuple[str, ...]  # names in AdvantageInputs, in the order of the function's arguments
    options: tuple[str, ...] = ()  # names of its table, and "kl_coef"; the function's keyword arguments

    def needs(self, name: str) -> bool:
        """Whether the function reads this input."""
        return name in self.inputs


OPTIONAL: Final = ("rewards_per_token",)  # inputs that may be None; "kl" too, without algorithm.kl.reward_coef
GROUPED: Final = ("rewards", "groups", "rollouts")
RETURNS: Final = ("response_mask", "kl", "rewards_per_token")

ESTIMATORS: Final[Mapping[str, Estimate]] = {  # by the type of algorithm.estimator
    "grpo": Estimate(grpo_advantages, GROUPED, ("normalize", "normalize_std", "group_of_one")),
    "reinforce_plus_plus": Estimate(
        reinforce_plus_plus_advantages, ("rewards", "lengths", "loss_mask", *RETURNS), ("kl_coef", "gamma")
    ),
    "reinforce_plus_plus_baseline": Estimate(
        reinforce_plus_plus_baseline_advantages,
        (*GROUPED, "lengths", "kl"),
        ("kl_coef", "normalize", "group_of_one"),
    ),
    "rloo": Estimate(rloo_advantages, GROUPED, ("group_of_one",)),
    "opo": Estimate(opo_advantages, (*GROUPED, "mask_sums"), ("group_of_one",)),
    "gpg": Estimate(gpg_advantages, GROUPED, ("group_of_one",)),
    "maxrl": Estimate(maxrl_advantages, GROUPED),
    "grpo_passk": Estimate(passk_advantages, GROUPED, ("normalize_std", "group_of_one")),
    "gdpo": Estimate(
        gdpo_advantages, ("named_rewards", "groups", "rollouts"), ("weights", "normalize_std", "group_of_one")
    ),
    "remax": Estimate(remax_advantages, ("rewards", "baseline_rewards")),
    "reinforce": Estimate(reinforce_advantages, ("rewards", "rollouts"), ("normalize",)),
    "ppo": Estimate(
        ppo_advantages,
        ("rewards", "values", "lengths", *RETURNS),
        ("kl_coef", "gamma", "lambd", "critic_lambd", "length_adaptive_alpha"),
    ),
}


def group_of_one(topology: Topology) -> GroupOfOne:
    """Return the advantage of a group with a single rollout: as set, or its reward if every group has one sample."""
    algorithm = topology.algorithm
    named: GroupOfOne = getattr(algorithm.estimator, "group_of_one", "zero")
    alone = topology.rollout.n_samples_per_prompt == 1 and algorithm.estimator.compares
    if named == "reward" or not alone or trains_demonstrations(topology):
        return named
    if getattr(algorithm.estimator, "normalize", True) and not uses_teacher(algorithm):
        log.warning("rewards_not_normalized", reason="rollout.n_samples_per_prompt = 1: every advantage would be 0")
    return "reward"


def advantage_inputs(batch: TrainBatch, reward_keys: Sequence[str] = (), **columns: Floats | None) -> AdvantageInputs:
    """Return what estimators read of a batch.

    Args:
        batch: The whole batch.
        reward_keys: Names of its named rewards.
        columns: Further columns by their names in AdvantageInputs.
    """
    inputs = AdvantageInputs(
        rewards=batch.rewards_B,
        groups=batch.groups_B,
        rollouts=batch.rollouts_B,
        lengths=batch.lengths_B,
        loss_mask=batch.loss_mask_N != 0,
        response_mask=response_mask(batch),
        named_rewards=_named_rewards(batch, reward_keys),
        baseline_rewards=batch.baseline_rewards_B,
        rewards_per_token=None if batch.token_rewards_N is None else batch.token_rewards_N.astype(np.float64),
    )
    return replace(inputs, **cast(dict[str, Any], columns))


def with_divergence(
    inputs: AdvantageInputs, old_log_probs_N: NDArray[Any], ref_log_probs_N: NDArray[Any], algorithm: AlgorithmConfig
) -> AdvantageInputs:
    """Add the divergence of the old policy from the reference, by the estimator of the settings, in float64.

    Args:
        inputs: The whole batch.
        old_log_probs_N: Of the old policy, 0 where the token does not train.
        ref_log_probs_N: Of the reference, 0 where the token does not train.
        algorithm: Names the estimator of the divergence.
    """
    old, ref = old_log_probs_N.astype(np.float64), ref_log_probs_N.astype(np.float64)
    pair = torch.from_numpy(old), torch.from_numpy(ref)
    kl = kl_divergence(*pair, algorithm.kl.type, max_log_ratio=algorithm.max_log_ratio).numpy()
    return replace(inputs, kl=kl, old_log_probs=old, ref_log_probs=ref)


def divergence_clamped(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Floats:
    """Mark tokens whose divergence in `inputs.kl` is limited, with 1."""
    assert inputs.old_log_probs is not None
    assert inputs.ref_log_probs is not None
    pair = torch.from_numpy(inputs.old_log_probs), torch.from_numpy(inputs.ref_log_probs)
    return kl_clamped(*pair, algorithm.kl.type, max_log_ratio=algorithm.max_log_ratio).numpy()


def token_advantages(inputs: AdvantageInputs, algorithm: AlgorithmConfig, alone: GroupOfOne) -> Advantages:
    """Compute the advantage of each token. Every rank computes those of the whole batch.

    Args:
        inputs: The whole batch.
        algorithm: Names the estimator.
        alone: Advantage of a group with a single rollout.

    Raises:
        ValueError: The estimator needs an input that is None.
    """
    if algorithm.loss.type in ("dpo", "preference_ipo"):
        return Advantages(inputs.spread(np.where(inputs.rewards > 0, 1.0, -1.0)))  # chosen or rejected
    if not getattr(algorithm.estimator, "discount_tool_tokens", True):
        inputs = replace(inputs, response_mask=inputs.loss_mask)
    found = _estimated(inputs, algorithm, alone)
    if not isinstance(found, Advantages):
        found = Advantages(inputs.spread(found))
    if inputs.teacher_log_probs is not None and algorithm.opd is not None:
        found = found._replace(advantages=_distilled(inputs, found.advantages, algorithm.opd.kl_coef))
    if algorithm.normalize_advantages:
        found = found._replace(advantages=whiten(found.advantages, inputs.loss_mask))
    return found


def idle_samples(batch: TrainBatch, advantages_N: Floats) -> Flags:
    """Return the samples of rollouts without a trained token whose advantage is other than 0, [B].

    They have no term in the loss, if no setting gives them one (`terms_of_all`).
    """
    has_term_N = (batch.loss_mask_N != 0) & (advantages_N != 0)  # NaN is other than 0
    has_term_B = np.logical_or.reduceat(has_term_N, batch.starts_B)
    return np.bincount(batch.rollouts_B, weights=has_term_B)[batch.rollouts_B] == 0


def _estimated(inputs: AdvantageInputs, algorithm: AlgorithmConfig, alone: GroupOfOne) -> Floats | Advantages:
    """Call the estimator, the named one or the user's, and subtract the divergence where it does not do so itself."""
    named, coef = algorithm.estimator, algorithm.kl.reward_coef
    if isinstance(named, CustomEstimator):
        return custom_advantage(named.function)(inputs)
    estimate = ESTIMATORS[named.type]
    if algorithm.kl.before_normalization:
        divergence = sample_sums(_divergence(inputs), inputs.lengths)
        inputs = replace(inputs, rewards=inputs.rewards - coef * divergence)
        coef = 0.0
    given = {name: getattr(inputs, name) for name in estimate.inputs}
    optional = OPTIONAL if algorithm.kl.reward_coef else (*OPTIONAL, "kl")
    if missing := [name for name, values in given.items() if values is None and name not in optional]:
        raise ValueError(f'the estimator "{named.type}" needs {", ".join(missing)}')
    shared = {"kl_coef": coef, "group_of_one": alone}
    options = {name: shared[name] if name in shared else getattr(named, name) for name in estimate.options}
    found = estimate.function(*given.values(), **options)
    if not coef or estimate.needs("kl"):
        return found
    assert not isinstance(found, Advantages)
    return Advantages(inputs.spread(found) - coef * _divergence(inputs))


def _divergence(inputs: AdvantageInputs) -> Floats:
    if inputs.kl is None:
        raise ValueError("algorithm.kl.reward_coef needs the divergence of each token from the reference")
    return inputs.kl


def _distilled(inputs: AdvantageInputs, advantages: Floats, coef: float) -> Floats:
    log_probs, teacher = inputs.old_log_probs, inputs.teacher_log_probs
    assert log_probs is not None
    assert teacher is not None
    return opd_advantages(advantages, log_probs, teacher, inputs.loss_mask, opd_kl_coef=coef)


def _named_rewards(batch: TrainBatch, reward_keys: Sequence[str]) -> dict[str, Floats]:
    if not reward_keys or batch.named_rewards_B is None:
        return {}
    return dict(zip(reward_keys, batch.named_rewards_B.T, strict=True))


def response_mask(batch: TrainBatch) -> Flags:
    """Return which tokens are from their sample's first sampled token to its end, [N]."""
    sampled_N: NDArray[np.int64] = ((batch.staleness_N >= 0) | (batch.loss_mask_N != 0)).astype(np.int64)
    seen_N = np.cumsum(sampled_N)
    before_B = seen_N[batch.starts_B] - sampled_N[batch.starts_B]
    return seen_N > np.repeat(before_B, batch.lengths_B)
