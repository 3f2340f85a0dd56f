"""Policy losses and the loss of demonstrations, per token. M is the number of trained tokens of one micro-batch.

A policy loss takes `LossInputs` and returns `Terms`: the loss of each token, which a reduction adds, and metrics of
each token. Names of metrics begin with `train/`. Without tokens a loss returns empty tensors. A sequence without
trained tokens changes no other sequence. With an advantage of 0 the policy term has no gradient. In formulas A is the
advantage, p the probability of a token by the policy, p_old by the old policy and q by the engine; sg has no gradient.

Example:
    ```python
    import math

    import torch

    from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
    from actors.trainer.algorithms.policy_losses import gspo_loss, ppo_loss

    old = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
    inputs = LossInputs(
        log_probs=(old + torch.tensor([0.5, 0.1, 0.0])).requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old,
        advantages=torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64),
        entropy=torch.zeros(3, dtype=torch.float64),
        sequences=Sequences(torch.tensor([0, 0, 1]), count=2),
    )
    loss, metrics = ppo_loss(inputs, eps_clip=0.2, eps_clip_high=0.28)
    assert torch.allclose(loss, -torch.tensor([2 * 1.28, 2 * math.exp(0.1), -1.0], dtype=torch.float64))
    assert metrics["train/pg_clipfrac"].tolist() == [1.0, 0.0, 0.0]
    loss.sum().backward()
    assert inputs.log_probs.grad[0] == 0  # a clipped token has no gradient
    assert gspo_loss(inputs, eps_clip=0.2).loss[0].item() == -2 * 1.2  # exp(0.3) is clipped
    ```
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from actors.trainer.algorithms.arguments import check_choice
from actors.trainer.algorithms.loss_inputs import MAX_LOG_RATIO, LossInputs, Terms, bounded

Divergence = Literal["tv", "kl"]


def sft_loss(log_probs: Tensor) -> Tensor:
    """Cross-entropy loss of demonstration tokens.

    Args:
        log_probs: [M], of the model being trained.

    Returns:
        [M], nats.

    Edges:
        Nothing is clamped. No tokens: an empty tensor.

    Source:
        Negative log-likelihood, as torch.nn.functional.cross_entropy has it per token.
    """
    return -log_probs


def ppo_loss(
    inputs: LossInputs,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """PPO clipped surrogate loss, with a separate upper clip and dual clip for negative advantages.

    Args:
        inputs: Uses log_probs, old_log_probs and advantages.
        eps_clip: Lower clip of the probability ratio: 1 - eps_clip.
        eps_clip_high: Upper clip of the probability ratio: 1 + eps_clip_high. None: eps_clip.
        eps_clip_c: Dual clip: the loss of a negative advantage is at most -eps_clip_c * advantage. None: no bound.
        max_log_ratio: Limit of log-ratios, nats.

    Returns:
        The loss, [M], and metrics, [M] each: pg_clipfrac, 1 where the clipped term is the larger one; with eps_clip_c
        pg_clipfrac_lower, 1 where it lowers the loss; ppo_kl, old minus new log-prob in nats; ratio_clampfrac, 1 where
        the log-ratio is beyond its limit.

    Edges:
        Log-ratios are limited to +-max_log_ratio before the exponential; beyond it the token has no gradient. With
        eps_clip_c the bound applies after the clip, and tokens that it bounds have no gradient. pg_clipfrac does not
        count them. ppo_kl is not limited; verl limits it to +-20.

    Source:
        PPO, arXiv 1707.06347; separate upper clip: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729. slime limits no
        log-ratio, verl those beyond +-20; verl's eps_clip_c is 3.
    """
    log_ratios = inputs.log_probs - inputs.old_log_probs
    return _clipped(log_ratios, inputs.advantages, eps_clip, eps_clip_high, eps_clip_c, max_log_ratio)


def gspo_loss(
    inputs: LossInputs,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """GSPO: the clipped loss of PPO with one ratio for each sequence, the geometric mean over its trained tokens.

    The mean of the log-ratios has its gradient.

    Args:
        inputs: Uses log_probs, old_log_probs, advantages and sequences.
        eps_clip: As for `ppo_loss`. The paper uses 3e-4.
        eps_clip_high: As for `ppo_loss`. The paper uses 4e-4.
        eps_clip_c: As for `ppo_loss`.
        max_log_ratio: Limit of the sequence's log-ratio, nats.

    Returns:
        The loss, [M], and metrics as of `ppo_loss`, the same for all tokens of a sequence with one advantage.

    Edges:
        The mean is limited to +-max_log_ratio, not the tokens' log-ratios. A sequence of one token is as in
        `ppo_loss`. The gradient of a token is 1 / (trained tokens of its sequence) of that of the mean.

    Source:
        GSPO, arXiv 2507.18071, as in slime. verl's gradient is the same if the tokens of a sequence share an advantage.
        verl limits the mean to at most 10 nats and has no dual clip.
    """
    log_ratios = inputs.sequences.means(inputs.log_probs - inputs.old_log_probs)
    return _clipped(log_ratios, inputs.advantages, eps_clip, eps_clip_high, eps_clip_c, max_log_ratio)


def decoupled_ppo_loss(
    inputs: LossInputs,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    behav_imp_weight_cap: float | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """Decoupled PPO: PPO around the old policy, weighted by old policy / engine, which sampled the tokens.

    Args:
        inputs: Uses log_probs, old_log_probs, rollout_log_probs and advantages.
        eps_clip: As for `ppo_loss`.
        eps_clip_high: As for `ppo_loss`.
        eps_clip_c: As for `ppo_loss`.
        behav_imp_weight_cap: A token with a larger weight has no loss. None: no cap.
        max_log_ratio: Limit of both log-ratios, nats.

    Returns:
        The loss, [M], and metrics of `ppo_loss`, where ratio_clampfrac counts both log-ratios; behave_imp_weight, the
        weight; behave_mask, 1 where the token is kept.

    Edges:
        A weight equal to the cap is kept. behave_imp_weight is 0 where the token is not kept. Both log-ratios are
        limited to +-max_log_ratio.

    Source:
        arXiv 2110.00641; AReaL, arXiv 2505.24298, with its names.
    """
    loss, metrics = ppo_loss(
        inputs,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
        max_log_ratio=max_log_ratio,
    )
    behind = inputs.old_log_probs - inputs.rollout_log_probs
    weights = torch.exp(bounded(behind, max_log_ratio)).detach()
    clamped = torch.maximum(metrics["train/ratio_clampfrac"], _clamped(behind, max_log_ratio))
    cap = math.inf if behav_imp_weight_cap is None else behav_imp_weight_cap
    kept = (weights <= cap).to(loss.dtype)
    weights = weights * kept
    more = {"train/behave_imp_weight": weights, "train/behave_mask": kept, "train/ratio_clampfrac": clamped}
    return Terms(loss * weights, {**metrics, **more})


def cispo_loss(
    inputs: LossInputs,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """CISPO: policy gradient weighted by the clipped ratio, which has no gradient, so that no token loses its gradient.

    Args:
        inputs: Uses log_probs, old_log_probs and advantages.
        eps_clip: Lower clip; 1 or more turns it off, as in the paper.
        eps_clip_high: Upper clip. None: eps_clip.
        max_log_ratio: Limit of log-ratios, nats.

    Returns:
        The loss, [M], and metrics, [M] each: pg_clipfrac, 1 where the ratio is clipped; ppo_kl and ratio_clampfrac as
        of `ppo_loss`.

    Edges:
        The ratio is limited before the clip. Every token keeps the gradient of its log-prob.

    Source:
        MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    log_ratios = inputs.log_probs - inputs.old_log_probs
    ratio = torch.exp(bounded(log_ratios, max_log_ratio)).detach()
    weights = ratio.clamp(1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high))
    loss = -weights * inputs.advantages * inputs.log_probs
    return Terms(loss, _ratio_metrics(log_ratios, (weights != ratio).to(loss.dtype), max_log_ratio))


