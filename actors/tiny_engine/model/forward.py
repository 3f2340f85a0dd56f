"""Weights and forward pass of a model in plain tensor operations, in float32 or bfloat16.

Weights are stored fused, for the forward pass. `Weights.named` holds views of them by Hugging Face name, for
loading and random initialization. How a layer mixes tokens is in layers.py and delta_net.py.

Shapes: N leading dimensions (tokens, or batch x time), H heads, K KV heads, D head size, E hidden size.
"""

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.tiny_engine.model.delta_net import mixed
from actors.tiny_engine.model.experts import BIAS, activated, experts_output, stacked
from actors.tiny_engine.model.layers import Layer, Past, Rows, attended, linear, normed
from runtime.models.blocks import Attention, DeltaNet, Experts, ModelShape, Weight, norm
from runtime.models.config import ModelError
from runtime.models.safetensors import safetensors_files

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHECKSUM_DIGITS: Final = 16
SAFETENSORS_DTYPE: Final = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_STAMPS: Final = itertools.count(1)


@dataclass(slots=True)
class Weights:
    """Weights of a model. `named` holds views by Hugging Face name, `dtypes` the dtype of each tensor's source."""

    config: ModelShape
    embedding: Tensor  # [vocabulary, E]
    head: Tensor  # [vocabulary, E]; the embedding itself if tied
    norm: Tensor  # [E]
    layers: list[Layer]
    fused: dict[str, Tensor]  # all of them by SGLang's names
    named: dict[str, Tensor]
    dtypes: dict[str, str] = field(default_factory=dict[str, str])
    stamp: int = 0  # changes with the values: what was computed under another stamp is of other weights

    def settle(self) -> None:
        """Recompute derived tensors and change the stamp. Call it after the named tensors changed."""
        self.stamp = next(_STAMPS)
        for layer in self.layers:
            if isinstance(layer.attention, Attention) and layer.attention.head_norms:
                norms = torch.stack([layer.held[f"self_attention.{kind}_layernorm.weight"] for kind in ("q", "k")])
                norms = norms.float() + 1.0 if self.config.has_centred_norms else norms
                repeats = torch.tensor([layer.attention.heads, layer.attention.kv_heads])
                layer.qk_scale = norms.repeat_interleave(repeats, dim=0)

    def checksums(self) -> dict[str, str]:
        """Hash the fused tensors, by SGLang's names, with SGLang's hash for the CPU."""
        data = {name: _data_of(tensor) for name, tensor in self.fused.items()}
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="sums") as executor:
            return dict(zip(data, executor.map(_checksum, data.values()), strict=True))


def _data_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _checksum(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:CHECKSUM_DIGITS]


def allocate(config: ModelShape, dtype: torch.dtype = torch.float32) -> Weights:
    """Allocate weights in the dtype to compute in. Their values are undefined until they are loaded or initialized."""
    fused, named = dict[str, Tensor](), dict[str, Tensor]()

    def new(name: str, *shape: int, kept: torch.dtype = dtype) -> Tensor:
        fused[name] = torch.empty(shape, dtype=kept)
        return fused[name]

    def make(weight: Weight, held: dict[str, Tensor]) -> Tensor:
        """Allocate a weight, or the stack that it belongs to, as an entry of `held`, and name the parts."""
        rows, further = [shape[0] for shape in weight.parts.values()], next(iter(weight.parts.values()))[1:]
        place, name = stacked(weight), weight.name.lstrip(".")
        if place is None:
            kept = torch.float32 if name.endswith(BIAS) else dtype
            held[name] = tensor = new(weight.engine_name, sum(rows), *further, kept=kept)
        else:
            name = place.name.lstrip(".")
            if name not in held:
                assert config.experts is not None
                held[name] = new(place.engine_name, config.experts.num_experts, sum(rows), *further)
            tensor = held[name][place.number]
        if weight.place is not None:  # the files have the stack, too
            named.update(dict.fromkeys(weight.in_files, held[name]))
        elif weight.is_stored_joined:
            named[weight.joined] = tensor
        else:
            named.update(zip(weight.parts, tensor.split(rows), strict=True))
        return tensor

    vocabulary, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    outside = [Weight("", {"model.embed_tokens.weight": vocabulary}), Weight("", {"lm_head.weight": vocabulary})]
    of_embedding, of_head, of_norm = config.spelled([*outside, norm("", hidden, "model.norm")])
    embedding = make(of_embedding, {})
    head = embedding if config.tie_word_embeddings else make(of_head, {})
    layers = [Layer(layer.attention, layer.mlp, {}) for layer in config.layers]
    for index, weight in _weights_of_layers(config):
        make(weight, layers[index].held)
    final = make(of_norm, {})
    return Weights(config=config, embedding=embedding, head=head, norm=final, layers=layers, fused=fused, named=named)


def _weights_of_layers(config: ModelShape) -> Iterator[tuple[int, Weight]]:
    """Yield the tensors of all layers with the number of the layer, by their names in the files."""
    for index, layer in enumerate(config.layers):
        for weight in layer.weights(config.hidden_size):
            yield from ((index, own) for own in config.spelled([weight.within("", f"model.layers.{index}")]))


