"""One train step: trains a batch of scored samples in a few optimizer steps and reports metrics.

planning.py splits the batch, other_log_probs.py computes log-probs by other weights, estimator.py advantages, and
learner.py takes the optimizer steps. This module puts them together, and computes the loss of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs, Advantages, Floats
from actors.trainer.algorithms.corrections import mean_weight
from actors.trainer.algorithms.group_baselines import GroupOfOne
from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences, Terms
from actors.trainer.algorithms.schedules import entropy_coef
from actors.trainer.data.batch import (
    Floats32,
    Ints,
    MicroBatch,
    TrainBatch,
)
from actors.trainer.data.held_out import PairSums
from actors.trainer.data.skipped import with_mask, with_masked
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica, TokenOutputs
from actors.trainer.plugins.dry_run import try_plugins
from actors.trainer.plugins.rollout_data import Postprocess, rollout_data
from actors.trainer.step.critic import Critic, Estimates
from actors.trainer.step.estimator import (
    advantage_inputs,
    divergence_clamped,
    group_of_one,
    idle_samples,
    response_mask,
    token_advantages,
    with_divergence,
)
from actors.trainer.step.layout import NO_SAMPLES, laid_out, shared_equally
from actors.trainer.step.learner import Done, Learner, OptimizerStep
from actors.trainer.step.masked_tokens import MaskedTokens
from actors.trainer.step.metrics import (
    StepTimer,
    difference_metrics,
    memory_metrics,
    passrate_metrics,
    sampling_metrics,
    size_metrics,
    speed_metrics,
    token_metrics,
)
from actors.trainer.step.objective import DIVERGENCE, Objective, weigh
from actors.trainer.step.old_actor import old_actor_metrics
from actors.trainer.step.other_log_probs import OtherLogProbs
from actors.trainer.step.pairs import pair_inputs, rollouts_in, sums_over_pairs
from actors.trainer.step.planning import Planner, micro_batches_of
from actors.trainer.step.remote_critic import RemoteCritic
from actors.trainer.step.rewards import reward_metrics, with_penalties
from runtime.data.trained_tokens import TrainedTokens
from runtime.settings.derived import (
    first_policy_step,
    has_critic,
    measures_all,
    normalizes_weights,
    reads_reference,
    reward_keys,
    topk_divergence,
    trains_demonstrations,
    trains_pairs,
)
from runtime.settings.placement import max_sample_tokens
from runtime.settings.terms import terms_of_all
from runtime.settings.topology import Topology


@dataclass(frozen=True)
class _Columns:
    """Per-token columns of the batch, copied to the device once and indexed there."""

    advantages_N: Tensor
    weights_N: Tensor  # weight of the token's loss in the reduction of its optimizer step
    rollout_log_probs_N: Tensor
    trainer_log_probs_N: Tensor  # under the weights before the first optimizer step; forward passes fill it in
    ref_log_probs_N: Tensor | None
    teacher_log_probs_N: Tensor | None
    rewards_N: Tensor  # of the token's sample
    is_kept_N: Tensor | None  # tokens whose `trainer_log_probs_N` are by the older weights that sampled them
    weight_scale: float  # mean importance weight of the batch, or 1
    rollouts_B: Ints | None  # rollout of each sample, where micro-batches have rollouts whole
    estimates: Estimates | None  # values and returns of the critic
    measured_N: Mapping[str, Floats]  # metrics of tokens by name


class Trained(NamedTuple):
    """Result of training a batch."""

    metrics: dict[str, float]  # of the whole batch; complete on rank 0 and on the last pipeline stage
    skipped: Ints  # samples of skipped optimizer steps, the same on every rank
    masked: Ints  # samples whose loss was not finite, the same on every rank
    tokens: TrainedTokens | None = None  # with observe.tokens, of the policy; complete on every rank

    @property
    def without_gradient(self) -> Ints:
        """All samples that are skipped or masked."""
        return np.union1d(self.skipped, self.masked)


class TrainStep:
    """Trains batches on a replica, and on a critic. Its only own state is weights of other models and earlier steps."""

    def __init__(self, topology: Topology, replica: Replica, critic: Critic | RemoteCritic | None = None) -> None:
        """Copy the reference weights. Create the train step before a checkpoint is loaded.

        Raises:
            ValueError, OSError: The reference model cannot be used.
            InputError: A function of the user cannot be used.
        """
        assert (critic is not None) == has_critic(topology)
        self._replica = replica
        self._critic = critic
        self._topology = topology
        self._algorithm = topology.algorithm
        self._first_step = first_policy_step(topology)
        self._demonstrations = trains_demonstrations(topology)
        self._pairs = trains_pairs(topology)
        self._measures_all = measures_all(topology)
        self._terms_of_all = terms_of_all(topology)
        self._records_tokens = topology.observe.tokens
        try_plugins(topology, replica.device)
        self._objective = Objective(self._algorithm)
        named = self._algorithm.rollout_data_postprocess
        self._postprocess = None if named is None else Postprocess(named)
        replica.first_step = self._first_step
        self._learner = Learner(topology, replica, self._objective.names)
        self._planner = Planner(topology, replica, self._learner)
        self._log_probs = OtherLogProbs(topology, replica)
        self.precompute = self._log_probs.precompute
        self._group_of_one: GroupOfOne = group_of_one(topology)

    def __call__(self, batch: TrainBatch) -> Trained:
        """Train one batch. A collective of all ranks, which pass the same batch.

        Raises:
            InputError: A loss or a gradient was not finite, and train.on_nonfinite, train.max_skipped or
                train.max_skipped_share ends the run. The weights are unchanged by this optimizer step. A restart would
                fail on the same batch.
        """
        timer, memory = StepTimer(), self._replica.memory
        self._log_probs.update_reference(batch)
        batch = batch if self._demonstrations else with_penalties(batch, self._topology)
        known = self._known_advantages(batch)
        idle_B = None if known is None else idle_samples(batch, known.advantages)
        steps = self._planner.steps(batch, idle_B)
        timer.lap("perf/plan_time")
        with memory.phase("prepare"):
            columns = self._prepare(batch, steps, known, timer)
            if self._postprocess is not None:
                batch, steps, columns = self._postprocessed(self._postprocess, batch, steps, columns)
                timer.lap("perf/postprocess_time")
        noted = self._notes(batch)
        metrics, done = self._train_both(batch, steps, columns, noted, timer)
        metrics |= memory_metrics(memory.take()) | size_metrics(batch)
        taken = [one for one in done if one.is_taken]
        masked_B = np.logical_or.reduce([one.masked_B for one in done])
        if not self._demonstrations:
            trained = with_masked(batch, masked_B)
            metrics |= sampling_metrics(trained, columns.advantages_N.cpu().numpy())
            metrics |= token_metrics(trained, columns.measured_N)
            metrics |= passrate_metrics(batch) if self._topology.rollout.log_passrate else {}
            metrics |= reward_metrics(batch, self._algorithm)
        if self._log_probs.reference is not None:
            metrics |= self._log_probs.reference.metrics()
        if columns.is_kept_N is not None:
            metrics |= old_actor_metrics(columns.is_kept_N.cpu().numpy(), batch)
        metrics["train/num_skipped_steps"] = len(done) - len(taken)
        metrics["train/num_idle_samples"] = 0 if idle_B is None else int(idle_B.sum())
        timer.lap("perf/metrics_time")
        metrics |= timer.metrics() | {"perf/train_time": timer.total}
        skipped = np.concatenate([NO_SAMPLES, *(one.step.samples for one in done if not one.is_taken)])
        tokens = None
        if noted is not None and self._records_tokens:
            advantages_N = columns.advantages_N.cpu().numpy()
            tokens = noted.tokens(batch, with_masked(batch, masked_B), advantages_N, response_mask(batch))
        return Trained(metrics, skipped, np.flatnonzero(masked_B), tokens)

    def _train_both(
        self,
        batch: TrainBatch,
        steps: Sequence[OptimizerStep],
        columns: _Columns,
        noted: MaskedTokens | None,
        timer: StepTimer,
    ) -> tuple[dict[str, float], list[Done]]:
        """Take the optimizer steps of critic and policy. The policy's are returned if it trains, else the critic's.

        A critic on ranks of its own trains meanwhile.
        """
        remote = self._critic if isinstance(self._critic, RemoteCritic) else None
        metrics, done = dict[str, float](), list[Done]()
        if remote is None:
            metrics, done = self._train_critic(batch, steps, columns, timer)
        else:
            assert columns.estimates is not None
            remote.begin_training(batch, columns.estimates)
        if batch.step >= self._first_step:
            of_policy, done = self._train_policy(batch, steps, columns, noted, timer)
            metrics |= of_policy
        if remote is not None:
            of_critic, learned = remote.trained(steps)
            timer.lap("perf/critic_wait_time")
            metrics |= of_critic
            done = done or learned
        return metrics, done

    def _train_critic(
        self, batch: TrainBatch, steps: Sequence[OptimizerStep], columns: _Columns, timer: StepTimer
    ) -> tuple[dict[str, float], list[Done]]:
        """Take the critic's optimizer steps, if there is a critic. A collective of all ranks."""
        if not isinstance(self._critic, Critic):
            return {}, []
        assert columns.estimates is not None
        with self._replica.memory.phase("train"):
            done, metrics = self._critic.train(batch, steps, columns.estimates, columns.weights_N)
        timer.lap("perf/critic_train_time")
        return metrics, done

    def _train_policy(
        self,
        batch: TrainBatch,
        steps: Sequence[OptimizerStep],
        columns: _Columns,
        noted: MaskedTokens | None,
        timer: StepTimer,
    ) -> tuple[dict[str, float], list[Done]]:
        """Take the policy's optimizer steps. A collective of all ranks."""
        before = timer.total
        with self._replica.memory.phase("train"):
            loss = partial(self._loss_terms, batch.step, columns, noted)
            done = self._learner.train(batch, steps, loss, columns.weights_N, timer)
        steps, taken = [one.step for one in done], [one for one in done if one.is_taken]
        took_s = timer.total - before
        lengths = batch.lengths_B[~steps[0].idle_B].tolist()
        metrics = self._learner.metrics(done) | speed_metrics(self._replica.hf, lengths, took_s, self._replica.device)
        if columns.ref_log_probs_N is None:
            metrics = {name: value for name, value in metrics.items() if name not in DIVERGENCE}
        if not self._demonstrations:
            measured = micro_batches_of(steps if self._measures_all else steps[:1])
            metrics |= difference_metrics(batch, measured, columns.trainer_log_probs_N.cpu().numpy())
            if noted is not None and batch.step == self._first_step:
                trained = with_masked(batch, np.logical_or.reduce([one.masked_B for one in done]))
                metrics |= noted.counts(batch, trained, columns.advantages_N.cpu().numpy(), response_mask(batch))
            metrics["train/entropy_coef"] = self._entropy_coef(batch.step)
        metrics["train/grad_norm"] = float(np.mean([one.norm for one in taken or done]))
        metrics["train/lr-pg_0"] = self._learner.learning_rate(batch.step, steps[-1].number)
        metrics["perf/actor_train_time"] = took_s
        return metrics, done

    def _notes(self, batch: TrainBatch) -> MaskedTokens | None:
        """Return what keeps masked tokens by rule: for counts of the policy's first train step, and for dumps."""
        is_noted = batch.step == self._first_step or (self._records_tokens and batch.step > self._first_step)
        if not is_noted or self._demonstrations:
            return None
        return MaskedTokens(self._objective.names, len(batch.tokens_N), self._replica.device)

    def evaluate(self, batch: TrainBatch) -> PairSums:
        """Sum the metrics of preference pairs under the current weights, without training. A collective of all ranks.

        Args:
            batch: The pairs.
        """
        reference = self._log_probs.reference
        assert reference is not None
        samples = np.arange(len(batch.lengths_B))
        shares = shared_equally(self._replica, batch, samples, max_tokens=max_sample_tokens(self._topology))
        micro_batches = laid_out(self._replica, batch, shares)
        own_N = np.zeros_like(batch.rollout_log_probs_N)
        self._replica.before_log_probs("")
        self._replica.fill_log_probs(micro_batches, own_N)
        columns = own_N, reference.log_probs(batch, micro_batches)
        policy_N, ref_N = (ranks.sum_over_replicas(torch.from_numpy(column_N)) for column_N in columns)
        inputs, rollouts_M = pair_inputs(batch, policy_N, ref_N)
        return sums_over_pairs(self._objective(inputs, entropy_coef=0.0), rollouts_M)

    def _known_advantages(self, batch: TrainBatch) -> Advantages | None:
        """Compute the advantages before any pass, if samples without one need none. None: each sample has passes."""
        if self._terms_of_all:
            return None
        inputs = advantage_inputs(batch, reward_keys(self._algorithm))
        return token_advantages(inputs, self._algorithm, self._group_of_one)

    def _prepare(
        self, batch: TrainBatch, steps: list[OptimizerStep], known: Advantages | None, timer: StepTimer
    ) -> _Columns:
        """Compute all inputs of the loss except the policy's own forward pass."""
        trainer_log_probs_N, is_kept_N = self._log_probs.of_old_policy(batch, steps)
        weight_scale = 1.0
        if normalizes_weights(self._algorithm):
            weight_scale = self._mean_weight(batch, trainer_log_probs_N)
        timer.lap("perf/log_probs_time")
        if (teacher_log_probs_N := self._log_probs.of_teacher(batch, steps)) is not None:
            timer.lap("perf/teacher_log_probs_time")
        if (ref_log_probs_N := self._log_probs.of_reference(batch, steps)) is not None:
            timer.lap("perf/ref_log_probs_time")
        inputs = advantage_inputs(batch, reward_keys(self._algorithm))
        old_N = batch.rollout_log_probs_N if self._algorithm.use_rollout_logprobs else trainer_log_probs_N
        if self._algorithm.kl.reward_coef:
            assert ref_log_probs_N is not None
            inputs = with_divergence(inputs, old_N, ref_log_probs_N, self._algorithm)
        if teacher_log_probs_N is not None:
            columns = {"old_log_probs": old_N, "teacher_log_probs": teacher_log_probs_N}
            inputs = replace(inputs, **{name: column.astype(np.float64) for name, column in columns.items()})
        (advantages, returns), estimates = self._estimate(batch, inputs, timer) if known is None else (known, None)
        weights_B = np.concatenate([step.reduction.token_weights for step in steps])
        device = self._replica.device
        advantages_N, weights_N, rollout_N, trainer_N, rewards_N = (
            torch.tensor(values_N, device=device)
            for values_N in (
                advantages.astype(np.float32),
                batch.spread(weights_B),
                batch.rollout_log_probs_N,
                trainer_log_probs_N,
                batch.spread(batch.rewards_B),
            )
        )
        ref_N = None if ref_log_probs_N is None else torch.tensor(ref_log_probs_N, device=device)
        teacher_N = None if teacher_log_probs_N is None else torch.tensor(teacher_log_probs_N, device=device)
        kept_N = None if is_kept_N is None else torch.tensor(is_kept_N, device=device)
        timer.lap("perf/plan_time")
        rollouts_B = batch.rollouts_B if self._pairs else None
        measured_N = {"rollout/kl": inputs.kl, "rollout/returns": returns}
        if inputs.kl is not None:
            measured_N["rollout/kl_clampfrac"] = divergence_clamped(inputs, self._algorithm)
        return _Columns(
            advantages_N,
            weights_N,
            rollout_N,
            trainer_N,
            ref_N,
            teacher_N,
            rewards_N,
            kept_N,
            weight_scale,
            rollouts_B,
            estimates,
            {name: column for name, column in measured_N.items() if column is not None},
        )

    def _estimate(
        self, batch: TrainBatch, inputs: AdvantageInputs, timer: StepTimer
    ) -> tuple[Advantages, Estimates | None]:
        """Compute the advantages of the batch's tokens, and with a critic its values and returns."""
        values_N = None
        if self._critic is not None:
            values_N = self._critic.values(batch, inputs.response_mask)
            inputs = replace(inputs, values=values_N.astype(np.float64))
            timer.lap("perf/values_time")
        found = token_advantages(inputs, self._algorithm, self._group_of_one)
        timer.lap("perf/plan_time")
        return found, None if values_N is None or found.returns is None else Estimates(values_N, found.returns)

    def _postprocessed(
        self, postprocess: Postprocess, batch: TrainBatch, steps: list[OptimizerStep], columns: _Columns
    ) -> tuple[TrainBatch, list[OptimizerStep], _Columns]:
        """Let the user's function mask tokens and change advantages. A collective of all ranks."""
        old_N = columns.trainer_log_probs_N.cpu().numpy()
        data = rollout_data(
            batch,
            old_log_probs=batch.rollout_log_probs_N if self._algorithm.use_rollout_logprobs else old_N,
            ref_log_probs=columns.ref_log_probs_N.cpu().numpy()
            if columns.ref_log_probs_N is not None and reads_reference(self._algorithm)
            else None,
            advantages=columns.advantages_N.cpu().numpy(),
        )
        data, none_B = postprocess(data, seed=self._topology.run.seed), np.zeros(len(batch.lengths_B), dtype=bool)
        batch = replace(batch, loss_mask_N=data.loss_mask.astype(np.uint8))
        kept: list[OptimizerStep] = []
        for step in steps:
            own = [with_mask(batch, micro_batch) for micro_batch in step.micro_batches]
            kept.append(self._learner.reduced_step(batch, step.number, step.samples, own, none_B))
        weights_N = batch.spread(np.concatenate([step.reduction.token_weights for step in kept]))
        scale = self._mean_weight(batch, old_N) if normalizes_weights(self._algorithm) else 1.0
        device = self._replica.device
        columns = replace(
            columns,
            advantages_N=torch.tensor(data.advantages.astype(np.float32), device=device),
            weights_N=torch.tensor(weights_N, device=device),
            weight_scale=scale,
        )
        return batch, kept, columns

    def _mean_weight(self, batch: TrainBatch, old_log_probs_N: Floats32) -> float:
        """Average the importance weights over the trained tokens of the batch. Every rank has all old log-probs."""
        trains = batch.loss_mask_N != 0
        numbers = np.repeat(np.arange(len(batch.lengths_B)), batch.lengths_B)[trains]
        old_M = torch.from_numpy(old_log_probs_N[trains]).double()
        inputs = LossInputs(
            log_probs=old_M,
            old_log_probs=old_M,
            rollout_log_probs=torch.from_numpy(batch.rollout_log_probs_N[trains]).double(),
            advantages=torch.zeros_like(old_M),
            entropy=torch.zeros_like(old_M),
            sequences=Sequences(torch.from_numpy(numbers), len(batch.lengths_B)),
        )
        assert self._algorithm.tis is not None
        weights, metrics = weigh(self._algorithm, self._algorithm.tis)(inputs)
        if getattr(self._algorithm.tis, "mode", self._algorithm.tis.type) == "mask":
            weights = metrics["train/tis"]  # as in slime, rejected tokens count with their weight
        return mean_weight(inputs, weights, level=self._algorithm.tis.level)

    def _loss_terms(
        self,
        train_step: int,
        columns: _Columns,
        noted: MaskedTokens | None,
        step: OptimizerStep,
        micro_batch: MicroBatch,
        outputs: TokenOutputs,
    ) -> Terms:
        """Compute the loss of a micro-batch's tokens."""
        where_M = outputs.columns_M
        if step.number == 0 and not self._log_probs.needs_all_old:
            found_M = outputs.log_probs.detach()
            if columns.is_kept_N is not None:
                found_M = torch.where(columns.is_kept_N[where_M], columns.trainer_log_probs_N[where_M], found_M)
            columns.trainer_log_probs_N[where_M] = found_M
        numbers = micro_batch.numbers_M
        group = ranks.context_parallel_group() if self._replica.context.size > 1 else None
        trainer_M, rollout_M = columns.trainer_log_probs_N[where_M], columns.rollout_log_probs_N[where_M]
        rollouts = None
        if columns.rollouts_B is not None:
            rollouts = rollouts_in(micro_batch, columns.rollouts_B, numbers, where_M.device, group)
        inputs = LossInputs(
            log_probs=outputs.log_probs,
            old_log_probs=rollout_M if self._algorithm.use_rollout_logprobs else trainer_M,
            rollout_log_probs=rollout_M,
            ref_log_probs=None if columns.ref_log_probs_N is None else columns.ref_log_probs_N[where_M],
            rewards=columns.rewards_N[where_M],
            trainer_log_probs=trainer_M,
            teacher_log_probs=None if columns.teacher_log_probs_N is None else columns.teacher_log_probs_N[where_M],
            **self._topk(train_step, micro_batch, outputs),
            advantages=columns.advantages_N[where_M],
            entropy=outputs.entropy,
            sequences=Sequences(torch.from_numpy(numbers).to(where_M.device), micro_batch.num_sequences, group),
            rollouts=rollouts,
        )
        coef = self._entropy_coef(train_step)
        positive = 1.0
        if self._algorithm.positive_example_nll_weight:
            positive = step.shares_per_positive_token / columns.weights_N[where_M]  # the weights are never 0
        terms = self._objective(inputs, entropy_coef=coef, weight_scale=columns.weight_scale, positive_scale=positive)
        if noted is not None:
            is_known = step.number == 0 or self._measures_all
            noted.add(where_M, terms.metrics, trainer_M if is_known else None)
        return terms

    def begin_reference(self) -> None:
        """Let the reference be the weights that training starts from, once `trainer.load` is read."""
        if self._log_probs.reference is not None:
            self._log_probs.reference.begin()

    def _topk(self, train_step: int, micro_batch: MicroBatch, outputs: TokenOutputs) -> dict[str, Tensor]:
        """Return the log-probs of the teacher's likeliest tokens, by policy and teacher. Empty: no term reads them.

        Raises:
            ValueError: The samples came without them.
        """
        if topk_divergence(self._algorithm) is None:
            return {}
        if micro_batch.topk is None or outputs.topk is None:
            if len(micro_batch.columns_M):
                wanted = "algorithm.opd.distillation"
                raise ValueError(
                    f"step {train_step + 1}: samples have no top-k log-probs of a teacher, as {wanted} needs"
                )
            none = outputs.log_probs[:, None]
            return {"topk_log_probs": none, "teacher_topk_log_probs": none.detach()}
        teacher_MK = torch.from_numpy(micro_batch.topk.log_probs).to(outputs.topk.device)
        return {"topk_log_probs": outputs.topk, "teacher_topk_log_probs": teacher_MK}

    @property
    def _planned_steps(self) -> int:
        """Train steps planned up to the end of the run, plus the steps of an earlier run that it continues."""
        return self._replica.steps_before + self._topology.train.num_steps

    def _entropy_coef(self, train_step: int) -> float:
        done = self._replica.steps_before + train_step
        return entropy_coef(self._algorithm, done, num_steps=self._planned_steps)
