"""Metrics of a train step: times, batch sizes, losses, speed, memory, and the engine/trainer mismatch."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from actors.trainer.data.batch import Floats32, MicroBatch, TrainBatch
from actors.trainer.data.staleness import staleness_metrics
from actors.trainer.megatron import groups as ranks
from actors.trainer.models.config import HfConfig
from runtime.util.pass_rate import pass_rates

MTP_LOSS = "train/mtp_loss"  # a mean over the tokens that the MTP layer predicts
LOSS_TERMS: Final = ("train/loss", "train/pg_loss")  # 0 for samples without passes
DIFF = "train/train_rollout_logprob_abs_diff"
DIFF_MAX = "train/train_rollout_logprob_abs_diff_max"


PEAK_TFLOPS: Final = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense, in bfloat16, by part of the GPU's name


def train_flops(model: HfConfig, lengths: Iterable[int]) -> float:
    """Count the operations of one forward and backward pass; the backward pass counts twice the forward pass.

    Every position passes through each layer and the head. It passes only through the experts that it is routed to.
    Attention is causal: on average, a position attends to half of its sequence, or to its window. Recomputation
    does not count, and positions that skip the head count like the others.

    Args:
        model: configuration of the model.
        lengths: lengths of the sequences, in tokens.
    """
    hidden = model.hidden_size
    weights = (1 if model.has_value_head else model.vocab_size) * hidden  # the head's
    weights += sum(layer.weights_of_a_token(hidden) for layer in model.all_layers)
    weights += model.num_mtp_layers * 2 * hidden * hidden  # the MTP layer's projection
    attention = Counter(layer.attention for layer in model.layers)
    tokens, products = 0, 0.0
    for length in lengths:
        tokens += length
        products += sum(number * block.products(length) for block, number in attention.items())
    return 3.0 * (2.0 * weights * tokens + 2.0 * products)


def peak_flops(device: str) -> float | None:
    """Return a GPU's peak FLOPS in bfloat16, by its name. None: unknown."""
    return next((1e12 * peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


class StepTimer:
    """Wall time of a train step by part.

    A lap is the time since the previous lap or the start, so the laps add up to the total.
    """

    def __init__(self) -> None:
        """Start the timer."""
        self._last = self._begin = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> float:
        """Add the time since the previous lap to a part, and return it in seconds."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self._seconds[name] = self._seconds.get(name, 0.0) + took
        return took

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self._begin

    def metrics(self) -> dict[str, float]:
        """Seconds by metric name."""
        return dict(self._seconds)


class StepSums(NamedTuple):
    """Metric sums of an optimizer step."""

    own: Tensor  # on this replica
    num_shares: int  # denominator
    num_measured: int  # the same without samples that had no passes
    has_passes: bool  # whether any sample had


def reduced_sums(names: Sequence[str], steps: Sequence[StepSums]) -> dict[str, float]:
    """Average each metric over the optimizer steps. A collective of all replicas.

    Samples without passes count in `LOSS_TERMS` alone. Other metrics are left out if no sample had any.

    Args:
        names: Names of the metrics.
        steps: The optimizer steps.
    """
    total = ranks.sum_over_replicas(torch.stack([step.own for step in steps]))
    has_passes = torch.tensor([step.has_passes for step in steps])
    whole = (total / torch.tensor([[step.num_shares] for step in steps])).mean(dim=0).tolist()
    measured = (total / torch.tensor([[step.num_measured] for step in steps]))[has_passes].mean(dim=0).tolist()
    means = {name: whole[place] if name in LOSS_TERMS else measured[place] for place, name in enumerate(names)}
    return {name: mean for name, mean in means.items() if name in LOSS_TERMS or has_passes.any()}


def difference_metrics(
    batch: TrainBatch, micro_batches: Sequence[MicroBatch], trainer_log_probs_N: Floats32
) -> dict[str, float]:
    """Measure how engine log-probs differ from the trainer's under the weights at the start of this train step.

    The mean covers all trained tokens of these micro-batches. The maximum covers only tokens that exactly these weights
    sampled. There, a difference beyond rounding means that engine and trainer compute different models. A collective
    of all replicas.
    """
    where = np.concatenate([micro_batch.columns_M for micro_batch in micro_batches])
    difference = np.abs(trainer_log_probs_N[where] - batch.rollout_log_probs_N[where])
    current = batch.staleness_N[where] == 0
    sums = ranks.sum_over_replicas(torch.tensor([difference.sum(), len(where)], dtype=torch.float64)).tolist()
    largest = ranks.max_over_replicas(torch.tensor(difference[current].max(initial=0.0), dtype=torch.float64))
    count = max(sums[1], 1.0)
    return {DIFF: sums[0] / count, DIFF_MAX: largest.item()}


def size_metrics(batch: TrainBatch) -> dict[str, float]:
    """Size metrics of a batch. Lengths exclude samples that are left out."""
    known_B = batch.left_out_B == 0
    return {
        "rollout/response_lengths": _mean(batch.mask_sums_B[known_B]),
        "rollout/total_lengths": _mean(batch.lengths_B[known_B]),
        "train/global_batch_size": float(batch.rollouts_B[-1] + 1),
    }


def sampling_metrics(batch: TrainBatch, advantages_N: Floats32) -> dict[str, float]:
    """Metrics of the sampling: rewards, advantages, log-probs, truncation and staleness."""
    mask = batch.loss_mask_N != 0
    return {
        "rollout/raw_reward": float(batch.raw_rewards_B.mean()),
        "rollout/advantages": _mean(advantages_N[mask]),
        "rollout/rollout_log_probs": _mean(batch.rollout_log_probs_N[mask]),
        **_kept_metrics(batch),
        "rollout/truncated": float(batch.truncated_B.mean()),
        "train/stale_token_ratio": _mean(batch.staleness_N[mask] != 0),
        **staleness_metrics(batch),
    }


def token_metrics(batch: TrainBatch, columns: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Average columns over the trained tokens, by metric name. Tokens without a finite number do not count."""
    mask = batch.loss_mask_N != 0
    return {name: _mean(column[mask & np.isfinite(column)]) for name, column in columns.items()}


def passrate_metrics(batch: TrainBatch) -> dict[str, float]:
    """Compute pass@k of the prompts of a batch. A rollout passes if a part of it has a raw reward of exactly 1."""
    rollouts, first, inverse = np.unique(batch.rollouts_B, return_index=True, return_inverse=True)
    passed = np.bincount(inverse, weights=batch.raw_rewards_B == 1.0, minlength=len(rollouts)) > 0
    _, groups = np.unique(batch.groups_B[first], return_inverse=True)
    counts = zip(np.bincount(groups).tolist(), np.bincount(groups, weights=passed).astype(int).tolist(), strict=True)
    return {f"passrate/pass@{k}": rate for k, rate in pass_rates(list(counts)).items()}


def _kept_metrics(batch: TrainBatch) -> dict[str, float]:
    """Mean number of tokens that top-p and top-k kept, over the trained tokens for which they are recorded."""
    if batch.kept_counts_N is None:
        return {}
    recorded = (batch.loss_mask_N != 0) & (batch.kept_counts_N > 0)
    return {"rollout/top_p_kept_vocab_per_token": _mean(batch.kept_counts_N[recorded].astype(np.int64))}


def memory_metrics(peaks: Mapping[str, int]) -> dict[str, float]:
    """Peak memory of each rank in bytes, by phase. A collective of all ranks."""
    return {
        f"perf/peak_bytes/{phase}/rank_{rank}": float(size)
        for rank, own in enumerate(ranks.all_gather_objects(peaks))
        for phase, size in own.items()
    }


def speed_metrics(model: HfConfig, lengths: Sequence[int], seconds: float, device: torch.device) -> dict[str, float]:
    """Speed of the optimizer steps: tokens per second, TFLOPS per rank, and MFU on a GPU with a known peak."""
    metrics = {"perf/actor_train_tok_per_s": sum(lengths) / seconds}
    per_rank = train_flops(model, lengths) / seconds / dist.get_world_size()
    metrics["perf/actor_train_tflops"] = per_rank / 1e12
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is not None:
        metrics["perf/mfu"] = per_rank / peak
    return metrics


def _mean(values: NDArray[np.float32 | np.float64 | np.int64 | np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0
