"""Calls functions that were written for slime inside of the trainer; found by its name alone."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs, sample_sums
from actors.trainer.algorithms.loss_inputs import LossInputs
from actors.trainer.plugins.functions import TrainerPlugin, shown
from runtime.compat.slime.functions import PREFIX, Args, given_sample
from runtime.settings.tables.algorithm import AlgorithmConfig, CustomTis, RsTable


def weighed(plugin: TrainerPlugin, inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Call an importance-sampling function of slime; return factors and metrics per token.

    It gets a policy loss of 1 for each token and must multiply it. A token that it takes out of the mask has factor 0.
    """
    if not inputs.sequences.is_whole:
        plugin.refuse("functions of slime need whole sequences: trainer.megatron.context_parallel_size = 1")
    order = inputs.sequences.numbers.argsort(stable=True)
    sizes = [size for size in inputs.sequences.numbers.bincount().tolist() if size]
    columns = [inputs.log_probs.new_ones(len(order))]
    columns += [values.detach()[order] for values in (inputs.old_log_probs, inputs.rollout_log_probs)]
    if not sizes:  # functions of slime join columns, which fails without one: one token, which is dropped again
        sizes, columns = [1], [values.new_ones(1) for values in columns]
    losses, old, rollout = columns
    answer = plugin.call(
        args=_tis_args(algorithm),
        pg_loss=losses.clone(),
        train_log_probs=list(old.split(sizes)),
        rollout_log_probs=list(rollout.split(sizes)),
        loss_masks=list(torch.ones_like(losses).split(sizes)),
        total_lengths=sizes,
        response_lengths=sizes,
    )
    if not isinstance(answer, tuple) or len(cast("tuple[Any, ...]", answer)) != 3:
        plugin.refuse(f"returned {shown(answer)}; expected (pg_loss, loss_masks, metrics)")
    loss, masks, metrics = cast("tuple[Any, Any, Any]", answer)
    try:
        kept = torch.cat([mask.to(losses.dtype) for mask in masks])
    except (TypeError, AttributeError, RuntimeError):
        plugin.refuse(f"its masks are {shown(masks)}; expected a list with a tensor per sequence")
    factors = plugin.column("pg_loss", loss, losses).detach() * plugin.column("the masks", kept, losses)
    if not isinstance(metrics, Mapping):
        plugin.refuse(f"its metrics are {shown(metrics)}; expected a dictionary of tensors by name")
    named = {f"train/{name}": values for name, values in cast("Mapping[Any, Any]", metrics).items()}

    def put_back(values: Any) -> Any:
        if not isinstance(values, Tensor) or values.shape != losses.shape:
            return values  # is refused where all metrics are checked
        return values[: len(order)][order.argsort()]

    return put_back(factors), {name: put_back(values) for name, values in named.items()}


def _tis_args(algorithm: AlgorithmConfig) -> Args:
    """slime's `args`, as importance-sampling functions read them. Rejection is `algorithm.rs`, beside them."""
    tis, rs = algorithm.tis, algorithm.rs or RsTable()
    if not isinstance(tis, CustomTis):
        tis = CustomTis(function=PREFIX)  # the function is tried without a run
    low, high = tis.lower_bound, tis.upper_bound
    return Args(
        use_tis=True,
        use_rs=False,
        tis_clip=high,
        tis_clip_low=low,
        tis_upper_bound=high,
        tis_lower_bound=low,
        tis_level=tis.level,
        tis_mode=tis.mode,
        tis_batch_normalize=tis.batch_normalize,
        rs_level=rs.level,
        rs_lower_bound=getattr(rs, "lower_bound", None),
        rs_upper_bound=getattr(rs, "upper_bound", None),
        rs_veto_threshold=rs.veto_threshold,
    )


def post_processed(plugin: TrainerPlugin, inputs: AdvantageInputs) -> Any:
    """Call a reward post-process function of slime; return one advantage per sample: the rewards that it returns.

    It gets the samples with usable rewards, those of a prompt group one after the other.
    """
    usable = np.flatnonzero(np.isfinite(inputs.rewards))
    order = usable[np.argsort(inputs.groups[usable], kind="stable")]
    lengths = sample_sums(inputs.response_mask.astype(np.int64), inputs.lengths)
    samples = [
        given_sample(
            group_index=int(inputs.groups[place]),
            rollout_id=int(inputs.rollouts[place]),
            index=int(place),
            reward=float(inputs.rewards[place]),
            response_length=int(lengths[place]),
        )
        for place in order
    ]
    _, rewards = plugin.pair(plugin.call(Args(reward_key=None), samples), "(raw_rewards, rewards)")
    found = np.full(len(inputs.rewards), np.nan)
    try:
        found[order] = np.asarray(rewards, dtype=np.float64).reshape(len(order))
    except (TypeError, ValueError, RuntimeError):
        plugin.refuse(f"returned {shown(rewards)} as rewards; expected {len(order)} numbers")
    return found
