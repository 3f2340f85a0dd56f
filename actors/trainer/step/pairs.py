"""Preference pairs: which response is which, the pairs of a micro-batch, and sums of metrics over pairs.

A pair is a rollout with two parts. The chosen response has reward 1, the rejected one reward 0.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences, Terms
from actors.trainer.data.batch import Ints, MicroBatch, TrainBatch
from actors.trainer.data.held_out import PairSums


def signs_of(rewards_B: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 for chosen responses and -1 for rejected ones."""
    return np.where(rewards_B > 0, 1.0, -1.0)


def rollouts_in(
    micro_batch: MicroBatch, rollouts_B: Ints, numbers_M: Ints, device: torch.device, group: Any
) -> Sequences:
    """Describe the rollouts of a micro-batch that has rollouts whole, for sums over them.

    Args:
        micro_batch: The micro-batch.
        rollouts_B: Rollout of each sample of the batch.
        numbers_M: Number of each trained token's sequence in the micro-batch.
        device: Device of the sums.
        group: Torch process group of the ranks that hold parts of its sequences. None: this rank has them whole.
    """
    _, rollout_of = np.unique(rollouts_B[micro_batch.samples], return_inverse=True)
    return Sequences(torch.from_numpy(rollout_of[numbers_M]).to(device), micro_batch.num_sequences, group)


def pair_inputs(batch: TrainBatch, policy_N: Tensor, ref_N: Tensor) -> tuple[LossInputs, Ints]:
    """Return the inputs of a loss of pairs for all trained tokens of a batch, and the pair of each.

    Args:
        batch: The pairs.
        policy_N: Log-probs of the policy, on the CPU.
        ref_N: Log-probs of the reference.
    """
    trains = np.flatnonzero(batch.loss_mask_N)
    sample_M = np.repeat(np.arange(len(batch.lengths_B)), batch.lengths_B)[trains]
    rollouts_M = batch.rollouts_B[sample_M]
    policy_M, ref_M = (column_N[torch.from_numpy(trains)].double() for column_N in (policy_N, ref_N))
    none = torch.zeros_like(policy_M)
    inputs = LossInputs(
        log_probs=policy_M,
        old_log_probs=none,
        rollout_log_probs=none,
        ref_log_probs=ref_M,
        advantages=torch.from_numpy(signs_of(batch.rewards_B)[sample_M]),
        entropy=none,
        sequences=Sequences(torch.from_numpy(sample_M), len(batch.lengths_B)),
        rollouts=Sequences(torch.from_numpy(rollouts_M), int(batch.rollouts_B[-1]) + 1),
    )
    return inputs, rollouts_M


def sums_over_pairs(terms: Terms, rollouts_M: Ints) -> PairSums:
    """Sum metrics over pairs. All elements of a pair have the pair's values.

    Args:
        terms: The metrics, [M] each, on the CPU.
        rollouts_M: Pair of each element.
    """
    _, first = np.unique(rollouts_M, return_index=True)
    chosen = torch.from_numpy(first)
    return PairSums(len(first), {name: float(values[chosen].sum()) for name, values in terms.metrics.items()})
