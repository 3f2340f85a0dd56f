"""Corrections of a policy loss for tokens that another policy sampled: the engine, or an older one.

M is the number of trained tokens of one micro-batch. A correction multiplies the policy loss of a token. Denominators,
entropy and KL divergence of rejected tokens stay. No correction has a gradient. Names of metrics begin with `train/`.
Without tokens all tensors are empty.

Example:
    ```python
    import math

    import torch

    from actors.trainer.algorithms.corrections import importance_weights, mean_weight, rejections
    from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences

    old = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
    ratios = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)  # of old policy over engine
    zeros = torch.zeros(3, dtype=torch.float64)
    inputs = LossInputs(
        log_probs=old,
        old_log_probs=old,
        rollout_log_probs=old - ratios.log(),
        advantages=zeros,
        entropy=zeros,
        sequences=Sequences(torch.tensor([0, 0, 1]), count=2),
    )
    factors, metrics = importance_weights(inputs, mode="mask", low=0.5, high=2.0)
    assert torch.allclose(factors, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    assert metrics["train/tis_clipfrac"].tolist() == [1.0, 0.0, 1.0]
    assert rejections(inputs, level="sequence", high=5.0).factors.tolist() == [1.0, 1.0, 1.0]  # 4 and 0.25
    assert math.isclose(mean_weight(inputs, ratios, level="token"), 1.75)
    ```
"""

import math
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from actors.trainer.algorithms.arguments import check_choice, check_shape
from actors.trainer.algorithms.loss_inputs import MAX_LOG_RATIO, LossInputs, bounded

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]
Metric = Literal["ratio", "binary_kl"]

PROBABILITY_EPS: Final = 1e-6  # of the binary divergence, whose logarithms are then finite in float32
METRIC_LOG_RATIO: Final = 20.0  # nats; limit of exponents in `mismatch_metrics`


class Correction(NamedTuple):
    """Factor of each token's policy loss, [M], and metrics per token, [M] each, by name."""

    factors: Tensor
    metrics: dict[str, Tensor]


