"""Log-probs of a batch's tokens by other weights than those being trained: the old policy, a reference, a teacher."""

from collections.abc import Sequence

import numpy as np
import torch

from actors.trainer.algorithms.advantage_inputs import Flags
from actors.trainer.data.batch import Floats32, TrainBatch
from actors.trainer.data.precomputed import LogProbs
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.plugins.functions import hook
from actors.trainer.step.by_group import GroupLogProbs, reference_of, teacher_of
from actors.trainer.step.learner import OptimizerStep
from actors.trainer.step.old_actor import OldActor
from actors.trainer.step.planning import micro_batches_of
from runtime.functions.table import LOG_PROB_HOOK
from runtime.settings.derived import (
    first_policy_step,
    measures_all,
    needs_all_old_log_probs,
    precomputes_old_log_probs,
    reads_reference,
    replays_experts,
    teaches_advantages,
    trains_demonstrations,
)
from runtime.settings.placement import max_sample_tokens
from runtime.settings.topology import Topology, reference_in_pool


class OtherLogProbs:
    """Computes these log-probs. Its state is the weights of the other models."""

    def __init__(self, topology: Topology, replica: Replica) -> None:
        """Copy the reference's and the teacher's weights. Create it before a checkpoint is loaded.

        Raises:
            ValueError, OSError: A model cannot be used.
        """
        demonstrations = trains_demonstrations(topology)
        before = hook(topology, LOG_PROB_HOOK, lambda: replica.before_change())
        replica.before_log_probs = lambda prefix: before(replica.chunks, prefix)  # "", "ref_" or "teacher_"
        self._replica = replica
        self._algorithm = topology.algorithm
        self._first_step = first_policy_step(topology)
        self._measures_all = measures_all(topology)
        self._replays_experts = not demonstrations and replays_experts(self._algorithm)
        self._reads_reference = reads_reference(self._algorithm)
        self._ref_in_pool = reference_in_pool(topology)
        self.needs_all_old = not demonstrations and needs_all_old_log_probs(self._algorithm)
        self.reference = reference_of(topology, replica)
        self.teacher = teacher_of(topology, replica)
        max_tokens = max_sample_tokens(topology)
        self._old_actor: OldActor | None = None
        if self._algorithm.keep_old_actor:
            self._old_actor = OldActor(replica, topology.rollout.max_token_staleness or 0, max_tokens=max_tokens)
        self._by_group: GroupLogProbs | None = None
        if topology.trainer.log_probs_ahead:
            reference, policy = self.reference if self._reads_reference else None, precomputes_old_log_probs(topology)
            self._by_group = GroupLogProbs(replica, reference, max_tokens=max_tokens, policy=policy)

    def precompute(self, batch: TrainBatch) -> LogProbs:
        """Precompute log-probs of groups that are in no batch yet, for the train step `batch.step`.

        A collective of all ranks.
        """
        assert self._by_group is not None
        self.update_reference(batch)
        with self._replica.memory.phase("prepare"):
            return self._by_group.precompute(batch)

    def update_reference(self, batch: TrainBatch) -> None:
        """Let the reference take the policy's weights, if that is due before this train step."""
        if self.reference is not None:
            self.reference.follow(self._replica.steps_before + batch.step)

    def of_old_policy(self, batch: TrainBatch, steps: Sequence[OptimizerStep]) -> tuple[Floats32, Flags | None]:
        """Return log-probs before training, and which of them are by the older weights that sampled the tokens.

        Unless all are needed before, the forward pass of the first optimizer step yields those of its own samples,
        and they are 0 here. A collective of all ranks.

        Args:
            batch: The whole batch.
            steps: Its optimizer steps.

        Returns:
            [N] each. No flags: no older weights are kept.
        """
        later = steps[1:] if batch.step >= self._first_step else []
        log_probs_N = self._of_policy(batch, steps if self.needs_all_old else later)
        if self._old_actor is None:
            return log_probs_N, None
        kept_log_probs_N, is_kept_N = self._old_actor.log_probs(batch)
        self._old_actor.keep(batch)
        return np.where(is_kept_N, kept_log_probs_N, log_probs_N), is_kept_N

    def _of_policy(self, batch: TrainBatch, later: Sequence[OptimizerStep]) -> Floats32:
        """Compute log-probs by the current weights, for the samples of these optimizer steps."""
        column_N = np.zeros_like(batch.rollout_log_probs_N)
        if not later or not (self._measures_all or self._replays_experts):
            return column_N
        if self._by_group is not None and not self._replays_experts:
            samples = np.concatenate([step.samples for step in later])
            return self._by_group.policy(batch, batch.groups_B[samples])
        self._replica.before_log_probs("")
        self._replica.fill_log_probs(micro_batches_of(later), column_N, is_policy=True)
        return ranks.sum_over_replicas(torch.from_numpy(column_N)).numpy() if self.needs_all_old else column_N

    def of_reference(self, batch: TrainBatch, steps: Sequence[OptimizerStep]) -> Floats32 | None:
        """Return the reference's log-probs, [N]. None: no term of this step needs them.

        They are complete on every rank where that is needed before training, or if engines computed them; otherwise a
        rank has its own tokens'. A collective of all ranks.

        Raises:
            ValueError: The samples came without the log-probs of a reference in an engine pool.
        """
        interval, before = self._algorithm.kl.metric_interval, self._algorithm.rollout_data_postprocess is not None
        needed = (
            batch.step >= self._first_step or self._algorithm.kl.reward_coef > 0
        )  # the critic sees the same rewards
        if self._ref_in_pool and batch.ref_log_probs_N is None:
            raise ValueError(f"step {batch.step + 1}: samples have no log-probs of the reference, as of engines.ref")
        if not needed or (interval and batch.step % interval):
            return None
        if self.reference is None:
            return batch.ref_log_probs_N if self._ref_in_pool else None
        if self._by_group is not None and self._reads_reference:
            return self._by_group.reference(batch)
        own_N = self.reference.log_probs(batch, micro_batches_of(steps))
        if not self._algorithm.kl.reward_coef and not before:
            return own_N
        return ranks.sum_over_replicas(torch.from_numpy(own_N)).numpy()

    def of_teacher(self, batch: TrainBatch, steps: Sequence[OptimizerStep]) -> Floats32 | None:
        """Return the teacher's log-probs of all trained tokens, [N], complete on every rank.

        None: no advantage follows a teacher.

        A collective of all ranks.

        Raises:
            ValueError: The samples came without the log-probs of a teacher in an engine pool.
        """
        if self.teacher is not None:
            own_N = self.teacher.log_probs(batch, micro_batches_of(steps))
            return ranks.sum_over_replicas(torch.from_numpy(own_N)).numpy()
        if not teaches_advantages(self._algorithm):
            return None
        if batch.teacher_log_probs_N is None:
            raise ValueError(
                f"step {batch.step + 1}: samples have no log-probs of a teacher, which algorithm.opd needs"
            )
        return batch.teacher_log_probs_N
