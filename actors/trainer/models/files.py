"""Model directories in Hugging Face's format, read one tensor at a time and written; and random weights.

A `WeightSource` returns full tensors, or one rank's shard of them.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.dequantize import dequantized
from actors.trainer.models.shapes import VALUE_BIAS, VALUE_HEAD, copies_of, hf_shapes, weights_of
from actors.trainer.models.shards import Added, Entry, add_tensors, bytes_of, entry_of, write_weights
from runtime.models.config import TEXT
from runtime.models.config_keys import IGNORED
from runtime.models.directory import (
    CONFIG,
    COPIED_FILES,
    GENERATION_CONFIG,
    code_files,
    copy_files,
    has_file,
    read_json,
)
from runtime.models.fp8 import quantization_config
from runtime.models.quantization import QUANTIZATION, Quantization, quantization_of
from runtime.models.safetensors import INDEX_FILE, SINGLE_FILE, read_tensors, safetensors_files, shards_by_tensor
from runtime.settings.tables.engines import WeightFormat
from runtime.settings.topology import Topology

DECAYS: Final = (0.01, 16.0)  # bounds of the decay of new linear layers, as in transformers


@dataclass(frozen=True)
class TensorShard:
    """One of the equal shards of a tensor, or of some rows of it, or of one tensor of a stack."""

    dim: int
    index: int
    count: int
    rows: tuple[int, int] | None = None  # the first row, and how many; None: all
    number: int | None = None  # of the tensor in its stack; None: there is no stack

    def of(self, whole: Tensor) -> Tensor:
        """Return this shard of a full tensor."""
        whole = whole if self.number is None else whole[self.number]
        own = whole if self.rows is None else whole.narrow(0, *self.rows)
        return own.chunk(self.count, dim=self.dim)[self.index]


class WeightSource(Protocol):
    """Returns tensors by their Hugging Face name."""

    def __call__(self, name: str, cut: TensorShard | None = None) -> Tensor:
        """Return the full tensor, or a shard of it."""
        ...


def base_source(topology: Topology, model: HfConfig) -> WeightSource:
    """Return the weights that a run's model starts from: random ones, or those of `model.hf_checkpoint`.

    Raises:
        ValueError, FileNotFoundError: as in `file_source`.
    """
    if topology.model.random_init:
        return random_source(model, topology.run.seed)
    return file_source(Path(topology.model.hf_checkpoint), getattr(torch, topology.model.dtype))


def random_source(model: HfConfig, seed: int) -> WeightSource:
    """Random weights, initialised as in transformers: matrices normal, norms one, biases zero.

    Each tensor has its own generator. Its values therefore depend neither on the parallel layout nor on the order of
    calls.
    """
    shapes = hf_shapes(model)
    starts = {name: weight.start for weight in weights_of(model).values() for name in weight.in_files}
    copied = {copy: name for name in shapes for copy in copies_of(name, model)}

    def draw(name: str, cut: TensorShard | None = None) -> Tensor:
        whole = draw_whole(copied.get(name, name))
        return whole if cut is None else cut.of(whole)

    def draw_whole(name: str) -> Tensor:
        shape, start = shapes[name], starts.get(name, "")
        if start == "one":
            return torch.ones(shape)
        if start == "decay":
            return _uniform(shape, seed, name).mul_(DECAYS[1] - DECAYS[0]).add_(DECAYS[0]).log_()
        if name.endswith("bias"):
            return torch.zeros(shape)
        if name.endswith("norm.weight"):
            return torch.zeros(shape) if model.has_centred_norms else torch.ones(shape)
        return _normal(shape, seed, name) * model.initializer_range

    return draw


def _normal(shape: Sequence[int], seed: int, name: str) -> Tensor:
    return torch.randn(*shape, generator=_generator(seed, name))


def _uniform(shape: Sequence[int], seed: int, name: str) -> Tensor:
    return torch.rand(*shape, generator=_generator(seed, name))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def value_head_source(
    source: WeightSource, model: HfConfig, stored: Collection[str], *, seed: int, std: float
) -> WeightSource:
    """Add a new value head to a source of weights that lacks one: normal with mean 0, its bias 0.

    Args:
        source: weights of the model.
        model: configuration with a value head.
        stored: names of the source's tensors.
        seed: seed of the new head.
        std: standard deviation of its weight.
    """

    def read(name: str, cut: TensorShard | None = None) -> Tensor:
        if name in stored or name not in (VALUE_HEAD, VALUE_BIAS):
            return source(name, cut)
        return torch.zeros(1) if name == VALUE_BIAS else _normal((1, model.hidden_size), seed, name) * std

    return read


def file_source(directory: Path, dtype: torch.dtype = torch.float32) -> WeightSource:
    """Return a source that reads a model directory's safetensors files, one tensor or shard at a time.

    Args:
        directory: of the model. What its config.json names as quantized is dequantized, of a shard that shard alone.
        dtype: of tensors that are dequantized; the others have that of the files.

    Raises:
        ValueError: the directory has no safetensors file, or its index cannot be used.
        FileNotFoundError: a file that the index names is missing.
    """
    if has_file(directory, INDEX_FILE):
        files = shards_by_tensor(directory)
    elif has_file(directory, SINGLE_FILE):
        (only,) = safetensors_files(directory)
        with safe_open(only, framework="pt") as file:
            files = dict.fromkeys(file.keys(), only)
    else:
        raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    quantization = quantization_of(directory)

    def read(name: str, cut: TensorShard | None = None) -> Tensor:
        if quantization is not None and quantization.is_quantized(name, files):
            return dequantize(name, quantization, cut)
        if name not in files:
            raise ValueError(f"{directory} has no tensor {name}")
        with safe_open(files[name], framework="pt") as file:
            return file.get_tensor(name) if cut is None else _part(file.get_slice(name), cut)

    def dequantize(name: str, quantization: Quantization, cut: TensorShard | None) -> Tensor:
        with ExitStack() as opened:
            parts: dict[str, Any] = {}
            for ending in quantization.endings:
                if (stored := f"{name}{ending}") not in files:
                    raise ValueError(f"{directory} has no tensor {stored}, and others of {name}")
                parts[ending] = opened.enter_context(safe_open(files[stored], framework="pt")).get_slice(stored)
            shape = quantization.shape({ending: part.get_shape() for ending, part in parts.items()})
            found = dequantized(quantization, parts, region_of(shape, cut), dtype)
        return found if cut is None or cut.number is None else found[0]

    return read


def region_of(shape: Sequence[int], cut: TensorShard | None) -> list[range]:
    """Return the indices of a shard along each dimension of a tensor, or of the stack that has it; None: all."""
    if cut is None:
        return [range(size) for size in shape]
    stack = [] if cut.number is None else [range(cut.number, cut.number + 1)]
    own = [range(size) for size in shape[len(stack) :]]
    if cut.rows is not None:
        own[0] = range(cut.rows[0], sum(cut.rows))
    size = -(-len(own[cut.dim]) // cut.count)
    own[cut.dim] = own[cut.dim][cut.index * size : (cut.index + 1) * size]
    return [*stack, *own]


def _part(whole: Any, cut: TensorShard) -> Tensor:
    """Read a shard. The rest of the tensor stays on disk."""
    region = region_of(whole.get_shape(), cut)
    found = whole[tuple(slice(indices.start, indices.stop) for indices in region)]
    return found if cut.number is None else found[0]


def write_model(
    weights: Mapping[str, Tensor], directory: Path, *, model_directory: Path, ignored: Collection[str] = ()
) -> None:
    """Write tensors in memory as a Hugging Face model directory.

    Args:
        weights: full tensors by name.
        directory: existing directory.
        model_directory: directory to copy the configuration from.
        ignored: keys to leave out of it.
    """
    write_weights(weights, directory)
    copy_small_files(model_directory, directory, tokenizer=False, ignored=ignored)


def copy_small_files(model_directory: Path, directory: Path, *, tokenizer: bool, ignored: Collection[str] = ()) -> None:
    """Copy a model directory's configuration; with `tokenizer`, also its tokenizer, its code and its licence.

    Ignored keys are moved into one that no class reads, so that the copy describes the model that was trained. It has
    no quantization_config, as the weights that are written beside it are not quantized.
    """
    names = (*COPIED_FILES, *code_files(model_directory)) if tokenizer else (CONFIG, GENERATION_CONFIG)
    copy_files(model_directory, directory, names)
    values: dict[str, Any] = read_json(directory, CONFIG, dict[str, Any])
    text: dict[str, Any] = values[TEXT] if isinstance(values.get(TEXT), dict) else {}
    taken = {key: of.pop(key) for of in (values, text) for key in ignored if key in of}
    dropped = [of.pop(QUANTIZATION) for of in (values, text) if QUANTIZATION in of]
    if taken:
        before = values.get(IGNORED)  # of a model that another run exported
        values |= {IGNORED: (before if isinstance(before, dict) else {}) | taken}
    if taken or dropped:
        _write_config(directory / CONFIG, values)


def add_copied(model_directory: Path, directory: Path, model: HfConfig) -> None:
    """Add to an exported directory the tensors of the base model's files that are not built, with their bytes.

    Quantized ones are dequantized to bfloat16. A model with a value head is a classifier, which has none of them.
    """
    if model.has_value_head or not model.copied:
        return
    stored = {name: each for name, each in read_tensors(model_directory).items() if model.is_copied(name)}
    quantization = quantization_of(model_directory)
    packed = {} if quantization is None else {quantization.whole(name): quantization for name in stored}
    source, added = file_source(model_directory, torch.bfloat16), list[Added]()
    for name, form in packed.items():
        if form.is_quantized(name, stored):
            parts = {ending: stored.pop(f"{name}{ending}").shape for ending in form.endings}
            entry = entry_of(name, torch.empty(form.shape(parts), dtype=torch.bfloat16, device="meta"))
            added.append(Added(entry, lambda name=name: bytes_of(source(name))))
    added += [Added(Entry(*each[:3], each.size_bytes), each.data) for each in stored.values()]
    if added:
        add_tensors(directory, added)


def set_dtype(config: Path, dtype: str) -> None:
    """Set the dtype in config.json, and in that of a text model inside. A loader rounds the weights to this dtype."""
    values: dict[str, Any] = msgspec.json.decode(config.read_bytes())
    names = ("dtype", "torch_dtype")  # the newer and the older one
    text = values.get(TEXT)
    inside = [key for key in names if key in text] if isinstance(text, dict) else []
    if inside:
        values[TEXT] = values[TEXT] | dict.fromkeys(inside, dtype)
    keys = [key for key in names if key in values] or ([] if inside else ["torch_dtype"])
    _write_config(config, values | dict.fromkeys(keys, dtype))


def set_value_head(config: Path, model: HfConfig) -> None:
    """Name the classifier of transformers with one label in config.json that a model with a value head is.

    Its head has the names of `hf_shapes`: a classifier of tokens has a bias, one of sequences has none. Other models
    stay as they are.
    """
    if not model.has_value_head:
        return
    values: dict[str, Any] = msgspec.json.decode(config.read_bytes())
    kind = "ForTokenClassification" if model.has_value_bias else "ForSequenceClassification"
    named = model.architecture.replace("ForCausalLM", kind)
    label = "LABEL_0"  # as transformers names it
    _write_config(config, values | {"architectures": [named], "id2label": {"0": label}, "label2id": {label: 0}})


def set_format(config: Path, weight_format: WeightFormat, shapes: Mapping[str, Sequence[int]]) -> None:
    """Record the dtype and quantization of the weights in config.json. No change if they are "as_trained".

    Args:
        config: path of config.json.
        weight_format: dtype or quantization of the weights.
        shapes: shapes of all tensors by name.
    """
    if weight_format == "as_trained":
        return
    set_dtype(config, "bfloat16")
    if weight_format == "fp8":
        values: dict[str, Any] = msgspec.json.decode(config.read_bytes())
        _write_config(config, values | {"quantization_config": quantization_config(shapes)})


def _write_config(config: Path, values: Mapping[str, Any]) -> None:
    config.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n")
