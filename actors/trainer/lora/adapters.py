"""Adapters beside Megatron's linear layers: their products, gradients, merged weights and parts of a checkpoint.

A layer y = x Wᵀ becomes y = x Wᵀ + scale · (x Aᵀ) Bᵀ, and W stays. Megatron fuses some projections, such as query, key
and value. Each of them has its own pair A, B, whose product is added to the rows of that projection. The matrix of an
expert has one pair, as in peft.

Tensor parallelism divides the pair as it divides W, along the same dimension; the narrow result z = x Aᵀ is what the
ranks exchange:

- Column-parallel: B is divided by rows, and each rank has all of A. The backward pass sums the gradient of z.
- Row-parallel: A is divided by columns, and each rank has all of B. The forward pass sums z.

Under sequence parallelism z is gathered or scattered along the sequence, as x is in the layer. The matrix that each
rank has then gets the gradient of this rank's positions, and Megatron's mark `sequence_parallel` has it summed.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from actors.trainer.lora.peft_files import peft_source
from actors.trainer.lora.targets import LORA_A, LORA_B, expert_layers, linear_layers, targeted
from actors.trainer.megatron.imports import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    make_sharded_tensors_for_checkpoint,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from actors.trainer.megatron.layers.experts import GroupedExperts
from actors.trainer.models.config import HfConfig
from actors.trainer.models.files import TensorShard, WeightSource
from actors.trainer.models.shapes import weights_of
from actors.trainer.models.sharding import ADAPTER, global_name, names_of
from runtime.models.blocks import Weight
from runtime.settings.tables.trainer import LoraConfig
from runtime.settings.topology import Topology

WEIGHT: Final = ".weight"


class Adapter(nn.Module):
    """The pairs of one linear layer of Megatron, which has this module as its `lora`."""

    def __init__(self, linear: Any, weight: Weight, targets: Sequence[str], config: LoraConfig) -> None:
        """Make the matrices, without values.

        Args:
            linear: Megatron's layer. Its weight is this rank's shard.
            weight: The layer's weight, with the tensors of the files that it is fused of.
            targets: Names of its projections that get a pair, as in the files, without `.weight`.
            config: Settings with a rank above 0.
        """
        super().__init__()
        self.by_rows = isinstance(linear, ColumnParallelLinear)  # how tensor-parallel ranks divide the weight
        self.by_columns = isinstance(linear, RowParallelLinear)
        self._group: Any = linear.tp_group if self.by_rows or self.by_columns else None
        self.ranks: int = 1 if self._group is None else self._group.size()
        sequence = bool(getattr(linear.weight if self._group is None else linear, "sequence_parallel", False))
        self._divides_sequence = sequence and self.ranks > 1
        self._scale = config.scale
        divided = self.ranks if self.by_rows else 1
        self._groups = max(weight.groups // divided, 1)
        self._parts = {part.removesuffix(WEIGHT): shape[0] // divided for part, shape in weight.parts.items()}
        self.targets = [part for part in self._parts if part in targets]
        self._rank = config.rank
        base = linear.weight
        self.is_of_expert: bool = getattr(linear, "is_expert", False)
        for number, target in enumerate(self.targets):
            pair = ((config.rank, base.shape[1]), (self._parts[target], config.rank))
            for letter, shape, divided_dim in zip("AB", pair, (self._dim_of_a, self._dim_of_b), strict=True):
                parameter: Any = nn.Parameter(torch.empty(shape, dtype=base.dtype, device=base.device))
                if divided_dim is not None:
                    parameter.tensor_model_parallel = True
                    parameter.partition_dim, parameter.partition_stride = divided_dim, 1
                else:
                    parameter.sequence_parallel = sequence
                parameter.allreduce = getattr(base, "allreduce", True)  # false: expert-parallel ranks have others
                self.register_parameter(f"{letter}{number}", parameter)  # here: Megatron gathers them before `forward`

    @property
    def _dim_of_a(self) -> int | None:
        return 1 if self.by_columns and self.ranks > 1 else None

    @property
    def _dim_of_b(self) -> int | None:
        return 0 if self.by_rows and self.ranks > 1 else None

    def pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield each target with this rank's A and B."""
        for number, target in enumerate(self.targets):
            yield target, getattr(self, f"A{number}"), getattr(self, f"B{number}")

    def tensors(self) -> Iterator[tuple[str, str, Any, TensorShard | None]]:
        """Yield each parameter with its name here, its name in peft's files, and which shard this rank has of it."""
        for number, target in enumerate(self.targets):
            for letter, kind, dim in (("A", LORA_A, self._dim_of_a), ("B", LORA_B, self._dim_of_b)):
                shard = None if dim is None else TensorShard(dim, self._group.rank(), self.ranks)
                yield f"{letter}{number}", f"{target}.{kind}", getattr(self, f"{letter}{number}"), shard

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what to add to the layer's output: [..., rows of the layer's weight] from [..., its columns]."""
        first = torch.cat([a for _, a, _ in self.pairs()])
        narrow = self._exchanged(F.linear(inputs, first)) * self._scale
        of_pairs = dict(zip(self.targets, narrow.split(self._rank, dim=-1), strict=True))
        second = {target: b for target, _, b in self.pairs()}
        return self._fused(
            {target: F.linear(own, second[target]) for target, own in of_pairs.items()}, narrow.shape[:-1], narrow
        )

    def _exchanged(self, narrow: Tensor) -> Tensor:
        """Exchange x Aᵀ between tensor-parallel ranks, as the layer exchanges its input or output."""
        if self.ranks == 1:
            return narrow
        if self.by_rows and self._divides_sequence:
            return gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True, group=self._group)
        if self.by_rows:
            return copy_to_tensor_model_parallel_region(narrow, group=self._group)
        if self._divides_sequence:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self._group)
        return reduce_from_tensor_model_parallel_region(narrow, group=self._group)

    def _fused(self, own: Mapping[str, Tensor], before: Sequence[int], like: Tensor) -> Tensor:
        """Lay projections [..., rows of each] out like the rows of the layer's weight. Those without a pair are 0."""
        whole = [own[part] if part in own else like.new_zeros(*before, rows) for part, rows in self._parts.items()]
        if len(whole) == 1:
            return whole[0]
        return torch.cat([part.unflatten(-1, (self._groups, -1)) for part in whole], dim=-1).flatten(-2)

    @torch.no_grad()
    def merged(self, base: Tensor) -> Tensor:
        """Return this rank's shard of W + scale · BA, computed in float32 and rounded once to the dtype of W."""
        own = {target: ((b.float() @ a.float()) * self._scale).t() for target, a, b in self.pairs()}
        whole = base.float()
        return (whole + self._fused(own, base.shape[1:], whole).t()).to(base.dtype)