def importance_weights(
    inputs: LossInputs,
    *,
    level: Level = "token",
    mode: Mode = "clip",
    low: float = 0.0,
    high: float = 2.0,
    max_log_ratio: float = MAX_LOG_RATIO,
    current: bool = False,
) -> Correction:
    """Importance weights of old policy over engine, limited: truncated IS, IcePop, masked IS.

    w = exp(old_log_probs - rollout_log_probs) of the token ("token"), or with the log-ratios of its sequence summed
    ("sequence") or averaged ("geometric"). Then min(w, high) ("truncate"), w clipped to [low, high] ("clip"), or w
    inside of [low, high] and 0 outside ("mask"). With `current`, log_probs take the place of old_log_probs: weights of
    the policy being trained, without a gradient.

    Args:
        inputs: Uses log_probs, old_log_probs, rollout_log_probs and sequences.
        level: "token", "sequence" or "geometric".
        mode: "truncate", "clip" or "mask".
        low: Lower bound.
        high: Upper bound.
        max_log_ratio: Limit of log-ratios, nats, before the bounds.
        current: Compare the policy being trained with the engine, not the old policy.

    Returns:
        Factors, [M]: the weights after the bounds. Metrics, [M]: tis, the weight before the bounds; tis_clipfrac, 1
        where a bound changes it; tis_clampfrac, 1 where the log-ratio is beyond its limit; tis_abs, |tis - 1|; ois,
        policy over old policy, unless `current`; mis_tis_weight_after_bound, the factor (slime keeps rejected weights
        in it); and 1 where the weight is out of bounds, by side and mode: mis_tis_truncate_fraction, or
        mis_tis_clip_fraction_low and _high, or mis_tis_mask_fraction_low and _high.

    Edges:
        A weight equal to a bound is inside. With "truncate" the lower bound has no effect. If all weights are rejected,
        all factors are 0. At +-90 nats the weight before the bounds is exp(+-max_log_ratio).

    Source:
        Truncated IS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025, and
        slime. Token-level masks: IcePop, arXiv 2510.18855. Levels and modes: slime at 624b824a,
        examples/train_infer_mismatch_helper, whose low is 1 / high by default. Its mis_tis_weight_before_bound is tis.
        Current policy: verl 0.9.1, bypass_mode.
    """
    check_choice("mode", mode, Mode)
    log_ratios = _at_level(inputs, _log_ratios(inputs, current=current), level)
    ratio = torch.exp(bounded(log_ratios, max_log_ratio))
    if mode == "truncate":
        weights = ratio.clamp(max=high)
    elif mode == "clip":
        weights = ratio.clamp(low, high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    changed = (weights != ratio).to(ratio.dtype)
    clamped = (log_ratios.abs() > max_log_ratio).to(ratio.dtype)
    metrics = {"train/tis": ratio, "train/tis_clipfrac": changed, "train/tis_clampfrac": clamped}
    metrics["train/mis_tis_weight_after_bound"] = weights
    metrics |= _sides(mode, (ratio < low).to(ratio.dtype), (ratio > high).to(ratio.dtype))
    metrics["train/tis_abs"] = (ratio - 1.0).abs()
    if not current:
        metrics["train/ois"] = torch.exp(bounded(inputs.log_probs.detach() - inputs.old_log_probs, max_log_ratio))
    return Correction(weights, metrics)


def rejections(
    inputs: LossInputs,
    *,
    level: Level = "token",
    low: float | None = None,
    high: float = 2.0,
    metric: Metric = "ratio",
    veto_threshold: float | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
    current: bool = False,
) -> Correction:
    """Reject tokens whose old policy is too far from the engine, and sequences with a catastrophic token.

    The distance is the ratio of `importance_weights` ("ratio"), or KPop's divergence ("binary_kl"). With probabilities
    p of the policy and q of the engine, that is the larger one of D(p, q) and D(q, p), where
    D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). A sequence has the sum or the mean over its tokens.

    A token is kept if low <= distance <= high, and if no token of its sequence has a ratio below veto_threshold.

    Args:
        inputs: Uses log_probs or old_log_probs, rollout_log_probs and sequences.
        level: Of the distance, as for `importance_weights`.
        low: Lower bound of the distance. None: 1 / high for a ratio, 0 for a divergence, which is never below 0.
        high: Upper bound of the distance: a ratio, or nats.
        metric: "ratio" or "binary_kl".
        veto_threshold: A token's ratio below this rejects its whole sequence. None: no veto.
        max_log_ratio: Limit of log-ratios, nats, before the bounds. The veto has no limit. Probabilities of the
            divergence are limited to [1e-6, 1 - 1e-6].
        current: As for `importance_weights`.

    Returns:
        Factors, [M]: 1 for kept tokens, 0 for rejected ones. Metrics, [M]: mis_rs_mask_fraction_low and _high, 1 below
        and above the bounds; with a veto mis_rs_catastrophic_token_fraction and mis_rs_catastrophic_seq_fraction.

    Edges:
        A distance equal to a bound is kept. All tokens may be rejected. A token without a neighbour has the same
        distance at all levels. The veto compares log-ratios that are not limited.

    Source:
        slime at 624b824a, examples/train_infer_mismatch_helper. KPop: Guo et al., ringtech.notion.site/kpop, 2026, and
        AReaL at cbff54d6, areal.utils.functional, which limits probabilities at 1e-8. verl 0.9.1 compares the inverse
        ratio with the bounds of token_k1, seq_sum_k1 and seq_mean_k1: the same if low = 1 / high.
    """
    check_choice("metric", metric, Metric)
    log_ratios = _log_ratios(inputs, current=current)
    if metric == "ratio":
        distance = torch.exp(bounded(_at_level(inputs, log_ratios, level), max_log_ratio))
    else:
        distance = _at_level(inputs, _binary_divergence(inputs, current=current), level)
    if low is None:
        low = 1.0 / high if metric == "ratio" else 0.0
    below, above = (distance < low).to(distance.dtype), (distance > high).to(distance.dtype)
    kept = 1.0 - below - above
    metrics = {"train/mis_rs_mask_fraction_low": below, "train/mis_rs_mask_fraction_high": above}
    if veto_threshold is not None:
        catastrophic = (log_ratios < math.log(veto_threshold)).to(distance.dtype)
        vetoed = (inputs.sequences.sums(catastrophic) > 0).to(distance.dtype)
        kept = kept * (1.0 - vetoed)
        metrics["train/mis_rs_catastrophic_token_fraction"] = catastrophic
        metrics["train/mis_rs_catastrophic_seq_fraction"] = vetoed
    return Correction(kept, metrics)


def off_policy_mask(inputs: LossInputs, *, delta: float = 1e-4) -> Correction:
    """OPSM: reject tokens with a negative advantage in sequences that the policy has moved away from.

    A token is rejected if A < 0 and the mean over its sequence of old_log_probs - log_probs is above delta.

    Args:
        inputs: Uses log_probs, old_log_probs, advantages and sequences.
        delta: Threshold, nats.

    Returns:
        Factors, [M]: 1 for kept tokens, 0 for rejected ones. Metrics, [M]: opsm_clipfrac, 1 where the token is
        rejected. slime's metric is a sum over sequences, and may exceed 1.

    Edges:
        A distance equal to delta is kept. An advantage of 0 is kept. Nothing is clamped, since nothing is
        exponentiated.

    Source:
        DeepSeek-V3.2, arXiv 2512.02556, as in slime.
    """
    distance = inputs.sequences.means(inputs.old_log_probs - inputs.log_probs.detach())
    rejected = ((inputs.advantages < 0) & (distance > delta)).to(distance.dtype)
    return Correction(1.0 - rejected, {"train/opsm_clipfrac": rejected})


def mean_weight(inputs: LossInputs, weights: Tensor, *, level: Level = "token") -> float:
    """Average importance weights: over tokens, or over the sequences that have tokens if the level is not "token".

    sum(share weight) / sum(share), with shares of 1 per token, or 1 / (trained tokens of its sequence).

    Args:
        inputs: All trained tokens of a batch. Uses sequences.
        weights: [M], of `importance_weights`.
        level: Level of the weights.

    Returns:
        The mean; 1 if it is 1e-8 or less, so that nothing is divided by it.

    Edges:
        No tokens: 1. With the mode "mask" slime takes the mean of the weights before the bounds, the metric tis, and
        verl that of the factors.

    Source:
        slime at 624b824a, examples/train_infer_mismatch_helper.
    """
    check_choice("level", level, Level)
    check_shape("weights", weights, inputs.log_probs)
    shares = torch.ones_like(weights) if level == "token" else 1.0 / inputs.sequences.lengths.to(weights.dtype)
    mean = float((weights * shares).sum() / shares.sum()) if len(weights) else 0.0
    return mean if mean > 1e-8 else 1.0


def mismatch_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """Measure how far the engine is from the trainer before the first optimizer step of a batch.

    With d = trainer_log_probs - rollout_log_probs per token, and means over the token's sequence.

    Args:
        inputs: Uses trainer_log_probs, rollout_log_probs and sequences.

    Returns:
        [M] each, without gradients. KL(engine || trainer) by token: mis_kl, -d; mis_k3_kl, exp(d) - 1 - d. Perplexity
        by sequence: mis_training_ppl and mis_rollout_ppl, exp(-mean of log-probs), and their logarithms _log_ppl;
        mis_log_ppl_diff, -mean(d), mis_log_ppl_abs_diff, its absolute value, and mis_ppl_ratio, its exponential.
        Chi-squared divergence: mis_chi2_token, exp(d)^2 - 1, and mis_chi2_seq, exp(sum(d))^2 - 1. Every exponent is
        limited to +-20.

    Edges:
        Equal log-probs: ratios and perplexity ratio 1, all others but the perplexities 0. No tokens: empty tensors.

    Source:
        slime at 624b824a, examples/train_infer_mismatch_helper, with its names; verl 0.9.1, rollout_corr_helper, has
        the same as rollout_corr/. Both limit the exponents of the chi-squared divergences alone.
    """
    trainer, engine, means = inputs.needed("trainer_log_probs"), inputs.rollout_log_probs, inputs.sequences.means
    log_ratios = trainer - engine
    training, rollout = -means(trainer), -means(engine)
    difference = training - rollout
    return {
        "train/mis_kl": -log_ratios,
        "train/mis_k3_kl": _exp(log_ratios) - 1.0 - log_ratios,
        "train/mis_training_ppl": _exp(training),
        "train/mis_training_log_ppl": training,
        "train/mis_rollout_ppl": _exp(rollout),
        "train/mis_rollout_log_ppl": rollout,
        "train/mis_log_ppl_diff": difference,
        "train/mis_log_ppl_abs_diff": difference.abs(),
        "train/mis_ppl_ratio": _exp(difference),
        "train/mis_chi2_token": _exp(log_ratios).square() - 1.0,
        "train/mis_chi2_seq": _exp(inputs.sequences.sums(log_ratios)).square() - 1.0,
    }


def _exp(exponents: Tensor) -> Tensor:
    return torch.exp(bounded(exponents, METRIC_LOG_RATIO))


def _sides(mode: Mode, below: Tensor, above: Tensor) -> dict[str, Tensor]:
    """Return weights out of bounds by side, by the names of the mode."""
    if mode == "truncate":
        return {"train/mis_tis_truncate_fraction": above}
    if mode == "clip":
        return {"train/mis_tis_clip_fraction_low": below, "train/mis_tis_clip_fraction_high": above}
    return {"train/mis_tis_mask_fraction_low": below, "train/mis_tis_mask_fraction_high": above}


def _policy(inputs: LossInputs, *, current: bool) -> Tensor:
    """Return log-probs of the policy that is compared with the engine, [M], without a gradient."""
    return inputs.log_probs.detach() if current else inputs.old_log_probs


def _log_ratios(inputs: LossInputs, *, current: bool = False) -> Tensor:
    """Return log-ratios of policy over engine, [M]."""
    return _policy(inputs, current=current) - inputs.rollout_log_probs


def _binary_divergence(inputs: LossInputs, *, current: bool) -> Tensor:
    """Return KPop's divergence of policy and engine, [M], nats."""
    lowest, highest = PROBABILITY_EPS, 1.0 - PROBABILITY_EPS
    p = torch.exp(_policy(inputs, current=current)).clamp(lowest, highest)
    q = torch.exp(inputs.rollout_log_probs).clamp(lowest, highest)
    chosen, rest = torch.log(p / q), torch.log((1.0 - p) / (1.0 - q))
    return torch.maximum(p * chosen + (1.0 - p) * rest, -q * chosen - (1.0 - q) * rest).clamp(min=0.0)


def _at_level(inputs: LossInputs, values: Tensor, level: Level) -> Tensor:
    """Return the values of tokens, or the sum or mean over each token's sequence, [M]."""
    check_choice("level", level, Level)
    if level == "token":
        return values
    return inputs.sequences.sums(values) if level == "sequence" else inputs.sequences.means(values)
