"""The loss that a recipe trains with: the terms per token, their weights, and their metrics."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
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
from actors.trainer.algorithms.policy_losses import LOSSES, positive_nll_loss, sft_loss
from actors.trainer.algorithms.preference import dpo_loss
from actors.trainer.algorithms.reductions import Reduction, ReductionInputs, reduction
from actors.trainer.plugins.functions import custom_loss, custom_reducer, custom_weights
from runtime.settings.derived import (
    normalizes_weights,
    reads_reference,
    rejection_bounds,
    teaches_advantages,
    topk_divergence,
)
from runtime.settings.tables.algorithm import (
    AlgorithmConfig,
    BinaryKlRs,
    ClipTis,
    CustomReduction,
    CustomTis,
    Rs,
    Tis,
    TopkKl,
)
from runtime.settings.tables.losses import CustomLoss, DpoLoss, IpoLoss, SftLoss
from runtime.settings.topology import Topology

PolicyLoss = Callable[[LossInputs], Terms]
Correct = Callable[[LossInputs], Correction]

DIVERGENCE: Final = ("train/kl_loss", "train/kl_clampfrac")  # metrics


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the policy loss that the settings name, with its settings."""
    loss = algorithm.loss
    if isinstance(loss, CustomLoss):
        return custom_loss(loss.function)
    limit = {"max_log_ratio": algorithm.max_log_ratio} if loss.has_ratio else {}
    return partial(LOSSES[loss.type], **msgspec.structs.asdict(loss), **limit)


def weigh(algorithm: AlgorithmConfig, tis: Tis) -> Correct:
    """Return the importance weights of old policy over engine that the settings describe."""
    if isinstance(tis, CustomTis):
        return custom_weights(tis.function, algorithm=algorithm)
    return partial(
        importance_weights,
        level=tis.level,
        mode=tis.type,
        low=tis.lower_bound if isinstance(tis, ClipTis) else 0.0,
        high=tis.upper_bound,
        max_log_ratio=algorithm.max_log_ratio,
        current=algorithm.bypass_mode,
    )


def reducer(topology: Topology) -> Callable[[ReductionInputs], Reduction]:
    """Return the reduction of an optimizer step's token losses that the settings name."""
    named = topology.algorithm.reduction
    if isinstance(named, CustomReduction):
        return custom_reducer(named.function)
    scale = getattr(named, "scale_factor", None) or topology.rollout.max_response_len
    counts = getattr(named, "count_masked_rollouts", True)

    def reduce(inputs: ReductionInputs) -> Reduction:
        return reduction(inputs.mask_sums, inputs.rollouts, mode=named.type, scale=scale, count_masked=counts)

    return reduce


def corrections(algorithm: AlgorithmConfig) -> list[Correct]:
    """Return the corrections that the settings turn on."""
    found: list[Correct] = []
    if algorithm.opsm_delta is not None:
        found.append(partial(off_policy_mask, delta=algorithm.opsm_delta))
    if algorithm.tis is not None:
        found.append(weigh(algorithm, algorithm.tis))
    if algorithm.rs is not None:
        found.append(_reject(algorithm, algorithm.rs))
    return found


def _reject(algorithm: AlgorithmConfig, rs: Rs) -> Correct:
    """Return the rejection that the settings describe."""
    low, high = rejection_bounds(algorithm)
    return partial(
        rejections,
        level=rs.level,
        metric="binary_kl" if isinstance(rs, BinaryKlRs) else "ratio",
        low=low,
        high=high,
        veto_threshold=rs.veto_threshold,
        max_log_ratio=algorithm.max_log_ratio,
        current=algorithm.bypass_mode,
    )


class Objective:
    """Adds the terms of the loss. A pure function of its inputs, chosen once."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Choose the terms."""
        self._algorithm = algorithm
        self._policy_loss = policy_loss(algorithm) if algorithm.loss.learns_from == "samples" else None
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
        if isinstance(algorithm.loss, SftLoss):
            loss = sft_loss(inputs.log_probs)
            return _reported(loss, Terms(loss, {"train/sft_loss": loss, "train/entropy_loss": inputs.entropy}))
        if isinstance(algorithm.loss, DpoLoss | IpoLoss):
            kind = "ipo" if isinstance(algorithm.loss, IpoLoss) else "sigmoid"
            loss, metrics = dpo_loss(inputs, kind=kind, **msgspec.structs.asdict(algorithm.loss))
            return _reported(loss, Terms(loss, {"train/preference_loss": loss, **metrics}))
        policy = self._corrected(self._own(inputs), weight_scale)
        total = policy.loss - entropy_coef * inputs.entropy if entropy_coef else policy.loss
        metrics = {"train/pg_loss": policy.loss, "train/entropy_loss": inputs.entropy, **policy.metrics}
        if algorithm.kl.loss_coef:
            assert inputs.ref_log_probs is not None
            divergence, limited = self._divergence(inputs, inputs.ref_log_probs)
            total = total + algorithm.kl.loss_coef * divergence
            metrics |= dict(zip(DIVERGENCE, (divergence, limited), strict=True))
        elif algorithm.kl.metric_interval:
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
        if (topk := topk_divergence(algorithm)) is not None:
            distilled, more = self._distillation(inputs, topk)
            total = total + topk.coef * distilled
            metrics |= more
        return _reported(total, Terms(policy.loss, metrics))

    def _own(self, inputs: LossInputs) -> LossInputs:
        """Leave out reference log-probs that are for a metric of some steps alone."""
        return inputs if reads_reference(self._algorithm) else replace(inputs, ref_log_probs=None)

    def _divergence(self, inputs: LossInputs, ref_log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence of each token, and 1 where it is limited."""
        kind, limit = self._algorithm.kl.type, self._algorithm.max_log_ratio
        old = inputs.old_log_probs if self._algorithm.kl.is_unbiased else None
        found = kl_divergence(inputs.log_probs, ref_log_probs, kind, old_log_probs=old, max_log_ratio=limit)
        return found, kl_clamped(inputs.log_probs, ref_log_probs, kind, max_log_ratio=limit)

    def _distillation(self, inputs: LossInputs, topk: TopkKl) -> Terms:
        """Return the divergence over the teacher's likeliest tokens."""
        return topk_distillation_loss(
            inputs.needed("topk_log_probs"),
            inputs.needed("teacher_topk_log_probs"),
            inputs.entropy,
            kl_type=topk.type,
            mixed_kl_weight=getattr(topk, "mixed_kl_weight", 0.5),
            zero_outside_topk=getattr(topk, "zero_outside_topk", False),
        )

    def _corrected(self, inputs: LossInputs, weight_scale: float) -> Terms:
        """Multiply the policy loss by its corrections."""
        assert self._policy_loss is not None
        loss, metrics = self._policy_loss(inputs)
        found = dict(metrics)
        for correction in self._corrections:
            factors, more = correction(inputs)
            loss = loss * factors
            found |= more
        if normalizes_weights(self._algorithm):
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