def attach(chunks: Sequence[Any], model: HfConfig, config: LoraConfig, source: WeightSource) -> None:
    """Freeze the weights of a model and add adapters. Before Megatron's DDP, which gives each parameter a gradient.

    Args:
        chunks: GPTModels of this rank, in the dtype in which they train.
        model: Configuration of the model.
        config: Settings. With rank 0 nothing changes.
        source: Values of the adapters by peft's names, without its prefix.

    Raises:
        NoTarget: As in `targeted`.
        ValueError: The source has no such tensor, or one of another shape.
    """
    if not config.rank:
        return
    targets, weights, experts = targeted(model, config), weights_of(model), expert_layers(model)
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, parameter in list(chunk.named_parameters()):
            (known,) = names_of(global_name(name, chunk), model, expert_rank)
            weight, expert = weights.get(known), experts.get(known)
            if weight is None or not name.endswith(WEIGHT) or parameter.ndim != 2:
                continue
            if expert is not None:  # one pair for all of its rows
                weight = replace(weight, parts={expert.name + WEIGHT: expert.shape}, groups=1)
            own = [part.removesuffix(WEIGHT) for part in weight.parts if part.removesuffix(WEIGHT) in targets]
            if own:
                _attach(chunk.get_submodule(name.removesuffix(WEIGHT)), weight, own, config)
        for module in chunk.modules():
            if isinstance(module, GroupedExperts) and config.of_experts:
                module.one_by_one = "experts with adapters are not grouped"
        if chunk.config.recompute_granularity is not None and hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(_requires_gradient)
        fill(chunk, source)


