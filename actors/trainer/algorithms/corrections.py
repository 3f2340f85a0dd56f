"""Corrections of a policy loss for tokens that another policy sampled: the engine, or an older one.

M is the number of trained tokens of one micro-batch. A correction multiplies the policy loss of a token. Denominators,
entropy and KL divergence of rejected tokens stay. No correction has a gradient.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from actors.trainer.algorithms.loss_inputs import LossInputs, bounded

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]


class Correction(NamedTuple):
    """Factor of each token's policy loss, [M], and metrics per token, [M] each, by name."""

    factors: Tensor
    metrics: dict[str, Tensor]


def importance_weights(
    inputs: LossInputs, *, level: Level, mode: Mode, low: float, high: float, max_log_ratio: float = 20.0
) -> Correction:
    """Importance weights of old policy over engine, limited: truncated IS, IcePop, masked IS.

    w = exp(old_log_probs - rollout_log_probs) of the token ("token"), or with the log-ratios of its sequence summed
    ("sequence") or averaged ("geometric"). Then min(w, high) ("truncate"), w clipped to [low, high] ("clip"), or w
    inside of [low, high] and 0 outside ("mask").

    Args:
        inputs: Uses log_probs for a metric, old_log_probs, rollout_log_probs and sequences.
        level: "token", "sequence" or "geometric".
        mode: "truncate", "clip" or "mask".
        low: Lower bound.
        high: Upper bound.
        max_log_ratio: Limit of log-ratios, nats, before the bounds.

    Returns:
        Metrics: tis, the weight before the bounds; tis_clipfrac, 1 where a bound changes it; tis_abs, |tis - 1|; ois,
        policy over old policy.

    Source:
        Truncated IS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025, and
        slime. Token-level masks: IcePop, arXiv 2510.18855. Levels and modes: slime at 624b824a,
        examples/train_infer_mismatch_helper.
    """
    ratio = torch.exp(bounded(_log_ratios(inputs, level), max_log_ratio))
    if mode == "truncate":
        weights = ratio.clamp(max=high)
    elif mode == "clip":
        weights = ratio.clamp(low, high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    changed = (weights != ratio).to(ratio.dtype)
    since = torch.exp(bounded(inputs.log_probs.detach() - inputs.old_log_probs, max_log_ratio))
    metrics = {"train/tis": ratio, "train/tis_clipfrac": changed, "train/tis_abs": (ratio - 1.0).abs()}
    return Correction(weights, {**metrics, "train/ois": since})


def rejections(
    inputs: LossInputs,
    *,
    level: Level,
    low: float,
    high: float,
    veto_threshold: float | None = None,
    max_log_ratio: float = 20.0,
) -> Correction:
    """Reject tokens whose ratio of old policy and engine is out of bounds, and sequences with a catastrophic token.

    Args:
        inputs: Uses old_log_probs, rollout_log_probs and sequences.
        level: Of the ratio, as for `importance_weights`.
        low: Lower bound of the ratio.
        high: Upper bound of the ratio.
        veto_threshold: A token's ratio below this rejects its whole sequence. None: no veto.
        max_log_ratio: Limit of log-ratios, nats, before the bounds. The veto has no limit.

    Returns:
        1 for kept tokens, 0 for rejected ones. Metrics: mis_rs_mask_fraction_low and _high, 1 below and above the
        bounds; with a veto mis_rs_catastrophic_token_fraction and mis_rs_catastrophic_seq_fraction.

    Source:
        slime at 624b824a, examples/train_infer_mismatch_helper.
    """
    ratio = torch.exp(bounded(_log_ratios(inputs, level), max_log_ratio))
    below, above = (ratio < low).to(ratio.dtype), (ratio > high).to(ratio.dtype)
    kept = 1.0 - below - above
    metrics = {"train/mis_rs_mask_fraction_low": below, "train/mis_rs_mask_fraction_high": above}
    if veto_threshold is not None:
        catastrophic = (_log_ratios(inputs, "token") < math.log(veto_threshold)).to(ratio.dtype)
        vetoed = (inputs.sequences.sums(catastrophic) > 0).to(ratio.dtype)
        kept = kept * (1.0 - vetoed)
        metrics["train/mis_rs_catastrophic_token_fraction"] = catastrophic
        metrics["train/mis_rs_catastrophic_seq_fraction"] = vetoed
    return Correction(kept, metrics)


def off_policy_mask(inputs: LossInputs, *, delta: float) -> Correction:
    """OPSM: reject tokens with a negative advantage in sequences that the policy has moved away from.

    A token is rejected if A < 0 and the mean over its sequence of old_log_probs - log_probs is above delta.

    Args:
        inputs: Uses log_probs, old_log_probs, advantages and sequences.
        delta: Threshold, nats.

    Returns:
        1 for kept tokens, 0 for rejected ones. Metric: opsm_clipfrac, 1 where the token is rejected. slime's metric is
        a sum over sequences, and may exceed 1.

    Source:
        DeepSeek-V3.2, arXiv 2512.02556, as in slime.
    """
    distance = inputs.sequences.means(inputs.old_log_probs - inputs.log_probs.detach())
    rejected = ((inputs.advantages < 0) & (distance > delta)).to(distance.dtype)
    return Correction(1.0 - rejected, {"train/opsm_clipfrac": rejected})


def mean_weight(inputs: LossInputs, weights: Tensor, *, level: Level) -> float:
    """Average importance weights: over tokens, or over the sequences that have tokens if the level is not "token".

    Args:
        inputs: All trained tokens of a batch. Uses sequences.
        weights: [M], of `importance_weights`.
        level: Level of the weights.

    Returns:
        The mean; 1 if it is 1e-8 or less, so that nothing is divided by it.

    Source:
        slime at 624b824a, examples/train_infer_mismatch_helper.
    """
    shares = torch.ones_like(weights) if level == "token" else 1.0 / inputs.sequences.lengths
    mean = float((weights * shares).sum() / shares.sum()) if len(weights) else 0.0
    return mean if mean > 1e-8 else 1.0


def _log_ratios(inputs: LossInputs, level: Level) -> Tensor:
    """Return log-ratios of old policy over engine, [M]."""
    log_ratios = inputs.old_log_probs - inputs.rollout_log_probs
    if level == "token":
        return log_ratios
    return inputs.sequences.sums(log_ratios) if level == "sequence" else inputs.sequences.means(log_ratios)
