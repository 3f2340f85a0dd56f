"""The router of experts: Megatron's, which here knows where there are tokens, and can be told which experts to take."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actors.trainer.batches.batch import MicroBatch
from actors.trainer.megatron.imports import TopKRouter, parallel_state


@dataclass(frozen=True)
class Passing:
    """A micro-batch on its way through a rank's routers: T positions in the order of `in_order`, k experts each."""

    is_token_T: Tensor  # false where there is padding
    trains: bool  # a backward pass follows
    given: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])  # [T, k] by layer; -1: the router's choice
    chosen: dict[int, Tensor] | None = None  # what was taken, [T, k] by layer, is written here


class Router(TopKRouter):
    """Chooses experts for tokens, or takes those that are given. Layers are numbered from 0."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router_replay = _Choice(self)
        self.next: Passing | None = None  # set before a micro-batch comes
        self._passing: Passing | None = None
        self.computed_again: list[Passing] = []  # whose forward pass is to come once more, in a backward pass

    @property
    def layer(self) -> int:
        """Its number in the whole model."""
        return self.layer_number - 1

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """As Megatron's, of the micro-batch that this is."""
        self._passing = self._which()
        return super().routing(logits, padding_mask)

    def _which(self) -> Passing | None:
        """A layer that is recomputed has its first pass without gradients, and backward passes come in their order."""
        passing = self.next
        if passing is None or not passing.trains:
            return passing
        if not torch.is_grad_enabled():
            self.computed_again.append(passing)
            return passing
        return self.computed_again.pop(0) if self.computed_again else passing

    def taken(self, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The experts that tokens go to, and their scores.

        Args:
            scores: [T, experts].
            chosen: [T, k], by the router.
        """
        passing, layer = self._passing, self.layer
        if passing is not None and layer in passing.given:
            given = passing.given[layer].to(scores.device, torch.int64)
            chosen = torch.where(given < 0, chosen, given)
        if passing is not None and passing.chosen is not None:
            passing.chosen[layer] = chosen.to(torch.int16)
        return scores.gather(1, chosen), chosen

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, from which its bias moves; Megatron would count padding too."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            passing = self._passing
            counted = routing_map if passing is None else routing_map & passing.is_token_T[:, None]
            self.local_tokens_per_expert += counted.sum(dim=0)

    def _maintain_float32_expert_bias(self) -> None:
        """Counts are rounded in bfloat16 as much as biases are."""
        super()._maintain_float32_expert_bias()
        if self.enable_expert_bias:
            counts: Any = self.local_tokens_per_expert
            counts.data = counts.data.float()


class _Choice:
    """In the place of Megatron's RouterReplay, whose recordings are of one micro-batch."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Called where the router would choose."""
        _, chosen = choose(scores, topk, num_groups, group_topk)
        return self._router.taken(scores, chosen)


class Routers:
    """All routers of this rank, and what they are to do with the next micro-batch."""

    def __init__(self, chunks: Iterable[Any], *, sequence_parallel: bool, device: torch.device) -> None:
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
        self._sequence_parallel = sequence_parallel
        self._device = device

    def begin(self) -> None:
        """Forget micro-batches whose backward pass never came."""
        for router in self._routers:
            router.computed_again.clear()

    def train(self, micro_batch: MicroBatch) -> None:
        """It is to be trained, with the experts that the engine had, or those of an earlier pass if they were kept."""
        self._send(micro_batch, trains=True, given=self._of_engine(micro_batch) or micro_batch.experts)

    def keep(self, micro_batch: MicroBatch) -> None:
        """The experts that its tokens get, which are those that the engine had if it told, are to be kept."""
        self._send(micro_batch, trains=False, given=self._of_engine(micro_batch), chosen=micro_batch.experts)

    def _of_engine(self, micro_batch: MicroBatch) -> dict[int, Tensor]:
        if micro_batch.routed_experts is None:
            return {}
        routed = torch.from_numpy(micro_batch.routed_experts).to(self._device)
        routed_T = in_order(routed, sequence_parallel=self._sequence_parallel)
        return {
            router.layer: routed_T[:, router.layer * router.topk : (router.layer + 1) * router.topk]
            for router in self._routers
            if router.layer < router.config.num_layers  # engines tell nothing of a further layer
        }

    def look(self, micro_batch: MicroBatch) -> None:
        """It is neither trained, nor are its experts kept."""
        self._send(micro_batch, trains=False)

    def _send(self, micro_batch: MicroBatch, **what: Any) -> None:
        if self._routers:
            is_token = torch.from_numpy(micro_batch.sources >= 0).to(self._device)
            passing = Passing(in_order(is_token, sequence_parallel=self._sequence_parallel), **what)
            for router in self._routers:
                router.next = passing


def in_order(values: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Values [b, s, ...] of the positions of a micro-batch as this rank's routers have them, [T, ...]."""
    by_position = values.transpose(0, 1)
    if sequence_parallel:
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        by_position = by_position.chunk(size)[rank]
    return by_position.flatten(0, 1)
