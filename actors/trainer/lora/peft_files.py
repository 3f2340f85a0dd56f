"""Adapters in the files of peft 0.21: `adapter_config.json` and `adapter_model.safetensors`.

Experts are `target_parameters` there. A file has the pairs of a layer's experts stacked: A is [experts * rank, in],
expert by expert; B is [out, rank * experts], with the experts last. peft wraps one stack in the other: with both, the
names of `gate_up_proj` have `base_layer`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from actors.trainer.lora.targets import (
    ALL_LINEAR,
    LORA_A,
    adapter_shapes,
    expert_layers,
    expert_of,
    last_name,
    linear_layers,
    targeted,
)
from actors.trainer.models.config import HfConfig
from runtime.models.directory import ModelError, read_json
from runtime.models.safetensors import ADAPTER_FILE, read_file
from runtime.settings.tables.trainer import EXPERTS, LoraConfig
from runtime.util.formatting import count_of

if TYPE_CHECKING:
    from torch import Tensor

    from actors.trainer.models.files import WeightSource

CONFIG: Final = "adapter_config.json"
TENSORS: Final = ADAPTER_FILE
PREFIX: Final = "base_model.model."
_COMPARED: Final = ("r", "lora_alpha", "use_rslora")
_TARGETS: Final = ("target_modules", "target_parameters")
# Keys that say where an adapter is from, or how it was initialised: they change nothing once it has values.
_WITHOUT_EFFECT: Final = (
    *("peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("init_lora_weights", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core"),
    *("qalora_group_size", "ensure_weight_tying", "lora_dropout", "runtime_config"),
)
_NEUTRAL: Final[Mapping[str, Any]] = {"peft_type": "LORA", "bias": "none"}


class AdapterError(ValueError):
    """The files of an adapter cannot be used. The message names the file and the key or tensor."""


def adapter_problems(directory: Path, model: HfConfig, config: LoraConfig) -> Iterator[str]:
    """Yield what keeps a run from starting from an adapter.

    Args:
        directory: Directory of the adapter.
        model: Configuration of the run's model.
        config: Settings of the run's adapters.

    Raises:
        NoTarget: As in `targeted`.
    """
    place = directory / CONFIG
    try:
        found = read_json(directory, CONFIG, dict[str, Any])
    except ModelError as error:
        yield str(error)
        return
    for key, value in found.items():
        if key not in (*_COMPARED, *_WITHOUT_EFFECT, *_TARGETS) and value != _NEUTRAL.get(key) and value:
            yield f"{place}: {key} = {msgspec.json.encode(value).decode():.60} is not implemented yet"
    expected = config_values(model, config)
    for key in _COMPARED:
        if found.get(key) != expected[key]:
            yield f"{place}: {key} is {found.get(key)}, and {expected[key]} by trainer.lora"
    there, here = set(_layers_of(found.get("target_modules"), model)), targeted(model, config).keys()
    there |= set(_experts_of(found.get("target_parameters"), model))
    if other := sorted(there ^ here):
        where = "the adapter" if other[0] in there else "trainer.lora.targets"
        yield f"{place}: {where} alone has {count_of(len(other), 'layer')}, such as {other[0]}"
    yield from _tensor_problems(directory / TENSORS, _file_shapes(model, config))


def _layers_of(targets: Any, model: HfConfig) -> Iterator[str]:
    """Yield the layers that `target_modules` of an adapter_config.json names: ends of their names, or a pattern."""
    for layer in linear_layers(model):
        if isinstance(targets, str):
            if targets == ALL_LINEAR or re.fullmatch(targets, layer):
                yield layer
        elif any(f".{layer}".endswith(f".{target}") for target in targets or ()):
            yield layer


def _experts_of(targets: Sequence[str] | None, model: HfConfig) -> Iterator[str]:
    """Yield the layers of experts that `target_parameters` of an adapter_config.json names, by ends of their names."""
    for layer, _ in expert_layers(model).values():
        if any(f".{last_name(layer)}".endswith(f".{target}") for target in targets or ()):
            yield layer


def _place_of(name: str, config: LoraConfig) -> tuple[str, int | None]:
    """Return the name in the files of a tensor of an adapter, and of which expert it is a part there; None: of none."""
    layer, letter, weight = name.rsplit(".", 2)
    if (expert := expert_of(layer)) is None:
        return name, None
    before, number, stack = expert
    wrapped = "base_layer." if stack == "gate_up_proj" and len(config.of_experts) > 1 else ""
    return f"{before}{EXPERTS}{wrapped}{letter}.{weight}", number


def _file_shapes(model: HfConfig, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in adapter_shapes(model, config).items():
        place, number = _place_of(name, config)
        count = 1 if number is None else number + 1  # experts come in order
        found[place] = (rows * count, columns) if name.endswith(LORA_A) else (rows, columns * count)
    return found


def in_files(tensors: "Mapping[str, Tensor]", config: LoraConfig) -> "Iterator[tuple[str, Tensor]]":
    """Yield the tensors of the files: those of experts stacked, others as they are."""
    import torch

    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        place, number = _place_of(name, config)
        if number is None:
            yield place, tensor
        else:
            stacks.setdefault(place, {})[number] = tensor
    for place, found in stacks.items():
        own = [found[number] for number in sorted(found)]
        yield place, torch.cat(own) if place.endswith(LORA_A) else torch.stack(own, dim=-1).flatten(1)


def _tensor_problems(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    try:
        found = {tensor.name.removeprefix(PREFIX): tensor for tensor in read_file(path).tensors}
    except (OSError, ValueError) as error:
        yield str(error)
        return
    for name, shape in shapes.items():
        if name not in found:
            yield f"{path} has no tensor {PREFIX}{name}"
        elif tuple(found[name].shape) != shape:
            yield f"{path}: {PREFIX}{name} has shape {list(found[name].shape)}; the model needs {list(shape)}"
    for name in found.keys() - shapes.keys():
        yield f"{path}: {PREFIX}{name} is of no layer that trainer.lora.targets names"


def config_values(model: HfConfig, config: LoraConfig, base: str | None = None) -> dict[str, Any]:
    """Return the adapter_config.json of adapters.

    Args:
        model: Configuration of the model.
        config: Settings of the adapters.
        base: Directory or name of the base model.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "use_rslora": config.rslora,
        "target_modules": sorted({last_name(layer) for layer in targeted(model, config)} - set(config.of_experts)),
        **({"target_parameters": sorted(config.of_experts)} if config.of_experts else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }


