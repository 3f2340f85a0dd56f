"""Expert router: Megatron's, with a padding-aware loss and optional routing replay.

Its losses are sums over tokens, which `Replica.backward` divides by all input tokens of the optimizer step. Megatron's
own losses count padding. Under calculate_per_token_loss their gradients shrink with the TP and CP sizes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from actors.trainer.data.batch import MicroBatch
from actors.trainer.megatron.columns import on_device
from actors.trainer.megatron.imports import MoEAuxLossAutoScaler, TopKRouter, parallel_state


@dataclass(frozen=True)
class RoutingInfo:
    """Routing metadata of a micro-batch: T positions in the order of `in_order`, k experts each."""

    is_token_T: Tensor  # False in padding
    trains: bool  # a backward pass follows
    sequence_T: Tensor  # number of each position's sequence
    num_sequences: int  # over all ranks that share the micro-batch
    given: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])  # [T, k] by layer; -1: the router chooses
    chosen: dict[int, Tensor] | None = None  # output: the experts used, [T, k] by layer; None: not recorded


class Router(TopKRouter):
    """Chooses experts for tokens, or replays given ones. Layers are numbered from 0."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router_replay = _Choice(self)
        self.next: RoutingInfo | None = None  # set before each micro-batch
        self._routing_info: RoutingInfo | None = None
        self.computed_again: list[RoutingInfo] = []  # micro-batches whose forward pass the backward pass will recompute

    @property
    def layer(self) -> int:
        """Number of the layer in the whole model."""
        return self.layer_number - 1

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Route like Megatron's router, with the metadata of the current micro-batch."""
        self._routing_info = self._which()
        return super().routing(logits, padding_mask)

    def _which(self) -> RoutingInfo | None:
        """Find the metadata of the current forward pass.

        A recomputed layer runs its first pass without gradients. Backward passes follow the order of those passes.
        """
        routing = self.next
        if routing is None or not routing.trains:
            return routing
        if not torch.is_grad_enabled():
            self.computed_again.append(routing)
            return routing
        return self.computed_again.pop(0) if self.computed_again else routing

    def taken(self, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the experts that tokens go to, and these experts.

        Args:
            scores: [T, experts].
            chosen: [T, k], the router's choice.
        """
        routing, layer = self._routing_info, self.layer
        if routing is not None and layer in routing.given:
            given = routing.given[layer].to(scores.device)
            chosen = torch.where(is_known(given, scores.size(1)), given.to(torch.int64), chosen)
        if routing is not None and routing.chosen is not None:
            routing.chosen[layer] = chosen.to(torch.int16)
        return scores.gather(1, chosen), chosen

    def ranked(self, scores: Tensor) -> Tensor:
        """Return what decides the choice, [T, experts]."""
        return scores

    def weighted(self, scores: Tensor) -> Tensor:
        """Return the weights of chosen experts, given their scores, [T, k]."""
        return scores

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the z-loss, the squared logsumexp of each token's logits, to the backward pass."""
        coefficient, routing = self.config.moe_z_loss_coeff, self._routing_info
        if not coefficient or routing is None or not routing.trains or not torch.is_grad_enabled():
            return logits
        squares = logits.logsumexp(dim=-1).square()
        return MoEAuxLossAutoScaler.apply(logits, coefficient * torch.where(routing.is_token_T, squares, 0.0).sum())

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        routing, coefficient = self._routing_info, self.get_aux_loss_coeff("aux_loss")
        if routing is None or not coefficient:
            return probs
        together = torch.zeros_like(routing.sequence_T)
        return self._balanced(probs, scores_for_aux_loss, routing_map, coefficient, together, 1)

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, *_sizes: int, **_options: Any
    ) -> Tensor:
        """Apply the loss per sequence. Megatron's own treats a packed row as one sequence."""
        routing, coefficient = self._routing_info, self.get_aux_loss_coeff("seq_aux_loss")
        if routing is None or not coefficient:
            return probs
        sequences, number = routing.sequence_T, routing.num_sequences
        return self._balanced(probs, scores_for_aux_loss, routing_map, coefficient, sequences, number)

    def _balanced(
        self, probs: Tensor, scores: Tensor, chosen: Tensor, coefficient: float, sequence_T: Tensor, number: int
    ) -> Tensor:
        """Add the load balancing loss to the backward pass.

        The loss sums, over tokens and experts, a token's score times the expert's share of its sequence's choices.

        Args:
            probs: [T, experts]; returned with the loss attached to its backward pass.
            scores: [T, experts], normalised per token.
            chosen: [T, experts], 1 where the router chose the expert.
            coefficient: Weight of the loss.
            sequence_T: Sequence of each token. Experts are balanced within each sequence.
            number: Number of sequences.

        Source:
            Switch Transformer, arXiv 2101.03961, equation 4, for tokens with k experts as in Megatron-core.
        """
        assert self._routing_info is not None
        is_token = self._routing_info.is_token_T[:, None]
        counts = scores.new_zeros(number, scores.size(1)).index_add_(0, sequence_T, (chosen & is_token).to(scores))
        counts = _summed(counts, self.tp_cp_group)
        shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1.0)
        products = torch.where(is_token, scores * shares[sequence_T], 0.0)
        return MoEAuxLossAutoScaler.apply(probs, coefficient * scores.size(1) * products.sum())

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, to update its bias. Megatron would count padding, too."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            routing = self._routing_info
            counted = routing_map if routing is None else routing_map & routing.is_token_T[:, None]
            self.local_tokens_per_expert += counted.sum(dim=0)

    def _maintain_float32_expert_bias(self) -> None:
        """Keep the counts in float32, too: bfloat16 would round them like the biases."""
        super()._maintain_float32_expert_bias()
        if self.enable_expert_bias:
            counts: Any = self.local_tokens_per_expert
            counts.data = counts.data.float()


