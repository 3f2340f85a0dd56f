"""Linear layers that get adapters, by the names of Hugging Face's modules, and the shapes of the adapters. No torch.

Experts are targets by the names of transformers' stacks, such as `mlp.experts.down_proj`. Each expert has a pair of its
own, under the name of a layer `model.layers.0.mlp.experts.3.down_proj`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import frozen_names, hf_shapes, weights_of
from runtime.models.blocks import DeltaNet
from runtime.models.tensors import Shape
from runtime.settings.tables.trainer import EXPERTS, LoraConfig

ALL_LINEAR: Final = "all-linear"
LORA_A: Final = "lora_A.weight"
LORA_B: Final = "lora_B.weight"
_MLP: Final = ".mlp."
_LINEAR: Final = f".{DeltaNet.of_files}."
_ROUTER: Final = "gate"
_OUTSIDE: Final = ("lm_head", "embed_tokens")
_IN_MEGATRON: Final = re.compile(r"decoder\.(layers\.\d+\.)mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_EXPERT: Final = re.compile(r"(?P<before>.+\.)mlp\.experts\.(?P<number>\d+)\.(?P<stack>gate_up_proj|down_proj)")
_STACKS: Final = {"1": "gate_up_proj", "2": "down_proj"}


class NoTarget(ValueError):
    """A target cannot have an adapter. The message says why."""


@lru_cache(maxsize=8)
def linear_layers(model: HfConfig) -> Mapping[str, Shape]:
    """Map each linear layer that can have an adapter to its shape [out, in], in layer order.

    Projections of linear attention have none yet. In a model with experts those of attention alone: by the names of
    the others, peft 0.21 means stacked experts.
    """
    return {
        name.removesuffix(".weight"): shape
        for name, shape in hf_shapes(model).items()
        if name.startswith("model.layers.")
        and _LINEAR not in name
        and len(shape) == 2
        and (model.experts is None or _MLP not in name)
        and name not in frozen_names(model)
    }


class ExpertLayer(NamedTuple):
    """A matrix of one expert."""

    name: str  # as that of a linear layer, with the number of the expert
    shape: Shape  # [out, in]


@lru_cache(maxsize=8)
def expert_layers(model: HfConfig) -> Mapping[str, ExpertLayer]:
    """Map Megatron's name of each expert's matrix to the layer, in layer order.

    Empty without experts, and for experts that transformers stacks as [in, out] or under other names.
    """
    found: dict[str, ExpertLayer] = {}
    for name, weight in weights_of(model).items():
        match = _IN_MEGATRON.fullmatch(name)
        if match is None or weight.is_transposed or weight.is_alternating or weight.is_stored_joined:
            continue
        layer, number, linear = match.groups()
        expert = f"model.{layer}{EXPERTS}{number}."
        if all(part.startswith(expert) for part in weight.parts):
            rows, columns = (next(iter(weight.parts.values()))[dim] for dim in (0, 1))
            found[name] = ExpertLayer(f"{expert}{_STACKS[linear]}", (rows * len(weight.parts), columns))
    return found


def expert_of(layer: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's layer: what is before `mlp.experts`, its number, its stack. None: another layer."""
    match = _EXPERT.fullmatch(layer)
    return None if match is None else (match["before"], int(match["number"]), match["stack"])


def targeted(model: HfConfig, config: LoraConfig) -> dict[str, Shape]:
    """Map the layers that get adapters to their shapes [out, in].

    Args:
        model: Configuration of the model.
        config: Settings with a rank above 0.

    Raises:
        NoTarget: A name stands for no layer that can have an adapter, or the rank is above a side of a layer.
    """
    layers = linear_layers(model)
    if not layers:
        raise NoTarget("the text model of a directory with an image tower has no adapters yet")
    names = dict.fromkeys(last_name(layer) for layer in layers) if config.targets == ALL_LINEAR else config.targets
    every = {**layers, **dict(expert_layers(model).values())}
    for name in names:
        _check(name, model, every)
    found = {layer: shape for layer, shape in every.items() if last_name(layer) in names}
    for layer, shape in found.items():
        if config.rank > min(shape):
            raise NoTarget(f"rank = {config.rank} is above {min(shape)}, a side of {layer}: choose a lower rank")
    return found


def last_name(layer: str) -> str:
    """Return the name that stands for a layer in `targets`; for experts, the name of their stack in a decoder layer."""
    expert = expert_of(layer)
    return layer.rpartition(".")[2] if expert is None else EXPERTS + expert[2]


def _check(name: str, model: HfConfig, layers: Mapping[str, Shape]) -> None:
    known = dict.fromkeys(map(last_name, layers))
    if name in known:
        return
    allowed = f'allowed: "{ALL_LINEAR}", or some of {", ".join(known)}'
    if name in _OUTSIDE and model.tie_word_embeddings:
        raise NoTarget(f"target {name}: embedding and lm_head are one tensor (tie_word_embeddings); {allowed}")
    if name in _OUTSIDE:
        raise NoTarget(f"target {name} is not implemented yet; {allowed}")
    others = {last_name(each.removesuffix(".weight")) for each in hf_shapes(model) if _MLP in each}
    if name == _ROUTER and name in others:
        raise NoTarget(f"target {name}: a router never has an adapter; {allowed}")
    if name in others:
        raise NoTarget(f"target {name} of a model with experts is not implemented yet; {allowed}")
    raise NoTarget(f"target {name}: the model has no such linear layer; {allowed}")


def adapter_shapes(model: HfConfig, config: LoraConfig) -> dict[str, Shape]:
    """Map the tensors of all adapters to their shapes: A is [rank, in], B is [out, rank].

    Raises:
        NoTarget: As in `targeted`.
    """
    return dict(_tensors(targeted(model, config), config.rank))


def num_adapter_weights(model: HfConfig, config: LoraConfig) -> int:
    """Count the weights of all adapters. Raises as `targeted` does."""
    return sum(math.prod(shape) for shape in adapter_shapes(model, config).values())


def _tensors(layers: Mapping[str, Shape], rank: int) -> Iterator[tuple[str, Shape]]:
    for layer, (rows, columns) in layers.items():
        yield f"{layer}.{LORA_A}", (rank, columns)
        yield f"{layer}.{LORA_B}", (rows, rank)
