"""Quantized checkpoints as they are published: the tensors of the files that hold a matrix, and their shapes. No torch.

`quantization_config` of config.json names the method. Which matrices are quantized follows from the names of the
files' tensors, not from the lists of modules in it. `actors/trainer/models/dequantize.py` computes the numbers.

- `fp8`: `X` is float8_e4m3fn, `X_scale_inv` has the factor of each block of 128 x 128; the last block of
  a side may be smaller. transformers 5.23 divides each side evenly instead, see runtime/models/fp8.py.
- `mxfp4`: of a stack `X` [experts, in, out], `X_blocks` [experts, out, in / 32, 16] has two numbers of 4 bits
  in a byte, the first one in the lower half, and `X_scales` [experts, out, in / 32] their exponent of 2, plus 127.
- `compressed-tensors`: `X_packed` [out, in / 8] has eight integers of 4 bits in one of 32, plus 8,
  the first one in the lowest bits, and `X_scale` [out, in / 32] the factor of 32 columns; `X_shape` has the shape.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from runtime.models.directory import CONFIG, has_file, read_json
from runtime.models.fp8 import BLOCK, grid_of
from runtime.models.tensors import Shape

QUANTIZATION: Final = "quantization_config"
GROUP: Final = 32  # numbers with one scale, in 4 bits
PER_WORD: Final = 8  # integers of 4 bits in one of 32
PER_BYTE: Final = 2
FLOATS: Final = ("F64", "F32", "BF16", "F16")  # dtypes of weights, as safetensors spells them
# Keys that say how numbers are stored: the value of a missing key, and the supported ones.
_Supported = Mapping[str, tuple[Any, Sequence[Any]]]
_ALLOWED: Final[Mapping[str, _Supported]] = {  # by method
    "fp8": {
        "weight_block_size": ([BLOCK, BLOCK], [[BLOCK, BLOCK]]),
        "fmt": ("e4m3", ["e4m3", "float8_e4m3fn"]),
        "activation_scheme": ("dynamic", ["dynamic"]),
    },
    "mxfp4": {},
    "compressed-tensors": {
        "format": (None, ["pack-quantized"]),
        "quantization_status": ("compressed", ["compressed"]),
        **dict.fromkeys(("kv_cache_scheme", "sparsity_config", "transform_config"), (None, [None, {}])),
    },
}
_OF_GROUP: Final[_Supported] = {
    **dict.fromkeys(("input_activations", "output_activations"), (None, [None])),
    "format": (None, [None, "pack-quantized"]),
}
_OF_WEIGHTS: Final[_Supported] = {
    **{"num_bits": (None, [4]), "type": ("int", ["int"]), "strategy": (None, ["group"]), "group_size": (None, [GROUP])},
    **{"symmetric": (True, [True]), "dynamic": (False, [False])},
    **dict.fromkeys(("actorder", "block_structure"), (None, [None])),
}


class StoredForm(NamedTuple):
    """What a file must hold under a name."""

    dtypes: tuple[str, ...]  # as safetensors spells them
    shape: Shape


class Quantization(msgspec.Struct, frozen=True):
    """How the quantized matrices of a checkpoint are stored."""

    method: str  # quant_method of its quantization_config
    endings: tuple[str, ...]  # of the tensors that hold a matrix, behind its name

    def is_quantized(self, name: str, stored: Collection[str]) -> bool:
        """Whether the files have a tensor in this form."""
        return any(f"{name}{ending}" in stored for ending in self.endings if ending)

    def whole(self, stored: str) -> str:
        """Return the name of the tensor that a tensor of the files is a part of: the inverse of `forms`."""
        return next((stored.removesuffix(end) for end in self.endings if end and stored.endswith(end)), stored)

    def forms(self, name: str, shape: Sequence[int]) -> dict[str, StoredForm]:
        """Return the tensors of the files that hold a tensor, by name.

        Raises:
            ValueError: the method cannot hold a tensor of this shape.
        """
        *before, rows, columns = shape if len(shape) > 1 else (0, 0, 0)
        if len(shape) < 2 or (self.method == "mxfp4" and (len(shape) != 3 or rows % GROUP)):
            raise ValueError(f"{name} {list(shape)} cannot be quantized with {self.method}")
        if self.method == "fp8":
            found = [StoredForm(("F8_E4M3",), tuple(shape)), StoredForm(FLOATS, (*before, *grid_of((rows, columns))))]
        elif self.method == "mxfp4":
            grid = (*before, columns, rows // GROUP)
            found = [StoredForm(("U8",), (*grid, GROUP // PER_BYTE)), StoredForm(("U8",), grid)]
        elif columns % GROUP or before:
            raise ValueError(f"{name} {list(shape)}: {self.method} has groups of {GROUP} columns")
        else:
            found = [
                StoredForm(("I32",), (rows, columns // PER_WORD)),
                StoredForm(FLOATS, (rows, columns // GROUP)),
                StoredForm(("I32", "I64"), (2,)),
            ]
        return {f"{name}{ending}": form for ending, form in zip(self.endings, found, strict=True)}

    def shape(self, stored: Mapping[str, Sequence[int]]) -> Shape:
        """Return the shape of a tensor from those of the files' tensors that hold it, by the ending of their names."""
        if self.method == "fp8":
            return (*stored[""],)
        if self.method == "mxfp4":
            *before, columns, groups = stored["_scales"]
            return (*before, groups * GROUP, columns)
        rows, words = stored["_packed"]
        return rows, words * PER_WORD


