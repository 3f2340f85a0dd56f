"""How samples become the micro-batches of this replica and of the others."""

from dataclasses import replace

import numpy as np

from actors.trainer.batches.batch import Ints, MicroBatch, TrainBatch, make_micro_batch
from actors.trainer.batches.plan import attention_cost, micro_batch_cost, plan_micro_batches
from actors.trainer.batches.staleness import NOT_SAMPLED
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica


def shared(replica: Replica, batch: TrainBatch, samples: Ints, *, max_tokens: int) -> list[list[Ints]]:
    """Share samples of a batch among the replicas; as `plan_micro_batches`."""
    hf = replica.hf
    return plan_micro_batches(
        batch.lengths_B,
        samples,
        max_tokens=max_tokens,
        num_replicas=ranks.data_parallel_size(),
        packed=replica.packed,
        cost=micro_batch_cost(replica.layer_weights),
        attention=attention_cost(hf.num_attention_heads * hf.head_dim, replica.layer_weights),
    )


def laid_out(replica: Replica, batch: TrainBatch, shares: list[list[Ints]]) -> list[MicroBatch]:
    """This replica's micro-batches."""
    return [
        make_micro_batch(
            batch, members, packed=replica.packed, multiple=replica.length_multiple, context=replica.context
        )
        for members in shares[ranks.data_parallel_rank()]
    ]


def group_by_group(replica: Replica, batch: TrainBatch, groups: Ints, *, max_tokens: int) -> list[MicroBatch]:
    """Micro-batches of this replica for log-probs of prompt groups, those of one group behind those of another.

    They depend on the group alone: neither on what else is in the batch, nor on the step, which masks tokens by the age
    of their weights. So whoever computes them alone, and before there is a batch, gets the same log-probs to the bit.

    Args:
        replica: of this rank.
        batch: that has the groups.
        groups: prompt groups.
        max_tokens: of a micro-batch.
    """
    sampled = replace(batch, loss_mask_N=(batch.staleness_N != NOT_SAMPLED).astype(np.uint8))
    micro_batches: list[MicroBatch] = []
    for group in groups.tolist():
        samples = np.flatnonzero(batch.groups_B == group)
        micro_batches += laid_out(replica, sampled, shared(replica, batch, samples, max_tokens=max_tokens))
    return micro_batches
