"""The optimizer steps of a batch, and the micro-batches of each on this replica."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from actors.trainer.data.batch import ExpertIds, Ints, MicroBatch, TrainBatch, only_where, with_mtp
from actors.trainer.data.plan import micro_batch_cost, split_steps
from actors.trainer.data.skipped import Flags
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.memory import micro_batch_tokens
from actors.trainer.step.layout import NO_SAMPLES, laid_out, shared_equally, units_laid_out, units_shared
from actors.trainer.step.learner import Learner, OptimizerStep
from runtime.settings.derived import trains_pairs
from runtime.settings.prompts import shares_prompts
from runtime.settings.topology import Topology


class _Routed(NamedTuple):
    """Experts that the engine chose for this replica's tokens."""

    tokens: Ints  # positions in the batch's columns, rising
    experts: ExpertIds  # [tokens, E]


class Planner:
    """Splits batches into optimizer steps and micro-batches."""

    def __init__(self, topology: Topology, replica: Replica, learner: Learner) -> None:
        """Set up for one replica; the learner reduces the steps' losses."""
        self._replica = replica
        self._learner = learner
        self._num_steps = topology.algorithm.num_steps_per_rollout
        self._routes = topology.algorithm.use_rollout_routing_replay
        self._pairs = trains_pairs(topology)
        self._shares_prompts = shares_prompts(topology)
        self._must_share = topology.trainer.share_prompts is True
        self._max_tokens = micro_batch_tokens(topology, replica.hf)

    def steps(self, batch: TrainBatch, idle_B: Flags | None = None) -> list[OptimizerStep]:
        """Plan the optimizer steps of a batch. A collective of all ranks.

        Args:
            batch: The whole batch.
            idle_B: Samples that get no passes. None: all get them.

        Raises:
            ValueError: Routing replay is on, and the engine's experts are missing or those of another model.
        """
        replica, none_B = self._replica, np.zeros(len(batch.lengths_B), dtype=bool)
        planned: list[tuple[Ints, list[list[Ints]]]] = []
        shared: dict[int, list[MicroBatch]] = {}
        for number, samples in enumerate(split_steps(batch, self._num_steps)):
            passed = samples if idle_B is None else samples[~idle_B[samples]]
            if (own := self._behind_prompts(batch, passed)) is not None:
                shared[number] = own
                passed = NO_SAMPLES
            shares = shared_equally(replica, batch, passed, max_tokens=self._max_tokens, whole_rollouts=self._pairs)
            planned.append((samples, shares))
        routed = self._routed_experts(batch, [shares for _, shares in planned])
        steps: list[OptimizerStep] = []
        for number, (samples, shares) in enumerate(planned):
            own = shared.get(number) or [
                self._with_more(batch, micro_batch, routed) for micro_batch in laid_out(replica, batch, shares)
            ]
            steps.append(self._learner.reduced_step(batch, number, samples, own, none_B, idle_B))
        return steps

    def _behind_prompts(self, batch: TrainBatch, samples: Ints) -> list[MicroBatch] | None:
        """Lay samples out behind one copy of each prompt. None: that is off, or saves less than it costs."""
        if not self._shares_prompts or not len(samples):
            return None
        least = 0 if self._must_share else micro_batch_cost(self._replica.layer_weights)
        shares = units_shared(self._replica, batch, samples, max_tokens=self._max_tokens, least_saved=least)
        return None if shares is None else units_laid_out(self._replica, batch, shares)

    def _with_more(self, batch: TrainBatch, micro_batch: MicroBatch, routed: _Routed | None) -> MicroBatch:
        """Add the inputs of routing replay and of the MTP layer to a micro-batch."""
        if routed is not None and len(routed.tokens):
            place = np.searchsorted(routed.tokens, np.maximum(micro_batch.sources, routed.tokens[0]))
            known = only_where(micro_batch.sources >= 0, routed.experts[place])
            micro_batch = replace(micro_batch, routed_experts=known)
        return with_mtp(batch, micro_batch) if self._replica.hf.num_mtp_layers > 0 else micro_batch

    def _routed_experts(self, batch: TrainBatch, steps: Sequence[list[list[Ints]]]) -> _Routed | None:
        """Return the engine's experts for this replica's tokens if routing replay is on."""
        if not self._routes:
            return None
        tokens = [
            batch.tokens_of(np.sort(np.concatenate([members for shares in steps for members in shares[replica]])))
            for replica in range(ranks.data_parallel_size())
        ]
        routed = ranks.own_rows(batch.routed_experts_N, tokens)
        experts, layers = self._replica.hf.experts, self._replica.hf.num_layers
        expected = 0 if experts is None else layers * experts.num_experts_per_tok
        if routed is None or routed.shape[1] != expected:
            found = "none" if routed is None else routed.shape[1]
            raise ValueError(
                f"step {batch.step + 1}: algorithm.use_rollout_routing_replay needs {expected} routed experts "
                f"of each token, those of all layers, but samples have {found}"
            )
        return _Routed(tokens[ranks.data_parallel_rank()], routed)


def micro_batches_of(steps: Sequence[OptimizerStep]) -> list[MicroBatch]:
    """Return the micro-batches of optimizer steps, in order."""
    return [micro_batch for step in steps for micro_batch in step.micro_batches]
