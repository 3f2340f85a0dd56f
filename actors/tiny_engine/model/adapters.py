"""LoRA adapters: read from peft's files or from tensors, checked against the model, and added to linear layers.

Adapters are not merged: each row of a batch has its own, or none. The projections that share a fused weight have their
pairs joined. A holds the rows of all of them, and B has a block for each projection and zeros elsewhere. So an adapter
costs two narrow products for each linear layer.

Shapes: r rank, in and out sides of a linear layer, R rows of a batch.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.tiny_engine.model.experts import stacked
from actors.tiny_engine.model.forward import SAFETENSORS_DTYPE
from actors.tiny_engine.model.layers import Pair, Rows
from runtime.models.blocks import Experts, ModelShape, Weight
from runtime.models.checksums import combined, tensor_checksum
from runtime.models.directory import ModelError, read_json

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
ALL: Final = "all"  # target modules: every linear layer
_WEIGHT: Final = ".weight"
_KINDS: Final = ("lora_A.weight", "lora_B.weight")
_REFUSED: Final = (  # keys of peft that change what an adapter computes
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias"),
    *("layer_replication", "trainable_token_indices", "target_parameters", "layers_to_transform"),
)


class AdapterRefused(ValueError):
    """An adapter that this engine cannot serve. The text says why."""


class Place(NamedTuple):
    """Where the projection of a file is in the model."""

    layer: int
    held: str  # name of the fused weight in the layer, without `.weight`
    start: int  # its first row there
    rows: int  # out
    columns: int  # in
    fused_rows: int  # of the fused weight


class Adapter:
    """An adapter in memory. It never changes, so requests that hold it need no lock."""

    def __init__(self, name: str, path: str, checksum: str, layers: Sequence[Mapping[str, Pair]]) -> None:
        self.name = name
        self.checksum = checksum  # of its tensors as they came, as in runtime/models/checksums.py
        self.path = path  # where it was read; of tensors "__tensor__", as in SGLang
        self.layers = layers  # pairs of each layer of the model, by name of the fused weight without `.weight`


def rows_of(adapters: Sequence[Adapter | None]) -> Rows:
    """Group the rows of a batch by adapter; empty if none has one."""
    found: dict[Adapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            found.setdefault(adapter, []).append(row)
    return [(each.layers, None if len(rows) == len(adapters) else torch.tensor(rows)) for each, rows in found.items()]


def places(shape: ModelShape) -> dict[str, Place]:
    """Map each linear layer that can have an adapter to its place. In a model with experts: those of attention."""
    found: dict[str, Place] = {}
    for index, layer in enumerate(shape.layers):
        for each in layer.weights(shape.hidden_size):
            if (
                stacked(each) is not None
                or each.is_frozen
                or (isinstance(layer.mlp, Experts) and not each.name.startswith("self_"))
            ):
                continue
            (weight,) = shape.spelled([each.within("", f"model.layers.{index}")])
            found.update(_places_of(weight, index))
    return found


def _places_of(weight: Weight, layer: int) -> Iterator[tuple[str, Place]]:
    shapes = weight.in_files
    held, start = weight.name.lstrip("."), 0
    if not held.endswith(_WEIGHT) or any(len(shape) != 2 for shape in shapes.values()):
        return
    fused_rows = sum(rows for rows, _ in shapes.values())
    for part, (rows, columns) in shapes.items():
        place = Place(layer, held.removesuffix(_WEIGHT), start, rows, columns, fused_rows)
        yield part.removesuffix(_WEIGHT), place
        start += rows


class AdapterReader:
    """Makes adapters of files and tensors that fit the model and the server's flags. Safe to share between threads."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, *, max_rank: int, targets: Collection[str]) -> None:
        """Set up without any IO.

        Args:
            shape: shape of the model.
            dtype: dtype to compute in.
            max_rank: highest rank of an adapter.
            targets: last names of the layers that adapters may have, or `all`.
        """
        self._places = places(shape)
        self._num_layers = len(shape.layers)
        self._dtype = dtype
        self._max_rank = max_rank
        self._targets = targets

    def read(self, name: str, directory: Path) -> Adapter:
        """Read an adapter in peft's format.

        Raises:
            AdapterRefused: the files cannot be read, or do not fit.
        """
        try:
            config = read_json(directory, CONFIG, dict[str, Any])
            with safe_open(directory / TENSORS, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}
        except (ModelError, OSError, SafetensorError) as error:
            raise AdapterRefused(str(error)) from error
        return self.of(name, str(directory), config, tensors)

    def of(self, name: str, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
        """Make an adapter of tensors. As in SGLang, a layer without tensors stays as it is.

        Args:
            name: its name.
            path: where it comes from.
            config: contents of adapter_config.json.
            tensors: A [r, in] and B [out, r] by peft's names, in any dtype.

        Raises:
            AdapterRefused: it does not fit.
        """
        rank, scale = self._rank_and_scale(name, config)
        pairs: dict[Place, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            layer, kind = _layer_and_kind(name, key)
            place = self._places.get(layer)
            if place is None:
                raise AdapterRefused(f"LoRA adapter {name}: {key} is of no linear layer of this model")
            wanted = (rank, place.columns) if kind == _KINDS[0] else (place.rows, rank)
            if tuple(tensor.shape) != wanted:
                raise AdapterRefused(f"LoRA adapter {name}: {key} is {list(tensor.shape)}, expected {list(wanted)}")
            self._check_target(name, rank, layer.rpartition(".")[2])
            pairs.setdefault(place, {})[kind] = tensor
        for place, pair in pairs.items():
            if len(pair) != len(_KINDS):
                raise AdapterRefused(f"LoRA adapter {name}: layer {place.layer} has A or B of a pair alone")
        return Adapter(name, path, _checksum(tensors), self._joined(pairs, rank, scale))

    def _rank_and_scale(self, name: str, config: Mapping[str, Any]) -> tuple[int, float]:
        refused = [key for key in _REFUSED if config.get(key)]
        if refused or config.get("bias", "none") != "none" or config.get("peft_type", "LORA") != "LORA":
            what = (refused or ["bias" if config.get("bias", "none") != "none" else "peft_type"])[0]
            raise AdapterRefused(f"Failed to load LoRA adapter {name}: {what} is not supported")
        rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not targets:
            raise AdapterRefused(f"LoRA adapter {name}: r, lora_alpha or target_modules is missing in {CONFIG}")
        if rank > self._max_rank:
            self._refuse(name, rank)
        for target in [targets] if isinstance(targets, str) else targets:
            self._check_target(name, rank, target)
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def _check_target(self, name: str, rank: int, target: str) -> None:
        if ALL not in self._targets and target not in self._targets:
            self._refuse(name, rank)

    @staticmethod
    def _refuse(name: str, rank: int) -> None:
        raise AdapterRefused(
            f"LoRA adapter {name} with rank {rank} is incompatible with the current LoRA memory pool configuration. "
            "Please ensure that the LoRA adapter's rank is within the configured `--max-lora-rank` and that the target "
            "modules are included in `--lora-target-modules`."
        )

    def _joined(self, pairs: Mapping[Place, Mapping[str, Tensor]], rank: int, scale: float) -> list[dict[str, Pair]]:
        layers: list[dict[str, Pair]] = [{} for _ in range(self._num_layers)]
        of_fused: dict[tuple[int, str], list[Place]] = {}
        for place in pairs:
            of_fused.setdefault((place.layer, place.held), []).append(place)
        for (layer, held), own in of_fused.items():
            first, second = _KINDS
            a = torch.cat([pairs[place][first].to(self._dtype) for place in own])
            b = torch.zeros(rank * len(own), own[0].fused_rows, dtype=self._dtype)
            for number, place in enumerate(own):
                rows, columns = slice(number * rank, (number + 1) * rank), slice(place.start, place.start + place.rows)
                b[rows, columns] = pairs[place][second].to(self._dtype).t()
            layers[layer][held] = Pair(a, b, scale)
        return layers


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    sums: dict[str, str] = {}
    for name, tensor in tensors.items():
        spelled = str(tensor.dtype).removeprefix("torch.")
        data = tensor.contiguous().view(torch.uint8).numpy().data
        sums[name] = tensor_checksum(name, SAFETENSORS_DTYPE.get(spelled, spelled), tensor.shape, data)
    return combined(sums).total


def _layer_and_kind(name: str, key: str) -> tuple[str, str]:
    for kind in _KINDS:
        if key.startswith(PREFIX) and key.endswith(f".{kind}"):
            return key.removeprefix(PREFIX).removesuffix(f".{kind}"), kind
    raise AdapterRefused(f"LoRA adapter {name}: {key} is not a name of peft's files")
