"""Losses of preference pairs. M is the number of trained tokens of one micro-batch, which has pairs whole.

Example:
    ```python
    import math

    import torch

    from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
    from actors.trainer.algorithms.preference import dpo_loss

    none = torch.zeros(3, dtype=torch.float64)
    inputs = LossInputs(
        log_probs=torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64),
        old_log_probs=none,
        rollout_log_probs=none,
        ref_log_probs=torch.tensor([-1.5, -2.5, -1.0], dtype=torch.float64),
        advantages=torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64),  # two tokens chosen, one rejected
        entropy=none,
        sequences=Sequences(torch.tensor([0, 0, 1]), 2),  # the two responses
        rollouts=Sequences(torch.tensor([0, 0, 0]), 1),  # the pair
    )
    found = dpo_loss(inputs, beta=0.4)  # h = 1.0 - (-0.5)
    assert torch.allclose(found.loss, torch.full((3,), math.log1p(math.exp(-0.4 * 1.5)), dtype=torch.float64))
    assert found.metrics["train/rewards_accuracies"].tolist() == [1.0, 1.0, 1.0]
    ```
"""

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from actors.trainer.algorithms.loss_inputs import LossInputs, Terms

Preference = Literal["sigmoid", "ipo"]


def dpo_loss(
    inputs: LossInputs, *, beta: float = 0.1, label_smoothing: float = 0.0, kind: Preference = "sigmoid"
) -> Terms:
    """DPO: raise the log-prob of the chosen response above that of the rejected one, relative to the reference.

    With h = sum of (log_probs - ref_log_probs) of the chosen response minus that of the rejected one:

        "sigmoid": -(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)
        "ipo": (h - 1 / (2 beta))^2, with averages over tokens in place of the sums

    Args:
        inputs: Uses log_probs, ref_log_probs, rollouts and advantages. A rollout is a pair. The advantage is above 0
            for tokens of the chosen response, below 0 for those of the rejected one.
        beta: Weight of the distance from the reference.
        label_smoothing: Probability that a label is wrong, 0 to below 0.5.
        kind: "sigmoid" is DPO, "ipo" is IPO.

    Returns:
        Every token has the loss of its pair, so the mean over rollouts is the mean over pairs.
        Metrics, of the pair: rewards_chosen and rewards_rejected, beta times the
        sums; rewards_margins, their difference; rewards_accuracies, 1 if the chosen one is the larger.

    Edges:
        A pair with a response without trained tokens has loss 0 and metrics 0. Without tokens everything is empty.
        Nothing is clamped: loss and gradient are finite for finite log-probs.

    Source:
        DPO, arXiv 2305.18290; label smoothing, cDPO; IPO, arXiv 2310.12036, averaged as in TRL. Not prime-rl's "IPO".
    """
    assert inputs.ref_log_probs is not None
    assert inputs.rollouts is not None
    chosen, rejected = (inputs.advantages > 0).to(inputs.log_probs), (inputs.advantages < 0).to(inputs.log_probs)
    is_whole = (inputs.rollouts.sums(chosen) > 0) & (inputs.rollouts.sums(rejected) > 0)
    log_ratios = inputs.log_probs - inputs.ref_log_probs
    if kind == "ipo":
        log_ratios = log_ratios / inputs.sequences.lengths
    of_chosen, of_rejected = inputs.rollouts.sums(log_ratios * chosen), inputs.rollouts.sums(log_ratios * rejected)
    margin = of_chosen - of_rejected
    if kind == "ipo":
        loss = (margin - 1.0 / (2.0 * beta)) ** 2
    else:
        loss = -(1.0 - label_smoothing) * logsigmoid(beta * margin) - label_smoothing * logsigmoid(-beta * margin)
    metrics = {
        "train/rewards_chosen": beta * of_chosen,
        "train/rewards_rejected": beta * of_rejected,
        "train/rewards_margins": beta * margin,
        "train/rewards_accuracies": (margin > 0).to(loss.dtype),
    }
    nothing = torch.zeros_like(loss)
    whole_only = {name: torch.where(is_whole, values, nothing) for name, values in metrics.items()}
    return Terms(torch.where(is_whole, loss, nothing), whole_only)