def dppo_loss(
    inputs: LossInputs,
    *,
    divergence: Divergence = "tv",
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float = 20.0,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """DPPO: drop tokens whose probability has moved too far in the direction of their advantage.

    With "kl" the divergence is that of the Bernoulli distributions of the token and all others, p_old log(p_old / p) +
    (1 - p_old) log((1 - p_old) / (1 - p)), with 1e-8 added to 1 - p_old and 1 - p.

    Args:
        inputs: Uses log_probs, old_log_probs and advantages.
        divergence: "tv" or "kl".
        eps_clip: Threshold of tokens that became less likely.
        eps_clip_high: Threshold of tokens that became likelier. None: eps_clip.
        eps_clip_c: Upper bound of the ratio.
        max_log_ratio: Limit of log-ratios, nats.

    Returns:
        The loss, [M], and metrics, [M] each: pg_clipfrac, 1 where the token is dropped; pg_clipfrac_lower, 1 where it
        is kept and the ratio is above eps_clip_c; ppo_kl as of `ppo_loss`; ratio_clampfrac, 1 where the log-ratio is
        beyond its limit or the ratio above eps_clip_c.

    Edges:
        A divergence equal to its threshold is kept. An advantage of 0 counts as negative. The divergence is computed
        from log-probs that are not limited.

    Source:
        arXiv 2602.04879, as in verl, whose default of eps_clip_c is 3 with its own settings file.
    """
    check_choice("divergence", divergence, Divergence)
    log_ratios = inputs.log_probs - inputs.old_log_probs
    high = eps_clip if eps_clip_high is None else eps_clip_high
    new, old = inputs.log_probs.detach().exp(), inputs.old_log_probs.exp()
    moved = (new - old).abs()
    if divergence == "kl":
        rest = torch.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))
        moved = old * -log_ratios.detach() + (1.0 - old) * rest
    up, down = (moved > high) & (new > old), (moved > eps_clip) & (new < old)
    dropped = torch.where(inputs.advantages > 0, up, down).to(moved.dtype)
    ratio = torch.exp(bounded(log_ratios, max_log_ratio)).detach()
    loss = -inputs.advantages * ratio.clamp(max=eps_clip_c) * inputs.log_probs * (1.0 - dropped)
    metrics = _ratio_metrics(log_ratios, dropped, max_log_ratio)
    capped = (ratio > eps_clip_c).to(ratio.dtype)
    metrics["train/pg_clipfrac_lower"] = capped * (1.0 - dropped)
    return Terms(loss, {**metrics, "train/ratio_clampfrac": torch.maximum(metrics["train/ratio_clampfrac"], capped)})


