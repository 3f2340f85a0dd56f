"""Log-probs of the reference and of the old policy, group by group: the same to the bit whenever they are computed."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from actors.trainer.batches.batch import Floats32, Ints, MicroBatch, TrainBatch
from actors.trainer.batches.known import LogProbs, unknown_groups
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.layout import group_by_group
from actors.trainer.step.reference import ReferenceModel

Compute = Callable[[TrainBatch, Sequence[MicroBatch]], Floats32]


class GroupLogProbs:
    """What is not known of a batch yet is computed in the layout that `group_by_group` gives each of its groups."""

    def __init__(self, replica: Replica, reference: ReferenceModel | None, *, max_tokens: int, policy: bool) -> None:
        """Of one replica.

        Args:
            replica: of this rank.
            reference: none: its log-probs are not asked for.
            max_tokens: of a micro-batch.
            policy: those of the policy before the first optimizer step may be computed ahead.
        """
        self._replica = replica
        self._reference = reference
        self._max_tokens = max_tokens
        self._policy = policy

    def ahead(self, batch: TrainBatch) -> LogProbs:
        """All that a train step will want of groups that no batch has yet. A collective of all ranks."""
        ref_N = self.reference(batch) if self._reference is not None else None
        old_N = self.policy(batch, batch.groups_B) if self._policy else None
        return LogProbs(ref_N, old_N)

    def reference(self, batch: TrainBatch) -> Floats32:
        """The reference's. A collective of all ranks."""
        assert self._reference is not None
        return self._column(batch, batch.ref_log_probs_N, batch.groups_B, self._reference.log_probs)

    def policy(self, batch: TrainBatch, groups_B: Ints) -> Floats32:
        """The current weights' of some groups. A collective of all ranks."""
        return self._column(batch, batch.old_log_probs_N, groups_B, self._of_policy)

    def _of_policy(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> Floats32:
        column_N = np.zeros_like(batch.rollout_log_probs_N)
        self._replica.fill_log_probs(micro_batches, column_N)
        return column_N

    def _column(self, batch: TrainBatch, known_N: Floats32 | None, groups_B: Ints, compute: Compute) -> Floats32:
        """What is known, and the rest, complete on every rank."""
        missing = np.unique(groups_B) if known_N is None else unknown_groups(batch, known_N, groups_B)
        column_N = np.zeros_like(batch.rollout_log_probs_N)
        if len(missing):
            micro_batches = group_by_group(self._replica, batch, missing, max_tokens=self._max_tokens)
            own_N = compute(batch, micro_batches)
            column_N = ranks.sum_over_replicas(torch.from_numpy(own_N)).numpy()
        return column_N if known_N is None else np.where(np.isnan(known_N), column_N, known_N)
