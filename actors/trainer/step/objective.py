"""The loss that a recipe trains with: the terms per token, their weights, and their metrics."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from actors.trainer.algorithms.corrections import (
    Correction,
    importance_weights,
    mismatch_metrics,
    off_policy_mask,
    rejections,
)
from actors.trainer.algorithms.distillation import topk_distillation_loss
from actors.trainer.algorithms.kl import kl_clamped, kl_divergence
from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences, Terms
from actors.trainer.algorithms.policy_losses import (
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    gmpo_loss,
    gpg_loss,
    gspo_loss,
    positive_nll_loss,
    ppo_loss,
    prime_rl_ipo_loss,
    prime_rl_loss,
    sapo_loss,
    sft_loss,
)
from actors.trainer.algorithms.preference import dpo_loss
from actors.trainer.algorithms.reductions import Reduction, ReductionInputs, reduction
from actors.trainer.plugins.functions import custom_loss, custom_reducer, custom_weights
from runtime.settings.derived import (
    agg_mode,
    loss_mode,
    reads_reference,
    rejection_bounds,
    teaches_advantages,
    uses_topk,
)
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.topology import Topology

PolicyLoss = Callable[[LossInputs], Terms]
Correct = Callable[[LossInputs], Correction]

DIVERGENCE: Final = ("train/kl_loss", "train/kl_clampfrac")  # metrics
DPPO_CLIP_C: Final = 20.0  # verl's bound of the ratio if eps_clip_c is unset


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the policy loss that the settings name, with its settings."""
    limit = algorithm.max_log_ratio
    clip = {"eps_clip": algorithm.eps_clip, "eps_clip_high": algorithm.eps_clip_high, "max_log_ratio": limit}
    dual = {**clip, "eps_clip_c": algorithm.eps_clip_c}
    taus = {"adv_tau": algorithm.adv_tau, "kl_tau": algorithm.kl_tau, "max_log_ratio": limit}
    match loss_mode(algorithm):
        case "ppo":
            return partial(ppo_loss, **dual)
        case "gspo":
            return partial(gspo_loss, **dual)
        case "decoupled_ppo":
            return partial(decoupled_ppo_loss, **dual, behav_imp_weight_cap=algorithm.behav_imp_weight_cap)
        case "cispo":
            return partial(cispo_loss, **clip)
        case "dppo_tv":
            return partial(dppo_loss, divergence="tv", **clip, eps_clip_c=algorithm.eps_clip_c or DPPO_CLIP_C)
        case "dppo_kl":
            return partial(dppo_loss, divergence="kl", **clip, eps_clip_c=algorithm.eps_clip_c or DPPO_CLIP_C)
        case "prime_rl":
            low, high = algorithm.dppo_mask_low, algorithm.dppo_mask_high
            return partial(prime_rl_loss, dppo_mask_low=low, dppo_mask_high=high, **taus)
        case "prime_rl_ipo":
            threshold = algorithm.ipo_threshold
            return partial(prime_rl_ipo_loss, ipo_threshold=threshold, **taus)
        case "sapo":
            return partial(sapo_loss, tau_pos=algorithm.tau_pos, tau_neg=algorithm.tau_neg, max_log_ratio=limit)
        case "gmpo":
            return partial(gmpo_loss, **clip)
        case "gpg":
            return gpg_loss
        case "custom":
            return custom_loss(algorithm.custom_loss or "")


def weigh(algorithm: AlgorithmConfig) -> Correct:
    """Return the importance weights of old policy over engine that the settings describe."""
    if algorithm.custom_tis is not None:
        return custom_weights(algorithm.custom_tis, algorithm=algorithm)
    return partial(
        importance_weights,
        level=algorithm.tis_level,
        mode=algorithm.tis_mode,
        low=algorithm.tis_clip_low,
        high=algorithm.tis_clip,
        max_log_ratio=algorithm.max_log_ratio,
        current=algorithm.bypass_mode,
    )


def reducer(topology: Topology) -> Callable[[ReductionInputs], Reduction]:
    """Return the reduction of an optimizer step's token losses that the settings name."""
    algorithm = topology.algorithm
    if algorithm.custom_pg_loss_reducer is not None:
        return custom_reducer(algorithm.custom_pg_loss_reducer)
    mode, scale = agg_mode(algorithm), algorithm.loss_scale_factor or topology.rollout.max_response_len
    assert mode != "custom"

    def reduce(inputs: ReductionInputs) -> Reduction:
        counts = algorithm.count_masked_rollouts
        return reduction(inputs.mask_sums, inputs.rollouts, mode=mode, scale=scale, count_masked=counts)

    return reduce


def corrections(algorithm: AlgorithmConfig) -> list[Correct]:
    """Return the corrections that the settings turn on."""
    found: list[Correct] = []
    if algorithm.use_opsm:
        found.append(partial(off_policy_mask, delta=algorithm.opsm_delta))
    if algorithm.use_tis:
        found.append(weigh(algorithm))
    if algorithm.use_rs:
        found.append(_reject(algorithm))
    return found


def _reject(algorithm: AlgorithmConfig) -> Correct:
    """Return the rejection that the settings describe."""
    low, high = rejection_bounds(algorithm)
    return partial(
        rejections,
        level=algorithm.rs_level,
        metric=algorithm.rs_metric,
        low=low,
        high=high,
        veto_threshold=algorithm.rs_veto_threshold,
        max_log_ratio=algorithm.max_log_ratio,
        current=algorithm.bypass_mode,
    )


