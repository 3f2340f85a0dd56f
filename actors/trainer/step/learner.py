"""Optimizer steps of one model: gradients, masking of samples whose loss is not finite, and skipped steps.

A sample with a token whose loss is not finite is masked (data/skipped.py): the gradients of its optimizer step are
recomputed without it. Each rank sees only part of the losses, so all ranks agree on the masked samples first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from actors.trainer.algorithms.loss_inputs import Terms
from actors.trainer.algorithms.reductions import Reduction, ReductionInputs
from actors.trainer.algorithms.schedules import learning_rate
from actors.trainer.data.batch import Ints, MicroBatch, TrainBatch, num_mtp_tokens
from actors.trainer.data.skipped import Flags, names_of, samples_with, with_masked, without
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica, TokenOutputs
from actors.trainer.plugins.functions import hook
from actors.trainer.step.metrics import MTP_LOSS, StepSums, StepTimer, reduced_sums
from actors.trainer.step.objective import reducer
from actors.trainer.step.skips import too_many
from runtime.functions.table import STEP_HOOK
from runtime.process.actor import InputError
from runtime.settings.topology import Topology

log = structlog.get_logger()

MAX_NAMED: Final = 4  # masked samples in a message
LARGEST_LOSS: Final = 1e15  # of a token; much more overflows float32 when the gradient norm squares it


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of this replica."""

    number: int  # within the train step
    samples: Ints  # samples of the batch, on all replicas
    micro_batches: list[MicroBatch]
    num_tokens: int  # input tokens on all replicas
    reduction: Reduction  # over the step's samples on all replicas
    num_mtp_tokens: int  # tokens that the MTP layer predicts
    num_positive: int  # trained tokens of samples with a reward above 0, on all replicas
    idle_B: Flags  # samples of the batch without passes; they count in the reduction
    num_idle_shares: int  # shares of those of them with trained tokens, in `num_shares`

    @property
    def num_shares(self) -> int:
        """Denominator of the optimizer step's loss: the sum of all shares, at least 1."""
        return max(int(self.reduction.shares.sum()), 1)

    @property
    def num_measured_shares(self) -> int:
        """Denominator of metrics of log-probs: without idle samples, whose log-probs are not known."""
        return max(self.num_shares - self.num_idle_shares, 1)

    @property
    def has_passes(self) -> bool:
        """Whether a sample of the step has a forward and a backward pass."""
        return not self.idle_B[self.samples].all()

    @property
    def tokens_per_share(self) -> float:
        """Factor that turns the replica's mean over tokens into the loss of the chosen reduction."""
        return self.num_tokens / self.num_shares

    @property
    def shares_per_mtp_token(self) -> float:
        """Factor that turns a loss of the chosen reduction into the mean over tokens that the MTP layer predicts."""
        return self.num_shares / max(self.num_mtp_tokens, 1)

    @property
    def shares_per_positive_token(self) -> float:
        """Factor that turns a sum of the chosen reduction into the mean over tokens of samples with a good reward."""
        return self.num_shares / max(self.num_positive, 1)


class Done(NamedTuple):
    """A completed or skipped optimizer step."""

    step: OptimizerStep  # without the masked samples
    sums: Tensor  # metric sums on this replica
    masked_B: Flags
    norm: float
    is_taken: bool


class _Gradients(NamedTuple):
    """Result of the forward and backward passes of an optimizer step. The gradients are set on the replica."""

    step: OptimizerStep  # as in `Done`, like the next two
    sums: Tensor
    masked_B: Flags
    error: str  # why the gradients cannot be used; empty if they can


StepLoss = Callable[[OptimizerStep, MicroBatch, Any], Terms]  # of the trained tokens, from the model's outputs