def peft_source(directory: Path, model: HfConfig, config: LoraConfig) -> "WeightSource":
    """Return a source that reads an adapter's tensors, by peft's names without its prefix.

    Raises:
        AdapterError: The files cannot be used.
    """
    from safetensors import safe_open

    for problem in adapter_problems(directory, model, config):
        raise AdapterError(problem)

    @lru_cache(maxsize=4)  # the stacks of a layer, which its experts read one after another
    def in_file(place: str) -> "Tensor":
        with safe_open(directory / TENSORS, framework="pt") as file:
            return file.get_tensor(f"{PREFIX}{place}")

    def read(name: str, cut: Any = None) -> "Tensor":
        place, number = _place_of(name, config)
        whole = in_file(place)
        if number is not None and name.endswith(LORA_A):
            whole = whole.unflatten(0, (-1, config.rank))[number]
        elif number is not None:
            whole = whole.unflatten(1, (config.rank, -1))[..., number]
        return whole if cut is None else cut.of(whole)

    return read


def write_adapter(
    tensors: Mapping[str, "Tensor"], directory: Path, *, model: HfConfig, config: LoraConfig, base: str
) -> None:
    """Write an adapter.

    Args:
        tensors: Full tensors by peft's names without its prefix.
        directory: Existing directory.
        model: Configuration of the model.
        config: Settings of the adapters.
        base: Directory or name of the base model.
    """
    from safetensors.torch import save_file

    named = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in in_files(tensors, config)}
    save_file(named, directory / TENSORS, metadata={"format": "pt"})
    values = msgspec.json.format(msgspec.json.encode(config_values(model, config, base)), indent=2)
    (directory / CONFIG).write_bytes(values + b"\n")