class ScaledRouter(Router):
    """Router that normalizes and scales what it reads, and has a factor of each expert's weight."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        device = torch.cuda.current_device()
        for name, size in (("scale", config.hidden_size), ("expert_scales", config.num_moe_experts)):
            parameter = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
            setattr(self, name, parameter)

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of the experts."""
        size = input.size(-1)
        normal = F.rms_norm(input, (size,), None, self.config.layernorm_epsilon)
        return super().gating(normal * self.scale * size**-0.5)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Route like Megatron's router, and multiply the weights of chosen experts by their factors."""
        weights, chosen = super().routing(logits, padding_mask)
        return weights * self.expert_scales.to(weights.dtype), chosen


class BiasedRouter(Router):
    """Router of softmax scores with a bias, a row, which decides the choice alone. Megatron's has none for softmax."""

    def __init__(self, *args: Any, min_sum: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._min_sum = min_sum
        for name in ("expert_bias", "local_tokens_per_expert"):
            setattr(self, name, getattr(self, name).unsqueeze(0))

    def ranked(self, scores: Tensor) -> Tensor:
        """Add the bias to the scores."""
        return scores + self.expert_bias

    def weighted(self, scores: Tensor) -> Tensor:
        """Divide the scores by their sum, which counts as at least `min_sum`."""
        return scores / scores.sum(dim=-1, keepdim=True).clamp(min=self._min_sum)


def is_known(given: Tensor, num_experts: int) -> Tensor:
    """Whether each expert number is recorded and valid. In uint8, 255 stands for none."""
    is_given = given != 255 if given.dtype is torch.uint8 else given >= 0
    return is_given & (given.to(torch.int64) < num_experts)


def _summed(counts: Tensor, group: Any) -> Tensor:
    """Sum the counts over the ranks that share a micro-batch's tokens."""
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    return counts


class _Choice:
    """Replacement for Megatron's RouterReplay, which records one micro-batch only."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Choose experts. Megatron's router calls this in place of its own top-k."""
        _, chosen = choose(self._router.ranked(scores), topk, num_groups, group_topk)
        taken, chosen = self._router.taken(scores, chosen)
        return self._router.weighted(taken), chosen


class Routers:
    """All routers of this rank, and their mode for the next micro-batch."""

    def __init__(self, chunks: Iterable[Any], *, sequence_parallel: bool, device: torch.device) -> None:
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
        self._sequence_parallel = sequence_parallel
        self._device = device

    def begin(self) -> None:
        """Discard micro-batches whose backward pass never ran."""
        for router in self._routers:
            router.computed_again.clear()

    def train(self, micro_batch: MicroBatch) -> None:
        """Prepare to train on a micro-batch, with the engine's experts, or else those that an earlier pass recorded."""
        self._send(micro_batch, trains=True, given=self._of_engine(micro_batch) or micro_batch.experts)

    def keep(self, micro_batch: MicroBatch) -> None:
        """Prepare a forward pass that records its experts: the engine's if known, otherwise the routers' choice."""
        self._send(micro_batch, trains=False, given=self._of_engine(micro_batch), chosen=micro_batch.experts)

    def _of_engine(self, micro_batch: MicroBatch) -> dict[int, Tensor]:
        if micro_batch.routed_experts is None:
            return {}
        routed = torch.from_numpy(micro_batch.routed_experts).to(self._device)
        routed_T = in_order(routed, sequence_parallel=self._sequence_parallel)
        return {
            router.layer: routed_T[:, router.layer * router.topk : (router.layer + 1) * router.topk]
            for router in self._routers
            if router.layer < router.config.num_layers  # engines report no experts of an MTP layer
        }

    def look(self, micro_batch: MicroBatch) -> None:
        """Prepare a forward pass without training, replay or recording."""
        self._send(micro_batch, trains=False)

    def _send(self, micro_batch: MicroBatch, **what: Any) -> None:
        if self._routers:
            is_token, sequence = on_device(
                [(micro_batch.sources >= 0).astype(np.int64), micro_batch.sequences], self._device
            )
            is_token_T, sequence_T = (
                in_order(column, sequence_parallel=self._sequence_parallel) for column in (is_token != 0, sequence)
            )
            routing = RoutingInfo(is_token_T, sequence_T=sequence_T, num_sequences=micro_batch.num_sequences, **what)
            for router in self._routers:
                router.next = routing


def in_order(values: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Reorder values per position of a micro-batch, [b, s, ...], to the order of this rank's routers, [T, ...]."""
    by_position = values.transpose(0, 1)
    if sequence_parallel:
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        by_position = by_position.chunk(size)[rank]
    return by_position.flatten(0, 1)
