"""Log-probs of the reference and the old policy, group by group: bit-identical whenever they are computed."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.trainer.data.batch import Floats32, Ints, MicroBatch, TrainBatch
from actors.trainer.data.precomputed import LogProbs, groups_to_compute
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.kept_weights import KeptWeights
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.files import file_source
from actors.trainer.models.shapes import check_weights
from actors.trainer.step.layout import group_by_group
from runtime.settings.derived import keeps_teacher, uses_reference
from runtime.settings.topology import Topology, reference_in_pool

Compute = Callable[[TrainBatch, Sequence[MicroBatch]], Floats32]


REF = "ref"  # name of the reference's weights in a checkpoint


class ReferenceModel:
    """Weights of this rank apart from the policy's, kept in host memory and swapped with them to compute log-probs.

    A run has one such copy for the reference, and one for a teacher. A swap needs GPU memory for one parameter at a
    time. The policy's weights are bit-equal before and after.
    """

    def __init__(
        self,
        replica: Replica,
        ref_load: str | None,
        *,
        store_prefix: str = "ref_",
        update_interval: int | None = None,
        is_saved: bool = False,
    ) -> None:
        """Copy the weights. Create the reference model before a checkpoint is loaded.

        Args:
            replica: Model replica of this rank.
            ref_load: Model directory. None: the replica's current weights.
            store_prefix: Name of the weights for the user's hook.
            update_interval: Train steps between updates by `follow`. None: the weights stay.
            is_saved: Whether the weights are part of checkpoints once they are some of this training.

        Raises:
            ValueError, OSError: The directory cannot be used.
        """
        self._replica = replica
        self._store_prefix = store_prefix
        self._update_interval = update_interval
        self._kept = KeptWeights(replica.weights_copy())
        self._is_named = ref_load is not None
        if is_saved:
            replica.kept[REF] = self._kept
        if ref_load is not None:
            check_weights(Path(ref_load), replica.hf)
            replica.set_weights(file_source(Path(ref_load), replica.dtype))
            replica.exchange_weights(self._kept.tensors)
            replica.optimizer.reload_model_params()

    def begin(self) -> None:
        """Take the policy's weights, from which training starts. Call it after `trainer.load` is read.

        A model that the settings name stays. So does a reference that follows the policy, if the checkpoint has it.
        """
        is_continued = self._update_interval is not None and self._kept.step is not None
        if not self._is_named and not is_continued:
            self._replica.keep_weights(self._kept, self._replica.steps_before)

    def follow(self, steps: int) -> None:
        """Take the policy's weights if an update is due. Call it before a train step, and before log-probs for it.

        The update after train step k, 2 k, ... of `update_interval` k happens here, before the next step: until then
        the policy's weights do not change. Without weights of this training, as at the start, none is due.

        Args:
            steps: Train steps in the policy's weights, those of earlier runs included.
        """
        if self._update_interval is None:
            return
        due = steps - steps % self._update_interval
        if self._kept.step is None:
            self._kept.step = due
        if self._kept.step < due:
            self._replica.keep_weights(self._kept, due)

    def metrics(self) -> dict[str, float]:
        """Train steps in the weights at their last update, if there are updates."""
        return {} if self._update_interval is None else {"train/ref_step": float(self._kept.step or 0)}

    def log_probs(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> Floats32:
        """Compute log-probs of the trained tokens in these micro-batches. A collective of all ranks."""
        return log_probs_by(self._replica, self._kept.tensors, self._store_prefix, batch, micro_batches)


def log_probs_by(
    replica: Replica,
    weights: Sequence[Tensor],
    store_prefix: str,
    batch: TrainBatch,
    micro_batches: Sequence[MicroBatch],
) -> Floats32:
    """Compute log-probs of the trained tokens by other weights than the policy's. A collective of all ranks.

    Args:
        replica: Model replica of this rank. Its weights are bit-equal before and after.
        weights: The other weights, as `weights_copy` returns them.
        store_prefix: Name of the weights for the user's hook.
        batch: The whole batch, with N tokens.
        micro_batches: Micro-batches of this replica.

    Returns:
        [N], on the last pipeline stage, 0 for tokens of other replicas.
    """
    column_N = np.zeros_like(batch.rollout_log_probs_N)
    replica.exchange_weights(weights)
    replica.before_log_probs(store_prefix)
    replica.fill_log_probs(micro_batches, column_N)
    replica.exchange_weights(weights)
    return column_N


def reference_of(topology: Topology, replica: Replica) -> ReferenceModel | None:
    """Load the reference model. None: the loss needs none, or engines serve it.

    Raises:
        ValueError, OSError: Its directory cannot be used.
    """
    if not uses_reference(topology.algorithm) or reference_in_pool(topology):
        return None
    ref_load, interval = topology.model.ref_load, topology.algorithm.ref_update_interval
    is_saved = interval is not None or (ref_load is None and topology.trainer.load is not None)
    return ReferenceModel(replica, ref_load, update_interval=interval, is_saved=is_saved)


def teacher_of(topology: Topology, replica: Replica) -> ReferenceModel | None:
    """Load the teacher that the trainer keeps. None: there is none, or engines serve it.

    Raises:
        ValueError, OSError: Its directory cannot be used.
    """
    if not keeps_teacher(topology.algorithm):
        return None
    return ReferenceModel(replica, topology.model.opd_teacher_load, store_prefix="teacher_")


class GroupLogProbs:
    """Computes log-probs that were not precomputed, in the layout of `group_by_group`."""

    def __init__(self, replica: Replica, reference: ReferenceModel | None, *, max_tokens: int, policy: bool) -> None:
        """Set up for one replica, without computing anything.

        Args:
            replica: Model replica of this rank.
            reference: Reference model. None: its log-probs are not needed.
            max_tokens: Largest number of tokens in a micro-batch.
            policy: Whether log-probs of the old policy, before the first optimizer step, may be precomputed.
        """
        self._replica = replica
        self._reference = reference
        self._max_tokens = max_tokens
        self._policy = policy

    def precompute(self, batch: TrainBatch) -> LogProbs:
        """Precompute all log-probs that a train step needs of groups without a batch. A collective of all ranks."""
        ref_N = self.reference(batch) if self._reference is not None else None
        old_N = self.policy(batch, batch.groups_B) if self._policy else None
        return LogProbs(ref_N, old_N)

    def reference(self, batch: TrainBatch) -> Floats32:
        """Log-probs of the reference. A collective of all ranks."""
        assert self._reference is not None
        return self._column(batch, batch.ref_log_probs_N, batch.groups_B, self._reference.log_probs)

    def policy(self, batch: TrainBatch, groups_B: Ints) -> Floats32:
        """Log-probs of the current weights for some groups. A collective of all ranks."""
        return self._column(batch, batch.old_log_probs_N, groups_B, self._of_policy)

    def _of_policy(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> Floats32:
        column_N = np.zeros_like(batch.rollout_log_probs_N)
        self._replica.before_log_probs("")
        self._replica.fill_log_probs(micro_batches, column_N)
        return column_N

    def _column(self, batch: TrainBatch, precomputed_N: Floats32 | None, groups_B: Ints, compute: Compute) -> Floats32:
        """Return the precomputed values and compute the missing ones. The column is complete on every rank."""
        missing = np.unique(groups_B) if precomputed_N is None else groups_to_compute(batch, precomputed_N, groups_B)
        column_N = np.zeros_like(batch.rollout_log_probs_N)
        if len(missing):
            micro_batches = group_by_group(self._replica, batch, missing, max_tokens=self._max_tokens)
            own_N = compute(batch, micro_batches)
            column_N = ranks.sum_over_replicas(torch.from_numpy(own_N)).numpy()
        return column_N if precomputed_N is None else np.where(np.isnan(precomputed_N), column_N, precomputed_N)
