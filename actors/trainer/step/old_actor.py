"""Old log-probs by the weights that sampled each token: copies of the policy from before the last train steps."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from actors.trainer.data.batch import Floats32, Ints, TrainBatch
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.kept_weights import KeptWeights
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.by_group import log_probs_by
from actors.trainer.step.layout import group_by_group

CURRENT: Final = -1  # the weights that the train step starts from


class OldActor:
    """Keeps the policy's weights from before each of the last train steps, in host memory and in checkpoints."""

    def __init__(self, replica: Replica, num_copies: int, *, max_tokens: int) -> None:
        """Allocate the copies. Create the old actor before a checkpoint is loaded.

        Args:
            replica: Model replica of this rank.
            num_copies: Number of train steps to keep weights of.
            max_tokens: Largest number of tokens in a micro-batch.
        """
        self._replica = replica
        self._copies = [KeptWeights(replica.weights_copy()) for _ in range(num_copies)]
        self._max_tokens = max_tokens
        replica.kept |= {f"old_actor.{number}": copy for number, copy in enumerate(self._copies)}

    def log_probs(self, batch: TrainBatch) -> tuple[Floats32, NDArray[np.bool_]]:
        """Compute the log-probs of tokens that older weights sampled. A collective of all ranks.

        Returns:
            The log-probs, [N], complete on every rank, and the tokens that have one here, [N]. The others are those of
            the weights that the train step starts from.
        """
        copy_N = copies_of(batch, self._steps(batch), [copy.step for copy in self._copies])
        column_N = np.zeros_like(batch.rollout_log_probs_N)
        for number in np.unique(copy_N[copy_N != CURRENT]).tolist():
            wanted_N = copy_N == number
            groups = np.unique(np.repeat(batch.groups_B, batch.lengths_B)[wanted_N])
            micro_batches = group_by_group(self._replica, batch, groups, max_tokens=self._max_tokens)
            own_N = log_probs_by(self._replica, self._copies[number].tensors, "", batch, micro_batches)
            column_N[wanted_N] = ranks.sum_over_replicas(torch.from_numpy(own_N)).numpy()[wanted_N]
        return column_N, copy_N != CURRENT

    def keep(self, batch: TrainBatch) -> None:
        """Copy the weights before this batch trains them, in place of the oldest copy."""
        oldest = min(self._copies, key=lambda copy: -1 if copy.step is None else copy.step)
        self._replica.keep_weights(oldest, self._steps(batch))

    def _steps(self, batch: TrainBatch) -> int:
        """Train steps in the policy's weights, those of earlier runs included."""
        return self._replica.steps_before + batch.step


def copies_of(batch: TrainBatch, steps: int, kept: Sequence[int | None]) -> Ints:
    """Choose the copy of the weights that sampled each trained token.

    A train step without a trainable sample leaves no copy: its weights are those of the next one. Tokens of weights
    that are older than all copies get the oldest copy.

    Args:
        batch: Batch with N tokens.
        steps: Train steps in the current weights.
        kept: Train steps in each copy. None: the copy is empty.

    Returns:
        Number of the copy, [N], or `CURRENT`; `CURRENT` for tokens that do not train.
    """
    filled = sorted((step, number) for number, step in enumerate(kept) if step is not None)
    copy_N = np.full(len(batch.tokens_N), CURRENT, dtype=np.int64)
    trains_N = batch.loss_mask_N != 0
    for age in np.unique(batch.staleness_N[trains_N]).tolist():
        found = (number for step, number in filled if steps - age <= step < steps)
        copy_N[trains_N & (batch.staleness_N == age)] = next(found, CURRENT)
    return copy_N


def old_actor_metrics(is_kept_N: NDArray[np.bool_], batch: TrainBatch) -> dict[str, float]:
    """Share of the trained tokens whose old log-probs are those of older weights; 0 if no token trains."""
    trains_N = batch.loss_mask_N != 0
    return {"train/old_actor_ratio": float(is_kept_N[trains_N].sum()) / max(int(trains_N.sum()), 1)}