def prime_rl_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """prime-rl's default loss: policy over engine, without tokens whose probability has moved too far.

    Args:
        inputs: Uses log_probs, rollout_log_probs and advantages; no old log-probs.
        dppo_mask_low: Probability, 0 to 1.
        dppo_mask_high: Probability, 0 to 1.
        adv_tau: Factor of the advantages.
        kl_tau: Weight of the squared log-ratio, which is not limited.
        max_log_ratio: Limit of the log-ratio in r, nats.

    Returns:
        The loss, [M], and metrics, [M] each: is_masked, is_masked_low, is_masked_high; mismatch_kl, r - log r - 1;
        ratio_clampfrac.

    Edges:
        A change equal to its threshold is kept. The squared log-ratio is not limited: at 90 nats it is 8,100 kl_tau.
        is_masked counts tokens with an advantage of 0 that became less likely, is_masked_low does not.
        prime-rl's masked_mismatch_kl is the mean of mismatch_kl over tokens with is_masked = 1, unmasked_mismatch_kl
        over the others.

    Source:
        prime-rl at 559b4477, prime_rl.trainer.rl.loss; arXiv 2602.04879 and 2602.02276.
    """
    moved = inputs.log_probs.detach().exp() - inputs.rollout_log_probs.exp()
    up, down = moved > dppo_mask_high, moved < -dppo_mask_low
    masked = torch.where(inputs.advantages > 0, up, down)
    loss, metrics = _over_engine(inputs, masked, adv_tau, kl_tau, max_log_ratio)
    low, high = (inputs.advantages < 0) & down, (inputs.advantages > 0) & up
    sides = {"train/is_masked_low": low.to(loss.dtype), "train/is_masked_high": high.to(loss.dtype)}
    return Terms(loss, {**metrics, **sides})


