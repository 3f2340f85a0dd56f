"""One train step: a batch of scored samples becomes a few optimizer steps and the metrics that say how it went."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from actors.trainer.algorithms.advantages import grpo_advantages
from actors.trainer.algorithms.kl import kl_divergence
from actors.trainer.algorithms.losses import policy_loss, sft_loss
from actors.trainer.algorithms.reduction import Reduction, reduction
from actors.trainer.algorithms.schedules import entropy_coef, learning_rate
from actors.trainer.batches.batch import Floats32, Ints, MicroBatch, TrainBatch
from actors.trainer.batches.further import num_further, with_further
from actors.trainer.batches.known import LogProbs
from actors.trainer.batches.plan import split_steps
from actors.trainer.megatron.rank_model import Replica, TokenOutputs
from actors.trainer.step.by_group import GroupLogProbs
from actors.trainer.step.laps import Laps
from actors.trainer.step.layout import laid_out, shared
from actors.trainer.step.metrics import (
    MTP_LOSS,
    SFT_SUMS,
    SUMS,
    difference_metrics,
    memory_metrics,
    reduced_sums,
    sampling_metrics,
    size_metrics,
    speed_metrics,
)
from actors.trainer.step.reference import ReferenceModel
from runtime.settings.placement import max_sample_tokens
from runtime.settings.recipe import computes_old_ahead, measures_all, replays_experts, trains_demonstrations
from runtime.settings.topology import Topology

log = structlog.get_logger()

NO_SAMPLES: Final[Ints] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _OptimizerStep:
    """One optimizer step of this replica."""

    number: int  # within the train step
    samples: Ints  # of the batch, on all replicas
    micro_batches: list[MicroBatch]
    reduction: Reduction  # over the step's samples on all replicas
    share_B: Ints  # the reduction's shares, by sample of the batch
    tokens_per_share: float  # turns the mean over tokens, which the replica takes, into the reduction's
    shares_per_further: float  # turns the reduction into the mean over tokens that a further layer predicts


@dataclass(frozen=True)
class _Columns:
    """Numbers per token of the batch, on the device: they are brought there once, and picked from there."""

    advantages_N: Tensor
    weights_N: Tensor  # of the token's loss in the sum of its optimizer step
    rollout_log_probs_N: Tensor
    trainer_log_probs_N: Tensor  # before the first optimizer step; filled as forward passes yield them
    ref_log_probs_N: Tensor | None


class Trained(NamedTuple):
    """What became of a batch."""

    metrics: dict[str, float]  # of the whole batch; complete on rank 0 and on the last pipeline stage
    skipped: Ints  # samples of the batch whose optimizer step was left out, the same on every rank


class TrainStep:
    """Trains batches on a replica. Its only state is the reference model's weights."""

    def __init__(self, topology: Topology, replica: Replica) -> None:
        """Take the reference weights, so it is made before a checkpoint is loaded.

        Raises:
            ValueError, OSError: the reference model cannot be used.
        """
        self._replica = replica
        self._topology = topology
        self._algorithm = topology.algorithm
        self._demonstrations = trains_demonstrations(topology)
        self._measures_all = measures_all(topology)
        self._replays_experts = not self._demonstrations and replays_experts(self._algorithm)
        self._has_further_layer = replica.hf.num_mtp_layers > 0
        self._sums = (SFT_SUMS if self._demonstrations else SUMS) + ((MTP_LOSS,) if self._has_further_layer else ())
        self._normalize = _normalizes_rewards(topology)
        ref_load = topology.model.ref_load
        self._reference = ReferenceModel(replica, ref_load) if self._algorithm.use_kl_loss else None
        self._max_tokens = max_sample_tokens(topology)
        self._by_group: GroupLogProbs | None = None
        if topology.trainer.log_probs_ahead:
            self._by_group = GroupLogProbs(
                replica, self._reference, max_tokens=self._max_tokens, policy=computes_old_ahead(topology)
            )

    def __call__(self, batch: TrainBatch) -> Trained:
        """Train one batch. A collective of all ranks, which pass the same batch.

        Raises:
            FloatingPointError: a gradient was not finite, and train.on_nonfinite or train.max_skipped say that this is
                the end. Nothing has moved by it.
        """
        laps, memory = Laps(), self._replica.memory
        steps = self._plan(batch)
        laps.lap("perf/plan_time")
        with memory.phase("prepare"):
            columns = self._prepare(batch, steps, laps)
        before = laps.total
        sums: list[Tensor] = []
        norms: list[float] = []
        with memory.phase("train"):
            for step in steps:
                sums.append(self._backward(batch, step, columns))
                laps.lap("perf/forward_backward_time")
                norms.append(self._optimizer_step(batch.step, step.number))
                laps.lap("perf/optimizer_time")
        metrics = speed_metrics(self._replica.hf, batch.lengths_B.tolist(), laps.total - before, self._replica.device)
        metrics |= memory_metrics(memory.take())
        metrics |= self._reduced(sums) | size_metrics(batch)
        if not self._demonstrations:
            measured = _micro_batches(steps if self._measures_all else steps[:1])
            metrics |= difference_metrics(batch, measured, columns.trainer_log_probs_N.cpu().numpy())
            metrics |= sampling_metrics(batch, columns.advantages_N.cpu().numpy())
            metrics["train/entropy_coef"] = self._entropy_coef(batch.step)
        skipped = [step.samples for step, norm in zip(steps, norms, strict=True) if not math.isfinite(norm)]
        metrics["train/num_skipped_steps"] = len(skipped)
        metrics["train/grad_norm"] = float(np.mean([norm for norm in norms if math.isfinite(norm)] or norms))
        metrics["train/lr-pg_0"] = self._learning_rate(batch.step, steps[-1].number)
        laps.lap("perf/metrics_time")
        metrics |= laps.metrics() | {"perf/actor_train_time": laps.total - before, "perf/train_time": laps.total}
        return Trained(metrics, np.concatenate([NO_SAMPLES, *skipped]))

    def ahead(self, batch: TrainBatch) -> LogProbs:
        """Log-probs of groups that no batch has yet, as a step will want them. A collective of all ranks."""
        assert self._by_group is not None
        with self._replica.memory.phase("prepare"):
            return self._by_group.ahead(batch)

    def _plan(self, batch: TrainBatch) -> list[_OptimizerStep]:
        replica = self._replica
        steps: list[_OptimizerStep] = []
        for number, samples in enumerate(split_steps(batch, self._algorithm.num_steps_per_rollout)):
            shares = shared(replica, batch, samples, max_tokens=self._max_tokens)
            missing = replica.num_micro_batches(len(shares[0])) - len(shares[0])
            shares = [[*members, *([NO_SAMPLES] * missing)] for members in shares]
            own = [self._with_more(batch, micro_batch) for micro_batch in laid_out(replica, batch, shares)]
            reduced = reduction(
                batch.mask_sums_B[samples],
                batch.rollouts_B[samples],
                per_token=self._algorithm.calculate_per_token_loss,
            )
            share_B = np.zeros(len(batch.lengths_B), dtype=np.int64)
            share_B[samples] = reduced.shares
            tokens = int(np.maximum(batch.lengths_B[samples] - 1, 0).sum())  # that are read
            total = max(int(reduced.shares.sum()), 1)
            per_further = total / max(num_further(batch, samples), 1) if self._has_further_layer else 0.0
            steps.append(_OptimizerStep(number, samples, own, reduced, share_B, tokens / total, per_further))
        return steps

    def _with_more(self, batch: TrainBatch, micro_batch: MicroBatch) -> MicroBatch:
        """With what routers and a further layer take."""
        micro_batch = self._with_experts(batch, micro_batch)
        return with_further(batch, micro_batch) if self._has_further_layer else micro_batch

    def _with_experts(self, batch: TrainBatch, micro_batch: MicroBatch) -> MicroBatch:
        """With those that the engine had, where they are asked for.

        Raises:
            ValueError: they are not there, or of another model.
        """
        if not self._algorithm.use_rollout_routing_replay:
            return micro_batch
        model, routed = self._replica.hf, batch.routed_experts_N
        expected = model.num_hidden_layers * (model.experts.num_experts_per_tok if model.experts is not None else 0)
        if routed is None or routed.shape[1] != expected:
            told = "none" if routed is None else routed.shape[1]
            raise ValueError(
                f"step {batch.step}: algorithm.use_rollout_routing_replay wants {expected} routed experts "
                f"of each token, those of all layers, and samples tell {told}"
            )
        known = np.where((micro_batch.sources < 0)[..., None], -1, routed[micro_batch.sources])
        return replace(micro_batch, routed_experts=known)

    def _prepare(self, batch: TrainBatch, steps: list[_OptimizerStep], laps: Laps) -> _Columns:
        """Compute what the loss needs besides the policy's own forward pass."""
        advantages = grpo_advantages(
            batch.rewards_B,
            batch.groups_B,
            batch.rollouts_B,
            normalize=self._normalize,
            normalize_std=not self._algorithm.disable_grpo_std_normalization,
        )
        laps.lap("perf/plan_time")
        trainer_log_probs_N = self._old_log_probs(batch, steps[1:])
        laps.lap("perf/log_probs_time")
        ref_log_probs_N = None
        if self._reference is not None:
            by_group = self._by_group
            ref_log_probs_N = (
                self._reference.log_probs(batch, _micro_batches(steps))
                if by_group is None
                else by_group.reference(batch)
            )
            laps.lap("perf/ref_log_probs_time")
        weights_B = np.concatenate([step.reduction.token_weights for step in steps])
        device = self._replica.device
        advantages_N, weights_N, rollout_N, trainer_N = (
            torch.tensor(values_N, device=device)
            for values_N in (
                batch.spread(advantages),
                batch.spread(weights_B),
                batch.rollout_log_probs_N,
                trainer_log_probs_N,
            )
        )
        ref_N = None if ref_log_probs_N is None else torch.tensor(ref_log_probs_N, device=device)
        laps.lap("perf/plan_time")
        return _Columns(advantages_N, weights_N, rollout_N, trainer_N, ref_N)

    def _old_log_probs(self, batch: TrainBatch, later: Sequence[_OptimizerStep]) -> Floats32:
        """The trainer's, of what later optimizer steps train; the first one's own pass yields them for nothing."""
        column_N = np.zeros_like(batch.rollout_log_probs_N)
        if not later or not (self._measures_all or self._replays_experts):
            return column_N
        if self._by_group is not None and not self._replays_experts:
            samples = np.concatenate([step.samples for step in later])
            return self._by_group.policy(batch, batch.groups_B[samples])
        self._replica.fill_log_probs(_micro_batches(later), column_N, is_policy=True)
        return column_N

    def _backward(self, batch: TrainBatch, step: _OptimizerStep, columns: _Columns) -> Tensor:
        """Set the gradients; return this replica's metric sums and share of the denominator behind them."""
        sums = torch.zeros(len(self._sums) + 1, dtype=torch.float64, device=self._replica.device)

        def loss(micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
            where_M = torch.from_numpy(micro_batch.columns_M).to(self._replica.device)
            if step.number == 0:
                columns.trainer_log_probs_N[where_M] = outputs.log_probs.detach()
            total, terms = self._loss_terms(batch.step, columns, where_M, outputs)
            if outputs.further is not None:
                further = -outputs.further.sum() * step.shares_per_further
                total = total + self._topology.trainer.megatron.mtp_loss_scaling_factor * further
                terms = torch.cat([terms, further.detach()[None]])
            sums[:-1] += terms
            if self._replica.context.rank == 0:  # context-parallel ranks have parts of the same samples
                sums[-1] += int(step.share_B[micro_batch.samples].sum())
            return total * step.tokens_per_share

        self._replica.backward(step.micro_batches, loss)
        return sums.cpu()

    def _loss_terms(
        self, train_step: int, columns: _Columns, where_M: Tensor, outputs: TokenOutputs
    ) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, and its metric sums, the loss first, which have no gradient."""
        weights = columns.weights_N[where_M]
        if self._demonstrations:
            loss = sft_loss(outputs.log_probs)
            return loss @ weights, torch.stack([loss, loss, outputs.entropy]).detach() @ weights
        of_rollout = self._algorithm.use_rollout_logprobs
        old = columns.rollout_log_probs_N if of_rollout else columns.trainer_log_probs_N
        policy = policy_loss(
            outputs.log_probs,
            old[where_M],
            columns.advantages_N[where_M],
            eps_clip=self._algorithm.eps_clip,
            eps_clip_high=self._algorithm.eps_clip_high,
            eps_clip_c=self._algorithm.eps_clip_c,
            max_log_ratio=self._algorithm.max_log_ratio,
        )
        coef = self._entropy_coef(train_step)
        total = (
            policy.loss - coef * outputs.entropy if coef else policy.loss
        )  # at 0 the head computes no gradient of it
        divergence = torch.zeros_like(policy.loss)
        if columns.ref_log_probs_N is not None:
            divergence = kl_divergence(
                outputs.log_probs,
                columns.ref_log_probs_N[where_M],
                self._algorithm.kl_loss_type,
                max_log_ratio=self._algorithm.max_log_ratio,
            )
            total = total + self._algorithm.kl_loss_coef * divergence
        terms = torch.stack([total, policy.loss, outputs.entropy, policy.clipped, policy.ppo_kl, divergence])
        return total @ weights, terms.detach() @ weights

    def _optimizer_step(self, train_step: int, number: int) -> float:
        """The gradient's norm; one that is not finite has moved nothing."""
        norm = self._replica.optimizer_step(
            learning_rate=self._learning_rate(train_step, number), weight_decay=self._topology.optimizer.weight_decay
        )
        if math.isfinite(norm):
            return norm
        train, in_a_row = self._topology.train, self._replica.skipped_in_a_row
        where = f"optimizer step {number} of train step {train_step}: the gradient norm is {norm}"
        if train.on_nonfinite == "fail":
            raise FloatingPointError(f'{where}; train.on_nonfinite = "skip" would leave the step out')
        if in_a_row > train.max_skipped:
            raise FloatingPointError(
                f"{where}, {in_a_row} in a row; train.max_skipped = {train.max_skipped} are allowed"
            )
        log.warning("optimizer_step_skipped", step=train_step, number=number, grad_norm=norm, in_a_row=in_a_row)
        return norm

    def _learning_rate(self, train_step: int, number: int) -> float:
        per_batch = self._algorithm.num_steps_per_rollout
        done = (self._replica.steps_before + train_step) * per_batch + number
        return learning_rate(self._topology.optimizer, done, num_steps=self._planned_steps * per_batch)

    @property
    def _planned_steps(self) -> int:
        """Train steps at the run's end, with those of the run that it began from."""
        return self._replica.steps_before + self._topology.train.num_steps

    def _entropy_coef(self, train_step: int) -> float:
        done = self._replica.steps_before + train_step
        return entropy_coef(self._algorithm, done, num_steps=self._planned_steps)

    def _reduced(self, sums: Sequence[Tensor]) -> dict[str, float]:
        metrics = reduced_sums(self._sums, sums)
        if not self._algorithm.use_kl_loss:
            metrics.pop("train/kl_loss", None)
        return metrics


def _micro_batches(steps: Sequence[_OptimizerStep]) -> list[MicroBatch]:
    return [micro_batch for step in steps for micro_batch in step.micro_batches]


def _normalizes_rewards(topology: Topology) -> bool:
    """Whether rewards are centred within their group: not as configured, and never in groups of one."""
    if topology.algorithm.disable_rewards_normalization or trains_demonstrations(topology):
        return False
    if topology.rollout.n_samples_per_prompt == 1:
        log.warning("rewards_not_normalized", reason="rollout.n_samples_per_prompt = 1: every advantage would be 0")
        return False
    return True
