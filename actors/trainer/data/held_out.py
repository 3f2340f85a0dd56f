"""Held-out preference pairs: batches to evaluate, when an evaluation set is due, and its metrics."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import structlog

from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.staleness import NOT_SAMPLED
from messages import Prompt
from runtime.settings.placement import max_sample_tokens
from runtime.settings.tables.prompts import EvalConfig
from runtime.settings.topology import Topology

log = structlog.get_logger()

BATCH_PAIRS: Final = 256  # pairs that the ranks get at a time
PREFIX: Final = "train/"  # of the metrics of a train step
ACCURACY: Final = "train/rewards_accuracies"
LEFT_OUT: Final = (ACCURACY, "train/loss")  # reported as the set itself; equal to another metric


class PairSums(NamedTuple):
    """Metrics summed over preference pairs."""

    num_pairs: int
    sums: dict[str, float]  # by the name of a train step's metric


class HeldOut:
    """The evaluation sets of a run on preference pairs. Each evaluation depends on the weights and the files alone."""

    def __init__(self, topology: Topology, pairs: Mapping[str, Sequence[Prompt]]) -> None:
        """Leave out pairs over the token limit of a sample.

        Args:
            topology: The topology.
            pairs: Pairs of each evaluation set. Empty: the run has none.
        """
        self._num_steps = topology.train.num_steps
        self._sets = [item for item in topology.eval if item.name in pairs]
        limit = max_sample_tokens(topology)
        self._pairs = {name: [pair for pair in own if _num_tokens(pair) <= limit] for name, own in pairs.items()}
        for name, own in pairs.items():
            if num_long := len(own) - len(self._pairs[name]):
                log.warning("held_out_pairs_too_long", set=name, num_pairs=num_long, max_tokens=limit)

    def due(self, step: int) -> list[str]:
        """Return the sets to evaluate after a number of train steps."""
        return [item.name for item in self._sets if self._pairs[item.name] and self._is_due(item, step)]

    def _is_due(self, item: EvalConfig, step: int) -> bool:
        if step == 0:
            return not item.skip_eval_before_train
        return step % item.interval == 0 or step == self._num_steps

    def batches(self, name: str, step: int) -> Iterator[TrainBatch]:
        """Yield the pairs of a set."""
        pairs = self._pairs[name]
        for begin in range(0, len(pairs), BATCH_PAIRS):
            yield pair_batch(pairs[begin : begin + BATCH_PAIRS], step)


def pair_batch(pairs: Sequence[Prompt], step: int) -> TrainBatch:
    """Lay pairs out as a train batch does: rollouts of two parts, with reward 1 and 0.

    Raises:
        ValueError: A prompt is not a pair.
    """
    tokens, masks, lengths = [], [], []
    for pair in pairs:
        if pair.response_ids is None or pair.loss_mask is None or pair.rejected is None:
            raise ValueError(f"row {pair.row} of {pair.data} is not a preference pair")
        both = ((pair.response_ids, pair.loss_mask), (pair.rejected.response_ids, pair.rejected.loss_mask))
        for response_ids, mask in both:
            tokens += [pair.prompt_ids, response_ids]
            masks += [np.zeros(len(pair.prompt_ids), dtype=np.uint8), mask]
            lengths.append(len(pair.prompt_ids) + len(response_ids))
    mask_N = np.concatenate(masks).astype(np.uint8)
    numbers_B, parts_B = np.divmod(np.arange(len(lengths)), 2)
    return TrainBatch(
        step=step,
        groups_B=numbers_B,
        rollouts_B=numbers_B,
        indices_B=np.zeros_like(numbers_B),
        parts_B=parts_B,
        rewards_B=1.0 - parts_B,
        raw_rewards_B=1.0 - parts_B,
        truncated_B=np.zeros(len(lengths), dtype=np.uint8),
        left_out_B=np.zeros(len(lengths), dtype=np.uint8),
        lengths_B=np.array(lengths, dtype=np.int64),
        tokens_N=np.concatenate(tokens).astype(np.int32),
        loss_mask_N=mask_N,
        rollout_log_probs_N=np.zeros(len(mask_N), dtype=np.float32),
        staleness_N=np.where(mask_N, 0, NOT_SAMPLED).astype(np.int32),
    )


def held_out_metrics(name: str, found: Sequence[PairSums]) -> dict[str, float]:
    """Return the metrics of an evaluation set: its accuracy, and means over its pairs.

    Args:
        name: Name of the set.
        found: Metrics of a train step, summed over the pairs of each batch; at least one.
    """
    num_pairs = sum(one.num_pairs for one in found)
    means = {key: math.fsum(one.sums[key] for one in found) / num_pairs for key in found[0].sums}
    further = {f"eval/{name}/{key.removeprefix(PREFIX)}": mean for key, mean in means.items() if key not in LEFT_OUT}
    return {f"eval/{name}": means[ACCURACY]} | further


def _num_tokens(pair: Prompt) -> int:
    """Count the tokens of the longer conversation."""
    responses = [pair.response_ids, None if pair.rejected is None else pair.rejected.response_ids]
    return len(pair.prompt_ids) + max(len(ids) for ids in responses if ids is not None)