def load(
    config: ModelShape, directory: Path, dtype: torch.dtype = torch.float32, *, num_mtp_layers: int = 0
) -> Weights:
    """Read a safetensors checkpoint into new memory, in the dtype to compute in.

    Args:
        config: shape of the model.
        directory: of the checkpoint.
        dtype: dtype to compute in.
        num_mtp_layers: number of layers of the files after the last one, which are skipped.

    Raises:
        ModelError: a file is missing or damaged, or names, shapes or dtypes do not fit the model.
    """
    weights, head = allocate(config, dtype), config.name_of("lm_head.weight")
    if config.tie_word_embeddings:
        weights.named[head] = weights.embedding  # some writers store the tied head a second time
    try:
        for file in safetensors_files(directory):
            _load_file(weights, file, num_mtp_layers)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{directory}: {error}") from error
    missing = weights.named.keys() - weights.dtypes.keys()
    if config.tie_word_embeddings:
        missing.discard(head)
    if missing:
        raise ModelError(f"{directory}: {len(missing)} tensors are missing, {min(missing)} among them")
    weights.settle()
    return weights


def layer_of(name: str) -> int:
    """Layer index in a tensor's name; -1 if there is none."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal() else -1


def _load_file(weights: Weights, file: Path, num_mtp_layers: int) -> None:
    num_layers = weights.config.num_layers
    with safe_open(file, framework="pt") as source:
        for name in source.keys():  # safe_open has keys(), but is not a mapping
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a buffer that older tools wrote
            if num_layers <= layer_of(name) < num_layers + num_mtp_layers or weights.config.is_copied(name):
                continue
            if name not in weights.named:
                raise ValueError(f"{file.name} holds {name}, which this {weights.config.architecture} does not have")
            tensor = source.get_tensor(name)
            dtype = next((spelled for spelled, known in DTYPES.items() if known is tensor.dtype), None)
            if dtype is None:
                raise ValueError(f"{file.name}: {name} has dtype {tensor.dtype}; supported: {', '.join(DTYPES)}")
            room = weights.named[name]
            if tensor.shape != room.shape:
                raise ValueError(f"{file.name}: {name} is {list(tensor.shape)}, the model has {list(room.shape)}")
            room.copy_(tensor)
            weights.dtypes[name] = dtype


def draw(config: ModelShape, *, seed: int, std: float, dtype: str, computed_in: torch.dtype = torch.float32) -> Weights:
    """Initialize weights at random: norms multiply by 1, biases are 0, others normal and rounded to `dtype`.

    Logarithms of decays are 0, too.

    Args:
        config: shape of the model.
        seed: seed of the generator.
        std: standard deviation.
        dtype: Hugging Face name of a dtype.
        computed_in: dtype of the weights in memory; the same numbers are drawn for each.
    """
    spelled = SAFETENSORS_DTYPE[dtype]
    weights = allocate(config, computed_in)
    generator = torch.Generator().manual_seed(seed)
    starts = {name: weight.start for _, weight in _weights_of_layers(config) for name in weight.in_files}
    for name, tensor in weights.named.items():
        if start := starts.get(name):
            tensor.fill_(1.0 if start == "one" else 0.0)
        elif tensor.dim() == 1 and name.endswith(".weight"):
            tensor.fill_(0.0 if config.has_centred_norms else 1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            drawn = torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
            tensor.copy_(drawn.to(DTYPES[spelled]))
        weights.dtypes[name] = spelled
    weights.settle()
    return weights


def hidden_states(weights: Weights, ids: Tensor, past: Past, adapters: Rows = ()) -> Tensor:
    """Embed tokens, and run all blocks and the final norm.

    Args:
        weights: the model.
        ids: tokens, [N].
        past: what the tokens see of earlier ones.
        adapters: LoRA adapters, with the rows of the first dimension of N that each computes.

    Returns:
        Normalized hidden states, [N, E].
    """
    config = weights.config
    x = F.embedding(ids, weights.embedding)
    if config.embedding_scale != 1.0:
        x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)  # rounded as in transformers
    for index, layer in enumerate(weights.layers):
        held = layer.held
        own = [(layers[index], rows) for layers, rows in adapters]
        normal = normed(x, held.get("input_layernorm.weight"), config)
        mix = mixed if isinstance(layer.attention, DeltaNet) else attended
        added = linear(mix(index, normal, layer, config, past, own), layer, "self_attention.linear_proj", own)
        x = x + normed(added, held.get("self_attn_bda.weight"), config)
        normal = normed(x, held.get("pre_mlp_layernorm.weight"), config)
        if isinstance(layer.mlp, Experts):
            added = experts_output(normal, held, layer.mlp, config.rms_norm_eps)
        else:
            gate, up = linear(normal, layer, "mlp.linear_fc1", own).chunk(2, -1)
            added = linear(activated(gate, layer.mlp) * up, layer, "mlp.linear_fc2", own)
        x = x + normed(added, held.get("mlp_bda.weight"), config)
        if (scale := held.get("mlp_bda.scale")) is not None:
            x = x * scale
    return normed(x, weights.norm, config)


def logits_of(weights: Weights, states: Tensor) -> Tensor:
    """Return the logits of normalized hidden states [N, E] in float32, [N, vocabulary]."""
    logits, cap = F.linear(states, weights.head).float(), weights.config.logit_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def released(weights: Weights) -> Weights:
    """Placeholder for released weights of the same model; it holds no memory."""
    nothing = torch.empty(0, dtype=weights.embedding.dtype)
    return Weights(
        config=weights.config,
        embedding=nothing,
        head=nothing,
        norm=nothing,
        layers=[],
        fused={},
        named={},
        dtypes=weights.dtypes,
    )


def zeros(weights: Weights) -> Weights:
    """Allocate weights of the same model, all zero; a weight update fills them later."""
    fresh = allocate(weights.config, weights.embedding.dtype)
    fresh.dtypes = dict(weights.dtypes)
    if (head := weights.config.name_of("lm_head.weight")) in fresh.dtypes:
        fresh.named.setdefault(head, fresh.embedding)
    for tensor in fresh.named.values():
        tensor.zero_()
    fresh.settle()
    return fresh