def prime_rl_ipo_loss(
    inputs: LossInputs,
    *,
    ipo_threshold: float = 0.1,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """prime-rl's loss with the mask that it calls IPO: tokens whose probability has moved too far in any direction.

    Args:
        inputs: Uses log_probs, rollout_log_probs and advantages; no old log-probs.
        ipo_threshold: Probability, 0 to 1.
        adv_tau: Factor of the advantages.
        kl_tau: Weight of the squared log-ratio, which is not limited.
        max_log_ratio: Limit of the log-ratio in r, nats.

    Returns:
        The loss, [M], and metrics, [M] each: is_masked; mismatch_kl, r - log r - 1; ratio_clampfrac.

    Edges:
        A change equal to the threshold is kept. The squared log-ratio is not limited. Metrics have no sides.

    Source:
        prime-rl at 559b4477, prime_rl.trainer.rl.loss. It is not the preference loss of that name.
    """
    moved = inputs.log_probs.detach().exp() - inputs.rollout_log_probs.exp()
    return _over_engine(inputs, moved.abs() > ipo_threshold, adv_tau, kl_tau, max_log_ratio)


def sapo_loss(
    inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05, max_log_ratio: float = MAX_LOG_RATIO
) -> Terms:
    """SAPO: a smooth gate instead of a clip.

    Args:
        inputs: Uses log_probs, old_log_probs and advantages.
        tau_pos: Temperature of the gate for positive advantages.
        tau_neg: Temperature of the gate for the other advantages.
        max_log_ratio: Limit of log-ratios, nats.

    Returns:
        The loss, [M], and metrics, [M] each: ppo_kl and ratio_clampfrac as of `ppo_loss`; pg_clipfrac is 0.

    Edges:
        An advantage of 0 has tau_neg. Log-ratios are limited to +-max_log_ratio; beyond it the token has no gradient.

    Source:
        arXiv 2511.20347, as in verl.
    """
    log_ratios = inputs.log_probs - inputs.old_log_probs
    ratio = torch.exp(bounded(log_ratios, max_log_ratio))
    taus = torch.where(inputs.advantages > 0, torch.full_like(ratio, tau_pos), tau_neg)
    loss = -torch.sigmoid(taus * (ratio - 1.0)) * (4.0 / taus) * inputs.advantages
    return Terms(loss, _ratio_metrics(log_ratios, torch.zeros_like(log_ratios), max_log_ratio))


def gmpo_loss(
    inputs: LossInputs,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> Terms:
    """GMPO: one ratio for each sequence, the geometric mean of its tokens' clipped ratios.

    Means are over the sequence, and each of its tokens has this loss.

    Args:
        inputs: Uses log_probs, old_log_probs, advantages and sequences. The tokens of a sequence share an advantage.
        eps_clip: Lower limit of the log-ratio, nats. The paper uses 0.4.
        eps_clip_high: Upper limit of the log-ratio, nats. None: eps_clip.
        max_log_ratio: Limit of the sequence's log-ratio, nats.

    Returns:
        The loss, [M], and metrics, [M] each: pg_clipfrac, 1 where the token's log-ratio is limited; ppo_kl and
        ratio_clampfrac as of `ppo_loss`.

    Edges:
        With A = 0 the log-ratio counts as 0 in the mean. The limits apply to tokens, max_log_ratio to their mean.
        A token whose log-ratio is limited has no gradient.

    Source:
        GMPO, arXiv 2507.20673, as in verl, which takes the mean over samples and limits no mean. verl's pg_clipfrac
        counts tokens with A > 0 beyond either limit, its pg_clipfrac_lower those with A < 0.
    """
    log_ratios = inputs.log_probs - inputs.old_log_probs
    high = eps_clip if eps_clip_high is None else eps_clip_high
    upper, lower = log_ratios.clamp(max=high), log_ratios.clamp(min=-eps_clip)
    limited = torch.where(inputs.advantages > 0, upper, torch.where(inputs.advantages < 0, lower, 0.0))
    means = inputs.sequences.means(limited)
    loss = -inputs.sequences.means(inputs.advantages) * torch.exp(bounded(means, max_log_ratio))
    clipped = (limited != log_ratios) & (inputs.advantages != 0)
    return Terms(loss, _ratio_metrics(log_ratios, clipped.to(loss.dtype), max_log_ratio))


def gpg_loss(inputs: LossInputs) -> Terms:
    """Policy gradient without a ratio.

    Args:
        inputs: Uses log_probs and advantages; no old log-probs.

    Returns:
        The loss, [M], and no metrics.

    Edges:
        Nothing is clamped, since there is no ratio.

    Source:
        GPG, arXiv 2504.02546; with any baseline it is REINFORCE.
    """
    return Terms(-inputs.advantages * inputs.log_probs, {})


def positive_nll_loss(inputs: LossInputs) -> Tensor:
    """Negative log-likelihood of the tokens of good samples, to be averaged over these tokens alone.

    -log_probs where the sample's reward is above 0, and 0 elsewhere.

    Args:
        inputs: Uses log_probs and rewards.

    Returns:
        [M], nats. Its sum is divided by the number of tokens of good samples, or by 1 if there are none.

    Edges:
        A reward of 0 is not good. Nothing is clamped.

    Source:
        VAPO, arXiv 2504.05118, equation 10; NeMo-RL at 7ea279ab, positive_example_nll_weight.
    """
    return torch.where(inputs.needed("rewards") > 0, -inputs.log_probs, 0.0)


def _clipped(
    log_ratios: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None,
    max_log_ratio: float,
) -> Terms:
    """Compute the clipped surrogate loss."""
    ratio = torch.exp(bounded(log_ratios, max_log_ratio))
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(plain, clipped)
    metrics = _ratio_metrics(log_ratios, (clipped > plain).to(loss.dtype), max_log_ratio)
    if eps_clip_c is not None:
        lowered = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
        metrics["train/pg_clipfrac_lower"] = (lowered < loss).to(loss.dtype)
        loss = lowered
    return Terms(loss, metrics)


def _over_engine(inputs: LossInputs, masked: Tensor, adv_tau: float, kl_tau: float, max_log_ratio: float) -> Terms:
    """Compute the loss of prime-rl for tokens that are masked or not."""
    log_ratios = inputs.log_probs - inputs.rollout_log_probs
    ratio = torch.exp(bounded(log_ratios, max_log_ratio))
    dropped = masked.to(ratio.dtype)
    loss = -adv_tau * inputs.advantages * ratio * (1.0 - dropped) + kl_tau * log_ratios.square()
    metrics = {
        "train/is_masked": dropped,
        "train/mismatch_kl": (ratio - log_ratios - 1.0).detach(),
        "train/ratio_clampfrac": _clamped(log_ratios, max_log_ratio),
    }
    return Terms(loss, metrics)


def _ratio_metrics(log_ratios: Tensor, clipped: Tensor, max_log_ratio: float) -> dict[str, Tensor]:
    """Return the metrics of a loss with a ratio to the old policy."""
    return {
        "train/pg_clipfrac": clipped,
        "train/ppo_kl": -log_ratios.detach(),
        "train/ratio_clampfrac": _clamped(log_ratios, max_log_ratio),
    }


def _clamped(log_ratios: Tensor, max_log_ratio: float) -> Tensor:
    """Return 1 where a log-ratio is beyond its limit."""
    return (log_ratios.abs() > max_log_ratio).to(log_ratios.dtype)


LOSSES: Final[Mapping[str, Callable[..., Terms]]] = {  # by the type of algorithm.loss, whose keys are the arguments
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "dppo_tv": partial(dppo_loss, divergence="tv"),
    "dppo_kl": partial(dppo_loss, divergence="kl"),
    "prime_rl": prime_rl_loss,
    "prime_rl_ipo": prime_rl_ipo_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "decoupled_ppo": decoupled_ppo_loss,
    "gpg": gpg_loss,
}