class Learner:
    """Trains one model: the policy, or the critic."""

    def __init__(
        self,
        topology: Topology,
        replica: Replica,
        metrics: Sequence[str],
        *,
        prefix: str = "",
    ) -> None:
        """Set up for one replica, without computing anything.

        Args:
            topology: Its optimizer table is the model's.
            replica: The model on this rank.
            metrics: Names of the loss's metrics, in the order of the sums.
            prefix: Names the model in messages, such as "critic ". Empty: the policy.
        """
        self._topology = topology
        self._replica = replica
        self._metrics = tuple(metrics)
        self._reduce = reducer(topology)
        self._before_step = hook(topology, STEP_HOOK, lambda: replica.before_change())
        self._has_mtp_layer = replica.hf.num_mtp_layers > 0
        self._sums = self._metrics + ((MTP_LOSS,) if self._has_mtp_layer else ())
        self._prefix = prefix

    def reduced_step(
        self,
        batch: TrainBatch,
        number: int,
        samples: Ints,
        micro_batches: list[MicroBatch],
        masked_B: Flags,
        idle_B: Flags | None = None,
    ) -> OptimizerStep:
        """Describe one optimizer step.

        Args:
            batch: The whole batch; the masked samples train no token.
            number: Number of the optimizer step within the train step.
            samples: Samples of the step on all replicas.
            micro_batches: Micro-batches of this replica.
            masked_B: Samples whose tokens are not inputs either.
            idle_B: Samples that are in no micro-batch. None: all are in one.
        """
        idle_B = np.zeros_like(masked_B) if idle_B is None else idle_B
        read = samples[~(masked_B | idle_B)[samples]]
        reduced = self._reduce(
            ReductionInputs(batch.mask_sums_B[samples], batch.rollouts_B[samples], batch.groups_B[samples])
        )
        trained_B = np.bincount(batch.rollouts_B, weights=batch.mask_sums_B)[batch.rollouts_B] > 0
        idle_shares = int(reduced.shares[(idle_B & trained_B)[samples]].sum())
        num_tokens = int(np.maximum(batch.lengths_B[read] - 1, 0).sum())
        mtp = num_mtp_tokens(batch, samples) if self._has_mtp_layer else 0
        positive = int(batch.mask_sums_B[samples[batch.rewards_B[samples] > 0]].sum())
        return OptimizerStep(number, samples, micro_batches, num_tokens, reduced, mtp, positive, idle_B, idle_shares)

    def train(
        self, batch: TrainBatch, steps: Sequence[OptimizerStep], loss: StepLoss, weights_N: Tensor, timer: StepTimer
    ) -> list[Done]:
        """Take the optimizer steps of a batch. A collective of all ranks.

        Args:
            batch: The whole batch.
            steps: Its optimizer steps.
            loss: Computes the loss and the metrics of the trained tokens, in the order of `metrics`.
            weights_N: Weight of each token's loss in the reduction of its optimizer step; those of masked samples
                change.
            timer: Gets the laps.

        Raises:
            InputError: A loss or a gradient was not finite, and train.on_nonfinite, train.max_skipped or
                train.max_skipped_share ends the run.
        """
        if self._topology.algorithm.reset_optimizer_states:
            self._replica.reset_optimizer()
        done: list[Done] = []
        for step in steps:
            if not self._prefix:
                self._before_step(batch.step, step.number, self._replica.chunks, self._replica.optimizer)
            gradients = self._gradients(batch, step, loss, weights_N)
            timer.lap("perf/forward_backward_time")
            done.append(self._optimizer_step(batch.step, gradients))
            timer.lap("perf/optimizer_time")
        return done

    def metrics(self, done: Sequence[Done]) -> dict[str, float]:
        """Average the loss's metrics over the optimizer steps that were taken. NaN if there are none.

        A sample without passes counts in the loss, where its term is 0. It counts in no other metric; without any
        samples those are left out.
        """
        sums = [
            StepSums(one.sums, one.step.num_shares, one.step.num_measured_shares, one.step.has_passes)
            for one in done
            if one.is_taken
        ]
        return reduced_sums(self._sums, sums) if sums else dict.fromkeys(self._sums, math.nan)

    def learning_rate(self, train_step: int, number: int) -> float:
        """Return the learning rate of an optimizer step. Train steps that did not train the model do not count."""
        per_batch, replica = self._topology.algorithm.num_steps_per_rollout, self._replica
        before = replica.steps_before - replica.untrained_before - replica.first_step
        trained = before + train_step
        planned = before + self._topology.train.num_steps
        return learning_rate(self._topology.optimizer, trained * per_batch + number, num_steps=planned * per_batch)

    def _gradients(self, batch: TrainBatch, step: OptimizerStep, loss: StepLoss, weights_N: Tensor) -> _Gradients:
        """Set the gradients of an optimizer step. Samples with a non-finite loss are masked, and it is recomputed.

        Raises:
            InputError: A loss is not finite, and train.on_nonfinite = "fail".
        """
        sums, masked_B = self._backward(batch, step, loss, weights_N)
        if not masked_B.any():
            return _Gradients(step, sums, masked_B, "")
        self._report_masked(batch, step, np.flatnonzero(masked_B))
        kept = with_masked(batch, masked_B)
        micro_batches = [without(batch, micro_batch, masked_B) for micro_batch in step.micro_batches]
        step = self.reduced_step(kept, step.number, step.samples, micro_batches, masked_B, step.idle_B)
        lengths = batch.lengths_B[step.samples]
        begin = int(batch.starts_B[step.samples[0]])
        weights = np.repeat(step.reduction.token_weights.astype(np.float32), lengths)
        weights_N[begin : begin + len(weights)] = torch.from_numpy(weights).to(self._replica.device)
        self._replica.restore_biases()
        sums, again_B = self._backward(kept, step, loss, weights_N)
        is_usable = kept.mask_sums_B[step.samples].any() and not again_B.any()
        return _Gradients(step, sums, masked_B, "" if is_usable else "no sample has a finite loss")

    def _report_masked(self, batch: TrainBatch, step: OptimizerStep, masked: Ints) -> None:
        names = names_of(batch, masked[:MAX_NAMED])
        if self._topology.train.on_nonfinite == "fail":
            more = f" and {len(masked) - MAX_NAMED} more" if len(masked) > MAX_NAMED else ""
            where = f"{self._prefix}optimizer step {step.number + 1} of train step {batch.step + 1}"
            raise InputError(
                f"{where}: the loss is not finite, or "
                f"beyond {LARGEST_LOSS:g}, of {'; '.join(names)}{more}; "
                'set train.on_nonfinite = "skip" to train without these samples'
            )
        log.warning(
            f"{self._prefix}samples_masked".replace(" ", "_"),
            step=batch.step,
            number=step.number,
            num_samples=len(masked),
            samples=names,
        )

    def _backward(
        self, batch: TrainBatch, step: OptimizerStep, loss: StepLoss, weights_N: Tensor
    ) -> tuple[Tensor, Flags]:
        """Set the gradients.

        Returns:
            This replica's metric sums. Then the samples with a token whose loss is not finite, the same on every rank.
        """
        device = self._replica.device
        sums = torch.zeros(len(self._sums), dtype=torch.float64, device=device)
        bad_N = torch.zeros(len(batch.tokens_N), dtype=torch.bool, device=device)

        def summed(micro_batch: MicroBatch, outputs: Any) -> Tensor:
            where_M = outputs.columns_M
            loss_M, metrics = loss(step, micro_batch, outputs)
            terms_KM = torch.stack([metrics[name] for name in self._metrics])
            bad_N[where_M] = ~(terms_KM.abs() < LARGEST_LOSS).all(dim=0)  # a comparison with NaN is false
            weights_M = weights_N[where_M]
            total, terms = loss_M @ weights_M, terms_KM @ weights_M
            if isinstance(outputs, TokenOutputs) and outputs.mtp is not None:
                assert micro_batch.mtp is not None
                read_F = torch.from_numpy(micro_batch.sources.ravel()[micro_batch.mtp.rows_F]).to(device)
                bad_N[read_F] |= ~(outputs.mtp.detach().abs() < LARGEST_LOSS)
                mtp = -outputs.mtp.sum() * step.shares_per_mtp_token
                total = total + self._topology.trainer.megatron.mtp_loss_scaling_factor * mtp
                terms = torch.cat([terms, mtp.detach()[None]])
            sums.add_(terms)
            return total * step.tokens_per_share

        self._replica.backward(step.micro_batches, summed)
        bad_B = torch.from_numpy(samples_with(batch, bad_N.cpu().numpy()))
        return sums.cpu(), ranks.on_any_rank(bad_B).numpy()

    def _optimizer_step(self, train_step: int, gradients: _Gradients) -> Done:
        """Update the weights, or skip the step if the gradients cannot be used.

        Raises:
            InputError: The gradients cannot be used, and the settings or the limits end the run.
        """
        replica, train, number = self._replica, self._topology.train, gradients.step.number
        error, norm = gradients.error, math.nan
        if error:
            replica.restore_biases()
        else:
            rate = self.learning_rate(train_step, number)
            norm = replica.optimizer_step(learning_rate=rate, weight_decay=self._topology.optimizer.weight_decay)
            error = "" if math.isfinite(norm) else f"the gradient norm is {norm}"
        done = Done(gradients.step, gradients.sums, gradients.masked_B, norm, is_taken=not error)
        replica.skips = replica.skips.then(skipped=bool(error), window=train.skip_window)
        if not error:
            return done
        where = f"{self._prefix}optimizer step {number + 1} of train step {train_step + 1}: {error}"
        if train.on_nonfinite == "fail":
            raise InputError(f'{where}; set train.on_nonfinite = "skip" to skip the step')
        if limit := too_many(replica.skips, train):
            raise InputError(f"{where}; {self._prefix}optimizer steps were skipped {limit}")
        event = f"{self._prefix}optimizer_step_skipped".replace(" ", "_")
        log.warning(event, step=train_step, number=number, reason=error, **asdict(replica.skips))
        return done
