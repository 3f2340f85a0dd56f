"""Which tokens each rule masks or limits in one batch: of the batch itself, and of the terms of the loss."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.trainer.algorithms.advantage_inputs import Flags
from actors.trainer.data.batch import Floats32, LeftOut, TrainBatch
from actors.trainer.data.staleness import NOT_SAMPLED
from actors.trainer.megatron import groups as ranks
from runtime.data.trained_tokens import TrainedTokens

RULES: Final[Mapping[str, str]] = {  # metric that is not 0 where the rule applies to a token
    "train/pg_clipfrac": "clip",
    "train/pg_clipfrac_lower": "dual_clip",
    "train/is_masked": "probability",
    "train/opsm_clipfrac": "opsm",
    "train/tis_clipfrac": "weight_bounds",
    "train/mis_rs_mask_fraction_low": "rejected_low",
    "train/mis_rs_mask_fraction_high": "rejected_high",
    "train/mis_rs_catastrophic_seq_fraction": "veto",
    "train/behave_mask": "weight_cap",
    "train/ratio_clampfrac": "log_ratio",
    "train/kl_clampfrac": "divergence",
}
KEPT: Final = ("train/behave_mask",)  # metrics that are 0 where the rule applies
TOKEN_RULES: Final = ("loss_mask", "stale", "not_finite", "zero_advantage", *RULES.values())
LEFT_OUT: Final = ("too_long", "invalid")  # samples, by `LeftOut` from 1 on


class MaskedTokens:
    """Keeps tokens by rule, and their log-probs. A token counts once per rule, even if its step is computed again."""

    def __init__(self, metrics: tuple[str, ...], num_tokens: int, device: torch.device) -> None:
        """Count nothing yet.

        Args:
            metrics: Names of the loss's metrics.
            num_tokens: Tokens of the batch.
            device: Device of the metrics.
        """
        self._flags = {
            name: torch.zeros(num_tokens, dtype=torch.bool, device=device) for name in RULES if name in metrics
        }
        self._log_probs_N = torch.zeros(num_tokens, dtype=torch.float32, device=device)
        self._is_known_N = torch.zeros(num_tokens, dtype=torch.bool, device=device)

    def add(self, where_M: Tensor, metrics: Mapping[str, Tensor], log_probs_M: Tensor | None) -> None:
        """Record the tokens at these positions of the batch's columns.

        Args:
            where_M: Positions.
            metrics: Metrics of the loss.
            log_probs_M: Log-probs under the weights before the train step. None: not computed.
        """
        if log_probs_M is not None:
            self._log_probs_N[where_M], self._is_known_N[where_M] = log_probs_M.float(), True
        for name, flags_N in self._flags.items():
            flags_N[where_M] = metrics[name] == 0 if name in KEPT else metrics[name] != 0

    def counts(
        self, batch: TrainBatch, trained: TrainBatch, advantages_N: Floats32, responses_N: Flags
    ) -> dict[str, float]:
        """Count the tokens of each rule as metrics. A collective of all replicas.

        Args:
            batch: The whole batch.
            trained: The same without the samples whose loss was not finite.
            advantages_N: Advantages.
            responses_N: True from a sample's first sampled token to its end.
        """
        of_loss = self._of_loss(trained)
        own = [float(flags_N.sum()) for flags_N in of_loss.values()]
        sums = ranks.sum_over_replicas(torch.tensor(own, dtype=torch.float64)).tolist()
        of_batch = _of_batch(batch, trained, advantages_N, responses_N)
        found: dict[str, int] = {
            **{rule: int(flags_N.sum()) for rule, flags_N in of_batch.items()},
            "too_long_samples": int((batch.left_out_B == LeftOut.TOO_LONG).sum()),
            "invalid_samples": int((batch.left_out_B == LeftOut.INVALID).sum()),
            **{rule: int(count) for rule, count in zip(of_loss, sums, strict=True)},
        }
        counts = {f"train/masked_tokens/{rule}": float(count) for rule, count in found.items()}
        return {"train/num_response_tokens": float(np.count_nonzero(responses_N)), **counts}

    def tokens(
        self, batch: TrainBatch, trained: TrainBatch, advantages_N: Floats32, responses_N: Flags
    ) -> TrainedTokens:
        """Return the rules of each token, and its log-prob. A collective of all replicas. Arguments as of `counts`."""
        own_N = _bits(self._of_loss(trained), len(batch.tokens_N))
        rules_N = ranks.sum_over_replicas(torch.from_numpy(own_N)).numpy()  # a token is in one replica
        rules_N |= _bits(_of_batch(batch, trained, advantages_N, responses_N), len(batch.tokens_N))
        log_probs_N, is_known_N = (
            ranks.sum_over_replicas(column_N.cpu().double()).numpy()
            for column_N in (self._log_probs_N, self._is_known_N)
        )
        return TrainedTokens(
            group_id=batch.groups_B,
            index=batch.indices_B,
            part=batch.parts_B,
            left_out=batch.left_out_B,
            lengths=batch.lengths_B,
            trainer_log_probs=np.where(is_known_N > 0, log_probs_N, np.nan).astype(np.float32),
            rules=rules_N.astype(np.uint32),
            staleness=batch.staleness_N,
            rule_names=TOKEN_RULES,
            reasons=LEFT_OUT,
        )

    def _of_loss(self, trained: TrainBatch) -> dict[str, Flags]:
        """Return the tokens of this replica that each rule of the loss masks or limits."""
        trains_N = trained.loss_mask_N != 0
        return {RULES[name]: flags_N.cpu().numpy() & trains_N for name, flags_N in self._flags.items()}


def _of_batch(batch: TrainBatch, trained: TrainBatch, advantages_N: Floats32, responses_N: Flags) -> dict[str, Flags]:
    """Return the tokens that each rule of the batch itself masks."""
    trains_N = trained.loss_mask_N != 0
    sampled_N = batch.staleness_N != NOT_SAMPLED
    return {
        "loss_mask": responses_N & ~sampled_N,
        "stale": sampled_N & (batch.loss_mask_N == 0),
        "not_finite": (batch.loss_mask_N != 0) & ~trains_N,
        "zero_advantage": trains_N & (advantages_N == 0),
    }


def _bits(flags: Mapping[str, Flags], num_tokens: int) -> NDArray[np.int64]:
    """Return the rules of each token, [N]: bit i for rule i of `TOKEN_RULES`."""
    rules_N = np.zeros(num_tokens, dtype=np.int64)
    for rule, flags_N in flags.items():
        rules_N |= flags_N.astype(np.int64) << TOKEN_RULES.index(rule)
    return rules_N