METHODS: Final = {
    "fp8": Quantization("fp8", ("", "_scale_inv")),
    "mxfp4": Quantization("mxfp4", ("_blocks", "_scales")),
    "compressed-tensors": Quantization("compressed-tensors", ("_packed", "_scale", "_shape")),
}


class _Config(msgspec.Struct, frozen=True):
    quantization_config: Any = None
    text_config: Any = None


def quantization_of(directory: Path) -> Quantization | None:
    """Return how the files of a model directory are quantized. None: they are not, or in an unsupported way.

    Raises:
        ModelError: config.json cannot be read.
    """
    if not has_file(directory, CONFIG):
        return None
    config = read_json(directory, CONFIG, _Config)
    value, text = config.quantization_config, config.text_config
    if not value and isinstance(text, dict):
        value = cast("dict[str, Any]", text).get(QUANTIZATION)
    return None if not value or any(quantization_problems(value)) else METHODS[value["quant_method"]]


def quantization_problems(value: Any) -> Iterator[str]:
    """Yield why a quantization_config of config.json is not supported, each with the key."""
    if not value:
        return
    keys = cast("dict[str, Any]", value) if isinstance(value, dict) else {"quant_method": value}
    method = keys.get("quant_method")
    if not isinstance(method, str) or method not in METHODS or not isinstance(value, dict):
        yield (
            f"{QUANTIZATION} with quant_method {_short(method)} is not supported; supported: "
            f"{', '.join(map(_short, METHODS))}; or take an unquantized copy of the model"
        )
        return
    yield from _unsupported(keys, _ALLOWED[method], QUANTIZATION)
    if method == "compressed-tensors":
        groups: Any = keys.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            yield f"{QUANTIZATION}.config_groups {_short(groups)} is not supported; supported: a table of groups"
            return
        for name, group in cast("dict[str, Any]", groups).items():
            path = f"{QUANTIZATION}.config_groups.{name}"
            of_weights: Any = cast("dict[str, Any]", group).get("weights") if isinstance(group, dict) else None
            if not isinstance(of_weights, dict):
                yield f"{path} {_short(group)} is not supported; supported: a table with weights"
                continue
            yield from _unsupported(cast("dict[str, Any]", group), _OF_GROUP, path)
            yield from _unsupported(cast("dict[str, Any]", of_weights), _OF_WEIGHTS, f"{path}.weights")


def _unsupported(keys: Mapping[str, Any], supported: _Supported, path: str) -> Iterator[str]:
    """Yield the keys with other values than these."""
    for key, (default, values) in supported.items():
        value = keys.get(key, default)
        if value not in values:
            yield f"{path}.{key} {_short(value)} is not supported; supported: {', '.join(map(_short, values))}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