def _attach(linear: Any, weight: Weight, targets: Sequence[str], config: LoraConfig) -> None:
    linear.lora = Adapter(linear, weight, targets, config)
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] + linear.lora(inputs[0]), output[1]


def _requires_gradient(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    """Mark the embeddings: Megatron's recomputation gives layers no gradients if its input requires none."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


@torch.no_grad()
def fill(chunk: Any, source: WeightSource) -> None:
    """Set this rank's adapters.

    Raises:
        ValueError: The source has no such tensor, or one of another shape.
    """
    for adapter in adapters_of(chunk).values():
        for _, name, parameter, shard in adapter.tensors():
            value = source(name, shard)
            if value.shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, the model {tuple(parameter.shape)}")
            parameter.copy_(value)


def initial_adapters(topology: Topology, model: HfConfig) -> WeightSource:
    """Return the adapters that a run starts from: those of `trainer.lora.load`, or new ones.

    Raises:
        AdapterError, OSError: The files cannot be used. The text says why.
    """
    config = topology.trainer.lora
    if config.rank and config.load is not None:
        return peft_source(Path(config.load), model, config)
    return new_adapters(model, config, topology.run.seed)


def new_adapters(model: HfConfig, config: LoraConfig, seed: int) -> WeightSource:
    """Return new adapters, initialised as peft does: A uniform within 1 / sqrt(in) of 0, and B zero.

    Each A has a generator of its own. Its values depend neither on the parallel layout nor on other targets.
    """

    layers = {**linear_layers(model), **dict(expert_layers(model).values())}

    def draw(name: str, cut: TensorShard | None = None) -> Tensor:
        layer, letter, _ = name.rsplit(".", 2)
        rows, columns = layers[layer]
        if letter == LORA_B.partition(".")[0]:
            whole = torch.zeros(rows, config.rank)
        else:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            bound = columns**-0.5
            whole = torch.empty(config.rank, columns).uniform_(-bound, bound, generator=generator)
        return whole if cut is None else cut.of(whole)

    return draw


def adapters_of(chunk: Any) -> dict[str, Adapter]:
    """Map the name of each weight with an adapter, as the chunk has it, to the adapter. Empty: all weights train."""
    return {
        name.removesuffix(ADAPTER) + WEIGHT: module
        for name, module in chunk.named_modules()
        if isinstance(module, Adapter)
    }


def whole_adapters(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the adapters of a model on a single rank, by peft's names without its prefix."""
    found = [adapter for chunk in chunks for adapter in adapters_of(chunk).values()]
    return {name: parameter.detach() for adapter in found for _, name, parameter, _ in adapter.tensors()}


def has_adapters(chunk: Any) -> bool:
    """Return whether a chunk has adapters, which alone train then."""
    return bool(adapters_of(chunk))


def trained_tensors(chunk: Any) -> list[Any]:
    """Return the parameters of a chunk's adapters. Empty: the chunk has none, and all its weights train."""
    return [parameter for adapter in adapters_of(chunk).values() for parameter in adapter.parameters()]


def sharded_adapters(chunk: Any) -> dict[str, Any]:
    """Describe a chunk's adapters for Megatron's dist_checkpointing, under peft's names. Empty: it has no adapters."""
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    replicas_of_experts = parallel_state.get_expert_data_parallel_group()
    tensors = parallel_state.get_tensor_model_parallel_group()
    found: dict[str, Any] = {}
    for base, adapter in adapters_of(chunk).items():
        place = base.removesuffix(WEIGHT) + ADAPTER
        for own, name, parameter, shard in adapter.tensors():
            axes = {} if shard is None else {name: shard.dim}
            (found[f"{place}.{own}"],) = make_sharded_tensors_for_checkpoint(
                {name: parameter},
                "",
                axes,
                tp_group=tensors,
                dp_cp_group=replicas_of_experts if adapter.is_of_expert else replicas,
            ).values()
    return found


def merge_of(adapters: Mapping[str, Adapter], name: str, tensor: Any) -> Any:
    """Return a function that merges a weight with its adapter. None: the weight has no adapter."""
    adapter = adapters.get(name)
    return None if adapter is None else partial(adapter.merged, tensor.data)
