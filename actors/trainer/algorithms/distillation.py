"""On-policy distillation: losses and advantages that follow a teacher. N tokens of a batch, M trained tokens, K ids.

Example:
    ```python
    import math

    import numpy as np
    import torch

    from actors.trainer.algorithms.distillation import opd_advantages, topk_distillation_loss

    mask, teacher = np.array([False, True, True]), np.array([0.0, -1.5, -1.0])
    found = opd_advantages(np.array([0.5, 0.5, 0.5]), np.array([0.0, -1.0, -1.0]), teacher, mask)
    assert found.tolist() == [0.5, 0.0, 0.5]
    policy = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()  # two of the ids, for one token
    loss, _ = topk_distillation_loss(policy, torch.tensor([[0.5, 0.5]], dtype=torch.float64).log())
    assert math.isclose(loss.item(), 0.5 * math.log(2))
    ```
"""

from typing import Final, Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from actors.trainer.algorithms.arguments import Floats, check_choice, check_shape, column, floats
from actors.trainer.algorithms.loss_inputs import Terms

TopkKl = Literal["forward", "reverse", "mixed"]

LOG_INFINITESIMAL: Final = -100.0  # nats: the teacher's log-prob outside of its top k


def opd_advantages(
    advantages: ArrayLike,
    log_probs: ArrayLike,
    teacher_log_probs: ArrayLike,
    loss_mask: ArrayLike,
    *,
    opd_kl_coef: float = 1.0,
) -> Floats:
    """Subtract the reverse KL to a teacher from the advantage of each token.

    advantage - opd_kl_coef (log_probs - teacher_log_probs), before the advantages are whitened. The expectation of the
    difference over the policy's tokens is KL(policy || teacher).

    Args:
        advantages: [N], of any estimator. All 0: pure distillation.
        log_probs: [N], of the policy before the first optimizer step of the batch.
        teacher_log_probs: [N], of the teacher for the same tokens, at the same temperature.
        loss_mask: [N], true where the token trains. Other tokens keep their advantage, whatever their log-probs are.
        opd_kl_coef: Weight of the reverse KL.

    Returns:
        [N], float64.

    Edges:
        The difference is not clamped. A teacher log-prob of minus infinity or NaN gives an advantage that is not
        finite, and the sample is masked.

    Source:
        Lu, "On-Policy Distillation", Thinking Machines Lab, 2025; order of operations and default as in slime.
    """
    found = floats("advantages", advantages)
    trains = column("loss_mask", loss_mask, len(found)).astype(bool)
    own = floats("log_probs", log_probs, len(found))[trains]
    found[trains] -= opd_kl_coef * (own - floats("teacher_log_probs", teacher_log_probs, len(found))[trains])
    return found


def topk_distillation_loss(
    topk_log_probs: Tensor,
    teacher_topk_log_probs: Tensor,
    entropy: Tensor | None = None,
    *,
    kl_type: TopkKl = "forward",
    mixed_kl_weight: float = 0.5,
    zero_outside_topk: bool = False,
) -> Terms:
    """Compute a KL divergence per token over the teacher's K likeliest tokens.

    With p of the teacher and q of the policy, each over these K tokens: forward is sum p (log p - log q), reverse is
    sum q (log q - log p), and mixed is w forward + (1 - w) reverse. The probabilities are those over the whole
    vocabulary; they are not renormalised.

    With `zero_outside_topk` the teacher's log-prob of all other tokens is -100. Reverse then also gets their sum of
    q (log q + 100), which follows from the policy's entropy.

    Args:
        topk_log_probs: [M, K], of the policy, with its gradient.
        teacher_topk_log_probs: [M, K], of the teacher for the same token ids.
        entropy: [M], of the policy, with its gradient. Needed with `zero_outside_topk`, unless `kl_type` is "forward".
        kl_type: forward, reverse or mixed.
        mixed_kl_weight: Weight w of the forward divergence in "mixed", from 0 to 1.
        zero_outside_topk: Count the policy's other tokens. No effect on "forward", to which they contribute nothing.

    Returns:
        The divergence, [M], nats, as loss and as the metric train/distillation_kl. The probability of the K tokens
        together is train/distillation_teacher_mass by the teacher, and train/distillation_student_mass by the policy.

    Edges:
        Nothing is clamped: a teacher log-prob of minus infinity adds nothing to forward, and makes reverse infinite.
        Over fewer tokens than the vocabulary the divergence may be below 0.

    Raises:
        ValueError: The entropy is missing.

    Source:
        NeMo-RL, DistillationLossFn at 7ea279ab. Forward is verl's forward_kl_topk (0.9.1) without its clamps.
    """
    check_choice("kl_type", kl_type, TopkKl)
    check_shape("teacher_topk_log_probs", teacher_topk_log_probs, topk_log_probs)
    ratios = teacher_topk_log_probs - topk_log_probs
    probs, teacher_probs = topk_log_probs.exp(), teacher_topk_log_probs.exp()
    forward = torch.where(teacher_probs > 0, teacher_probs * ratios, 0.0).sum(dim=-1)
    masses = {
        "train/distillation_teacher_mass": teacher_probs.detach().sum(dim=-1),
        "train/distillation_student_mass": probs.detach().sum(dim=-1),
    }
    if kl_type == "forward":
        return _reported(forward, masses)
    reverse = -(probs * ratios).sum(dim=-1)
    if zero_outside_topk:
        if entropy is None:
            raise ValueError("zero_outside_topk needs the entropy of the policy")
        rest = -entropy - (probs * topk_log_probs).sum(dim=-1)  # q log q, summed over the other tokens
        reverse = reverse + rest - LOG_INFINITESIMAL * (1 - probs.sum(dim=-1))
    if kl_type == "reverse":
        return _reported(reverse, masses)
    return _reported(mixed_kl_weight * forward + (1 - mixed_kl_weight) * reverse, masses)


def _reported(divergence: Tensor, masses: dict[str, Tensor]) -> Terms:
    return Terms(divergence, {"train/distillation_kl": divergence.detach(), **masses})
