"""The critic written again from the formulae of one sample, on transformers and torch.optim.AdamW."""

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from actors.trainer.data.batch import TrainBatch
from actors.trainer.step.critic import Critic
from runtime.settings.topology import Topology


class ReferenceCritic:
    """A critic on transformers and torch.optim.AdamW. Shares no code with the trainer."""

    def __init__(self, model: Any, weight: torch.Tensor, topology: Topology) -> None:
        self._model, self._topology = model, topology
        self.weight = torch.nn.Parameter(weight.clone())
        self.bias = torch.nn.Parameter(torch.zeros(1))
        body = dict(model.model.named_parameters())
        decayed = [one for one in (*body.values(), self.weight) if one.ndim > 1]
        others = [one for one in (*body.values(), self.bias) if one.ndim <= 1]
        config, own = topology.optimizer, topology.critic
        weight_decay = config.weight_decay if own.weight_decay is None else own.weight_decay
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=own.lr or config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )

    def values(self, batch: TrainBatch, sample: int) -> torch.Tensor:
        """Values of a sample's tokens after the first, each computed one position before its token."""
        return self._all_values(batch, [sample])[0]

    def _all_values(self, batch: TrainBatch, samples: list[int]) -> list[torch.Tensor]:
        """Values of several samples: one pass, in which no token sees the padding behind a shorter sample."""
        ends = [(int(batch.starts_B[sample]), int(batch.lengths_B[sample])) for sample in samples]
        tokens = [torch.from_numpy(batch.tokens_N[begin : begin + length]).long() for begin, length in ends]
        hidden_BTH = self._model.model(pad_sequence(tokens, batch_first=True)).last_hidden_state
        values_BT = hidden_BTH @ self.weight[0] + self.bias
        return [values_T[: length - 1] for values_T, (_, length) in zip(values_BT, ends, strict=True)]

    def train_steps(self, batch: TrainBatch, values_N: Any, returns_N: Any) -> list[float]:
        """Take the optimizer steps of a batch, each on equally many rollouts in order; return their losses."""
        num_rollouts = int(batch.rollouts_B[-1]) + 1
        size = num_rollouts // self._topology.algorithm.num_steps_per_rollout
        return [
            self._step(batch, values_N, returns_N, range(first, first + size)) for first in range(0, num_rollouts, size)
        ]

    def _step(self, batch: TrainBatch, values_N: Any, returns_N: Any, rollouts: range) -> float:
        """One optimizer step on the samples of some rollouts."""
        clip, total = self._topology.algorithm.estimator.value_clip, torch.zeros(())
        members = np.isin(batch.rollouts_B, rollouts)
        num_tokens = batch.mask_sums_B[members].sum()
        samples = np.flatnonzero(members).tolist()
        for sample, values in zip(samples, self._all_values(batch, samples), strict=True):
            begin, length = int(batch.starts_B[sample]), int(batch.lengths_B[sample])
            own = slice(begin + 1, begin + length)
            mask = torch.from_numpy(batch.loss_mask_N[own]).float()
            old, goal = torch.from_numpy(values_N[own]).float(), torch.from_numpy(returns_N[own]).float()
            clipped = torch.minimum(torch.maximum(values, old - clip), old + clip)
            errors = torch.maximum((values - goal) ** 2, (clipped - goal) ** 2)
            siblings = batch.mask_sums_B[batch.rollouts_B == batch.rollouts_B[sample]].sum()
            per_token = self._topology.algorithm.reduction.type == "token-mean"
            total = total + (errors * mask).sum() / (num_tokens if per_token else max(siblings, 1) * len(rollouts))
        total = self._topology.algorithm.estimator.value_loss_coef * total
        self._adam.zero_grad()
        total.backward()
        parameters = [one for group in self._adam.param_groups for one in group["params"] if one.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self._adam.step()
        return float(total.detach())


def head_of(critic: Critic) -> torch.Tensor:
    return critic.replica.complete_chunks()[0].output_layer.weight.detach()