class Objective:
    """Adds the terms of the loss. A pure function of its inputs, chosen once."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Choose the terms."""
        self._algorithm = algorithm
        self._policy_loss = policy_loss(algorithm)
        self._corrections = corrections(algorithm)
        self.names: tuple[str, ...] = tuple(self(_no_tokens(), entropy_coef=0.0).metrics)

    def __call__(
        self,
        inputs: LossInputs,
        *,
        entropy_coef: float,
        weight_scale: float = 1.0,
        positive_scale: float | torch.Tensor = 1.0,
    ) -> Terms:
        """Compute the loss of each token, and the metrics: the loss first, all without gradients.

        Args:
            inputs: Columns of one micro-batch.
            entropy_coef: Weight of the entropy bonus. 0 computes no gradient of the entropy.
            weight_scale: The policy loss is divided by it: the mean importance weight of the batch.
            positive_scale: Factor of the likelihood of good samples. With it, [M], the reduction of all terms takes
                the mean of this term over the tokens of good samples alone.
        """
        algorithm = self._algorithm
        if algorithm.loss_type == "sft_loss":
            loss = sft_loss(inputs.log_probs)
            return _reported(loss, Terms(loss, {"train/sft_loss": loss, "train/entropy_loss": inputs.entropy}))
        if algorithm.loss_type == "dpo_loss":
            kind, beta, smoothing = algorithm.preference_loss, algorithm.dpo_beta, algorithm.label_smoothing
            loss, metrics = dpo_loss(inputs, beta=beta, label_smoothing=smoothing, kind=kind)
            return _reported(loss, Terms(loss, {"train/preference_loss": loss, **metrics}))
        policy = self._corrected(self._own(inputs), weight_scale)
        total = policy.loss - entropy_coef * inputs.entropy if entropy_coef else policy.loss
        metrics = {"train/pg_loss": policy.loss, "train/entropy_loss": inputs.entropy, **policy.metrics}
        if algorithm.kl_loss_coef:
            assert inputs.ref_log_probs is not None
            divergence, limited = self._divergence(inputs, inputs.ref_log_probs)
            total = total + algorithm.kl_loss_coef * divergence
            metrics |= dict(zip(DIVERGENCE, (divergence, limited), strict=True))
        elif algorithm.kl_metric_interval:
            none, ref = torch.zeros_like(inputs.log_probs), inputs.ref_log_probs
            with torch.no_grad():
                measured = (none, none) if ref is None else self._divergence(inputs, ref)
            metrics |= dict(zip(DIVERGENCE, measured, strict=True))
        if algorithm.positive_example_nll_weight:
            likelihood = positive_nll_loss(inputs) * positive_scale
            total = total + algorithm.positive_example_nll_weight * likelihood
            metrics["train/positive_nll_loss"] = likelihood
        if algorithm.get_mismatch_metrics:
            metrics |= mismatch_metrics(inputs)
        if teaches_advantages(algorithm):
            metrics["train/opd_reverse_kl"] = inputs.old_log_probs - inputs.needed("teacher_log_probs")
        if uses_topk(algorithm):
            distilled, more = self._distillation(inputs)
            total = total + algorithm.distillation_loss_coef * distilled
            metrics |= more
        return _reported(total, Terms(policy.loss, metrics))

    def _own(self, inputs: LossInputs) -> LossInputs:
        """Leave out reference log-probs that are for a metric of some steps alone."""
        return inputs if reads_reference(self._algorithm) else replace(inputs, ref_log_probs=None)

    def _divergence(self, inputs: LossInputs, ref_log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence of each token, and 1 where it is limited."""
        kind, limit = self._algorithm.kl_loss_type, self._algorithm.max_log_ratio
        old = inputs.old_log_probs if self._algorithm.use_unbiased_kl else None
        found = kl_divergence(inputs.log_probs, ref_log_probs, kind, old_log_probs=old, max_log_ratio=limit)
        return found, kl_clamped(inputs.log_probs, ref_log_probs, kind, max_log_ratio=limit)

    def _distillation(self, inputs: LossInputs) -> Terms:
        """Return the divergence over the teacher's likeliest tokens."""
        algorithm = self._algorithm
        return topk_distillation_loss(
            inputs.needed("topk_log_probs"),
            inputs.needed("teacher_topk_log_probs"),
            inputs.entropy,
            kl_type=algorithm.distillation_kl_type,
            mixed_kl_weight=algorithm.mixed_kl_weight,
            zero_outside_topk=algorithm.zero_outside_topk,
        )

    def _corrected(self, inputs: LossInputs, weight_scale: float) -> Terms:
        """Multiply the policy loss by its corrections."""
        loss, metrics = self._policy_loss(inputs)
        found = dict(metrics)
        for correction in self._corrections:
            factors, more = correction(inputs)
            loss = loss * factors
            found |= more
        if self._algorithm.tis_batch_normalize:
            loss = loss / weight_scale
            found["train/mis_batch_norm_factor"] = torch.full_like(loss, weight_scale)
        return Terms(loss, found)


def _reported(total: torch.Tensor, terms: Terms) -> Terms:
    """Put the whole loss first, and detach all metrics."""
    metrics = {"train/loss": total, **terms.metrics}
    return Terms(total, {name: values.detach() for name, values in metrics.items()})


def _no_tokens() -> LossInputs:
    """Inputs without tokens: what a loss makes of them has the names of its metrics."""
    none = torch.empty(0)
    sequences = Sequences(torch.empty(0, dtype=torch.int64), count=1)
    return LossInputs(
        log_probs=none,
        old_log_probs=none,
        rollout_log_probs=none,
        ref_log_probs=none,
        rewards=none,
        trainer_log_probs=none,
        teacher_log_probs=none,
        topk_log_probs=none[:, None],
        teacher_topk_log_probs=none[:, None],
        advantages=none,
        entropy=none,
        sequences=sequences,
        rollouts=sequences,
    )
