"""One train step of a reward model: its loss on a batch of preference pairs, and their rewards without training.

The reward of a response is the value at its last token. A value is computed at the position before its token, so each
sample gets one token more, which is not an input: the only one that trains.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from actors.trainer.algorithms.loss_inputs import Sequences, Terms
from actors.trainer.algorithms.preference import rm_loss
from actors.trainer.data.batch import Ints, MicroBatch, TrainBatch
from actors.trainer.data.held_out import PairSums
from actors.trainer.data.plan import split_steps
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica, TokenValues
from actors.trainer.plugins.dry_run import try_plugins
from actors.trainer.step.layout import NO_SAMPLES, laid_out, shared_equally
from actors.trainer.step.learner import Learner, OptimizerStep
from actors.trainer.step.metrics import StepTimer, memory_metrics, size_metrics, speed_metrics
from actors.trainer.step.pairs import rollouts_in, signs_of, sums_over_pairs
from actors.trainer.step.train_step import Trained
from runtime.settings.placement import max_sample_tokens
from runtime.settings.topology import Topology


def at_last_tokens(batch: TrainBatch) -> TrainBatch:
    """Append a token to each sample, and train it alone. Samples without trained tokens still train none."""
    ends_B = batch.starts_B + batch.lengths_B
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name.endswith("_N")}
    longer: dict[str, Any] = {
        name: np.insert(values_N, ends_B, 0) for name, values_N in columns.items() if values_N is not None
    }
    trains_B = batch.mask_sums_B > 0
    longer["loss_mask_N"] = np.insert(np.zeros(len(batch.tokens_N), dtype=np.uint8), ends_B, trains_B)
    return replace(batch, lengths_B=batch.lengths_B + 1, **longer)


class RewardModelStep:
    """Trains a reward model on batches of preference pairs. Has no state of its own."""

    def __init__(self, topology: Topology, replica: Replica) -> None:
        """Set up for one replica, whose model has a value head.

        Raises:
            InputError: A function of the user cannot be used.
        """
        self._replica = replica
        try_plugins(topology, replica.device)
        self._num_steps = topology.algorithm.num_steps_per_rollout
        self._loss = partial(rm_loss, **msgspec.structs.asdict(topology.algorithm.loss))
        none, nobody = torch.empty(0), Sequences(torch.empty(0, dtype=torch.int64), 1)
        self._learner = Learner(topology, replica, tuple(_reported(self._loss(none, none, nobody)).metrics))
        self._max_tokens = max_sample_tokens(topology)

    def __call__(self, batch: TrainBatch) -> Trained:
        """Train one batch. A collective of all ranks, which pass the same batch.

        Raises:
            InputError: As for a policy's train step.
        """
        timer, memory, learner = StepTimer(), self._replica.memory, self._learner
        read = at_last_tokens(batch)
        steps = self._plan(read)
        weights_N = torch.from_numpy(read.spread(np.concatenate([step.reduction.token_weights for step in steps])))
        timer.lap("perf/plan_time")
        before = timer.total
        with memory.phase("train"):
            loss = partial(self._loss_terms, read)
            done = learner.train(read, steps, loss, weights_N.to(self._replica.device), timer)
        taken = [one for one in done if one.is_taken]
        metrics = speed_metrics(self._replica.hf, batch.lengths_B.tolist(), timer.total - before, self._replica.device)
        metrics |= memory_metrics(memory.take()) | learner.metrics(done) | size_metrics(batch)
        metrics["train/num_skipped_steps"] = len(done) - len(taken)
        metrics["train/grad_norm"] = float(np.mean([one.norm for one in taken or done]))
        metrics["train/lr-pg_0"] = learner.learning_rate(batch.step, done[-1].step.number)
        timer.lap("perf/metrics_time")
        metrics |= timer.metrics() | {"perf/actor_train_time": timer.total - before, "perf/train_time": timer.total}
        skipped = np.concatenate([NO_SAMPLES, *(one.step.samples for one in done if not one.is_taken)])
        masked_B = np.logical_or.reduce([one.masked_B for one in done])
        return Trained(metrics, skipped, np.flatnonzero(masked_B))

    def rewards(self, batch: TrainBatch) -> torch.Tensor:
        """Compute the rewards of all samples, [B], float64, on every rank. A collective of all ranks."""
        read = at_last_tokens(replace(batch, loss_mask_N=np.ones_like(batch.loss_mask_N)))
        (shares,) = self._shares(read, [np.arange(len(batch.lengths_B))])
        column_N = np.zeros(len(read.tokens_N), dtype=np.float32)
        self._replica.fill_values(laid_out(self._replica, read, shares), column_N)
        whole_N = ranks.sum_over_replicas(torch.from_numpy(column_N))
        return whole_N[torch.from_numpy(read.starts_B + read.lengths_B - 1)].double()

    def evaluate(self, batch: TrainBatch) -> PairSums:
        """Sum the metrics of preference pairs under the current weights. A collective of all ranks."""
        pairs = Sequences(torch.tensor(batch.rollouts_B), int(batch.rollouts_B[-1]) + 1)
        signs = torch.from_numpy(signs_of(batch.rewards_B))
        return sums_over_pairs(_reported(self._loss(self.rewards(batch), signs, pairs)), batch.rollouts_B)

    def _plan(self, batch: TrainBatch) -> list[OptimizerStep]:
        replica, none_B = self._replica, np.zeros(len(batch.lengths_B), dtype=bool)
        parts = split_steps(batch, self._num_steps)
        return [
            self._learner.reduced_step(batch, number, samples, laid_out(replica, batch, shares), none_B)
            for number, (samples, shares) in enumerate(zip(parts, self._shares(batch, parts), strict=True))
        ]

    def _shares(self, batch: TrainBatch, parts: Sequence[Ints]) -> list[list[list[Ints]]]:
        equal = partial(shared_equally, self._replica, batch, max_tokens=self._max_tokens, whole_rollouts=True)
        return [equal(samples) for samples in parts]

    def _loss_terms(
        self, batch: TrainBatch, _step: OptimizerStep, micro_batch: MicroBatch, outputs: TokenValues
    ) -> Terms:
        """Compute the loss of a micro-batch's responses."""
        device = outputs.values.device
        numbers = micro_batch.numbers_M
        group = ranks.context_parallel_group() if self._replica.context.size > 1 else None
        pairs = rollouts_in(micro_batch, batch.rollouts_B, numbers, device, group)
        signs = torch.from_numpy(signs_of(batch.rewards_B[micro_batch.samples])[numbers]).to(outputs.values)
        return _reported(self._loss(outputs.values, signs, pairs))


def _reported(terms: Terms) -> Terms:
    """Put the loss first, and detach all metrics."""
    metrics = {"train/loss": terms.loss, "train/preference_loss": terms.loss, **terms.metrics}
    return Terms(terms.loss, {name: values.detach() for name, values in metrics.items()})
