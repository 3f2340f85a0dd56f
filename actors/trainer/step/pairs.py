"""Preference pairs: which response is which, the pairs of a micro-batch, and sums of metrics over pairs.

A pair is a rollout with two parts. The chosen response has reward 1, the rejected one reward 0.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from actors.trainer.algorithms.loss_inputs import Sequences, Terms
from actors.trainer.data.batch import Ints, MicroBatch


class PairSums(NamedTuple):
    """Metrics summed over preference pairs."""

    num_pairs: int
    sums: dict[str, float]  # by metric name


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


def sums_over_pairs(terms: Terms, rollouts_M: Ints) -> PairSums:
    """Sum metrics over pairs. All elements of a pair have the pair's values.

    Args:
        terms: The metrics, [M] each, on the CPU.
        rollouts_M: Pair of each element.
    """
    _, first = np.unique(rollouts_M, return_index=True)
    chosen = torch.from_numpy(first)
    return PairSums(len(first), {name: float(values[chosen].sum()) for name, values in terms.metrics.items()})
