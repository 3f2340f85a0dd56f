"""Linear layers that get adapters, by the names of Hugging Face's modules, and the shapes of the adapters. No torch."""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import frozen_names, hf_shapes
from runtime.models.blocks import DeltaNet
from runtime.models.tensors import Shape
from runtime.settings.tables.trainer import LoraConfig

ALL_LINEAR: Final = "all-linear"
LORA_A: Final = "lora_A.weight"
LORA_B: Final = "lora_B.weight"
_MLP: Final = ".mlp."
_LINEAR: Final = f".{DeltaNet.of_files}."
_ROUTER: Final = "gate"
_OUTSIDE: Final = ("lm_head", "embed_tokens")


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
    for name in names:
        _check(name, model, layers)
    found = {layer: shape for layer, shape in layers.items() if last_name(layer) in names}
    for layer, shape in found.items():
        if config.rank > min(shape):
            raise NoTarget(f"rank = {config.rank} is above {min(shape)}, a side of {layer}: choose a lower rank")
    return found


def last_name(layer: str) -> str:
    """Return the name that stands for a layer in `targets`."""
    return layer.rpartition(".")[2]


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
