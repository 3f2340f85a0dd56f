"""Layout of samples in the micro-batches of the replicas."""

from dataclasses import replace
from typing import Final

import numpy as np

from actors.trainer.data.batch import Ints, MicroBatch, TrainBatch, empty_micro_batch, make_micro_batch
from actors.trainer.data.plan import attention_cost, micro_batch_cost, plan_micro_batches
from actors.trainer.data.prompts import make_shared_micro_batch, prompt_lengths, unit_lengths, units_of
from actors.trainer.data.staleness import NOT_SAMPLED
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica

NO_SAMPLES: Final[Ints] = np.empty(0, dtype=np.int64)


def shared(
    replica: Replica, batch: TrainBatch, samples: Ints, *, max_tokens: int, whole_rollouts: bool = False
) -> list[list[Ints]]:
    """Distribute samples of a batch over the replicas; return what `plan_micro_batches` returns."""
    hf = replica.hf
    return plan_micro_batches(
        batch.lengths_B,
        samples,
        max_tokens=max_tokens,
        num_replicas=ranks.data_parallel_size(),
        packed=replica.packed,
        cost=micro_batch_cost(replica.layer_weights),
        attention=attention_cost(hf.attention.heads * hf.attention.head_dim, replica.layer_weights),
        rollouts_B=batch.rollouts_B if whole_rollouts else None,
    )


def shared_equally(
    replica: Replica, batch: TrainBatch, samples: Ints, *, max_tokens: int, whole_rollouts: bool = False
) -> list[list[Ints]]:
    """Share samples as `shared` does, with empty micro-batches up to a number that the pipeline schedule allows.

    Without samples there is one: an optimizer step runs a pass on each rank.
    """
    if len(samples):
        shares = shared(replica, batch, samples, max_tokens=max_tokens, whole_rollouts=whole_rollouts)
    else:
        shares = [[NO_SAMPLES] for _ in range(ranks.data_parallel_size())]
    missing = replica.num_micro_batches(len(shares[0])) - len(shares[0])
    return [[*members, *([NO_SAMPLES] * missing)] for members in shares]


def units_shared(
    replica: Replica, batch: TrainBatch, samples: Ints, *, max_tokens: int, least_saved: int
) -> list[list[list[Ints]]] | None:
    """Distribute samples over the replicas, those with the same prompt behind one copy of it.

    Args:
        replica: Model replica of this rank.
        batch: The whole batch.
        samples: Samples to distribute.
        max_tokens: Largest micro-batch.
        least_saved: Positions that must be saved.

    Returns:
        For each replica its micro-batches, each as units of samples. None: too little is saved.
    """
    if int(prompt_lengths(batch)[samples].sum()) < max(least_saved, 1):
        return None
    hf = replica.hf
    attention = attention_cost(hf.attention.heads * hf.attention.head_dim, replica.layer_weights)
    units = units_of(batch, samples, max_tokens=max_tokens, attention=attention)
    lengths = unit_lengths(batch, units)
    if int(np.maximum(batch.lengths_B[samples] - 1, 1).sum() - lengths.sum()) < max(least_saved, 1):
        return None
    shares = plan_micro_batches(
        lengths,
        np.arange(len(units)),
        max_tokens=max_tokens,
        num_replicas=ranks.data_parallel_size(),
        packed=True,
        attention=attention,
    )
    missing = replica.num_micro_batches(len(shares[0])) - len(shares[0])
    numbers = [[*members, *([NO_SAMPLES] * missing)] for members in shares]
    return [[[units[number] for number in own.tolist()] for own in members] for members in numbers]


def units_laid_out(replica: Replica, batch: TrainBatch, shares: list[list[list[Ints]]]) -> list[MicroBatch]:
    """Build this replica's micro-batches of units."""
    multiple, context = replica.length_multiple, replica.context
    return [
        make_shared_micro_batch(batch, units, multiple=multiple, context=context)
        if units
        else empty_micro_batch(packed=True, multiple=multiple, context=context)
        for units in shares[ranks.data_parallel_rank()]
    ]


def laid_out(replica: Replica, batch: TrainBatch, shares: list[list[Ints]]) -> list[MicroBatch]:
    """Build this replica's micro-batches."""
    return [
        make_micro_batch(
            batch, members, packed=replica.packed, multiple=replica.length_multiple, context=replica.context
        )
        for members in shares[ranks.data_parallel_rank()]
    ]


def group_by_group(replica: Replica, batch: TrainBatch, groups: Ints, *, max_tokens: int) -> list[MicroBatch]:
    """Build this replica's micro-batches for log-probs of prompt groups, one group after another.

    The layout depends on the group alone: not on the rest of the batch, and not on the step, which masks tokens by
    staleness. Computing the log-probs early, before a batch exists, therefore gives bit-identical values.

    Args:
        replica: Model replica of this rank.
        batch: Batch that contains the groups.
        groups: Prompt groups.
        max_tokens: Largest number of tokens in a micro-batch.
    """
    sampled = replace(batch, loss_mask_N=(batch.staleness_N != NOT_SAMPLED).astype(np.uint8))
    micro_batches: list[MicroBatch] = []
    for group in groups.tolist():
        samples = np.flatnonzero(batch.groups_B == group)
        micro_batches += laid_out(replica, sampled, shared(replica, batch, samples, max_tokens=max_tokens))
    return micro_batches
