"""Losses of preference pairs, for a policy and for a reward model. A micro-batch has pairs whole.

M is the number of trained tokens of one micro-batch; for a reward model, the number of its responses.

Example:
    ```python
    import math

    import torch

    from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
    from actors.trainer.algorithms.preference import dpo_loss, rm_loss

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

    rewards, signs = torch.tensor([0.25, -1.0], dtype=torch.float64), torch.tensor([1.0, -1.0])
    found = rm_loss(rewards, signs, Sequences(torch.tensor([0, 0]), 1))
    assert torch.allclose(found.loss, torch.full((2,), math.log1p(math.exp(-1.25)), dtype=torch.float64))
    ```
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from actors.trainer.algorithms.arguments import check_choice, check_shape
from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences, Terms

Preference = Literal["sigmoid", "ipo"]


def dpo_loss(
    inputs: LossInputs, *, beta: float = 0.1, label_smoothing: float = 0.0, kind: Preference = "sigmoid"
) -> Terms:
    """DPO: raise the log-prob of the chosen response above that of the rejected one, relative to the reference.

    h is the sum of log_probs - ref_log_probs of the chosen response minus that of the rejected one. With "ipo" averages
    over tokens take the place of the sums.

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
    check_choice("kind", kind, Preference)
    if inputs.rollouts is None:
        raise ValueError("rollouts is None, and this function needs it")
    chosen, rejected = (inputs.advantages > 0).to(inputs.log_probs), (inputs.advantages < 0).to(inputs.log_probs)
    is_whole = (inputs.rollouts.sums(chosen) > 0) & (inputs.rollouts.sums(rejected) > 0)
    log_ratios = inputs.log_probs - inputs.needed("ref_log_probs")
    if kind == "ipo":
        log_ratios = log_ratios / inputs.sequences.lengths
    of_chosen, of_rejected = inputs.rollouts.sums(log_ratios * chosen), inputs.rollouts.sums(log_ratios * rejected)
    margin = of_chosen - of_rejected
    if kind == "ipo":
        loss = (margin - 1.0 / (2.0 * beta)) ** 2
    else:
        loss = _sigmoid_loss(beta * margin, label_smoothing)
    return _of_pairs(loss, beta * of_chosen, beta * of_rejected, is_whole)


def rm_loss(rewards: Tensor, signs: Tensor, pairs: Sequences, *, label_smoothing: float = 0.0) -> Terms:
    """Loss of a reward model (Bradley-Terry).

    h is the reward of the chosen response minus that of the rejected one.

    Args:
        rewards: [M], float32 or float64, with gradient: reward of each response, read at its last token.
        signs: [M], above 0 for a chosen response, below 0 for a rejected one.
        pairs: Sums over pairs.
        label_smoothing: Probability that a label is wrong, 0 to below 0.5.

    Returns:
        Every response has the loss of its pair, so the mean over rollouts is the mean over pairs.
        Metrics as for `dpo_loss`, of the pair, with the rewards themselves.

    Edges:
        A pair with one response alone has loss 0 and metrics 0. Without responses everything is empty.
        Equal rewards count as wrong. Nothing is clamped: loss and gradient are finite for finite rewards.
        A constant that is added to all rewards changes nothing.

    Source:
        InstructGPT, arXiv 2203.02155, equation 1, for single pairs; equal to NeMo-RL's PreferenceLoss.
    """
    check_shape("signs", signs, rewards)
    check_shape("pairs", pairs, rewards)
    chosen, rejected = (signs > 0).to(rewards), (signs < 0).to(rewards)
    is_whole = (pairs.sums(chosen) > 0) & (pairs.sums(rejected) > 0)
    of_chosen, of_rejected = pairs.sums(rewards * chosen), pairs.sums(rewards * rejected)
    return _of_pairs(_sigmoid_loss(of_chosen - of_rejected, label_smoothing), of_chosen, of_rejected, is_whole)


def _sigmoid_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def _of_pairs(loss: Tensor, of_chosen: Tensor, of_rejected: Tensor, is_whole: Tensor) -> Terms:
    """Return the loss and the metrics of pairs with both responses; 0 for others."""
    metrics = {
        "train/rewards_chosen": of_chosen.detach(),
        "train/rewards_rejected": of_rejected.detach(),
        "train/rewards_margins": (of_chosen - of_rejected).detach(),
        "train/rewards_accuracies": (of_chosen > of_rejected).to(loss.dtype),
    }
    nothing = torch.zeros_like(loss)
    whole_only = {name: torch.where(is_whole, values, nothing) for name, values in metrics.items()}
    return Terms(torch.where(is_whole, loss, nothing), whole_only)
