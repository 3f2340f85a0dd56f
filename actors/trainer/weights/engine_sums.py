"""Checksums of weights as an engine on the CPU reports them, computed by the trainer from what it publishes.

So an engine's tensors are compared with the trainer's own, one by one, and not only with those of other engines.

SGLang 0.5.23 answers `/weights_checker` with a hash of each tensor that a rank holds: the first 16 hex digits of the
sha256 of its bytes, in the engine's dtype (its `managers.mm_utils`, `tensor_hash`). The model's layers define which
shards a rank holds (its `layers.linear`, `layers.vocab_parallel_embedding` and `layers.moe.fused_moe_triton.layer`):

- Query, key and value are fused, and so are gate and up. Each is sharded over the ranks. The experts' gate and up are
  `w13_weight` [experts, 2 x inner, hidden]. Their down is `w2_weight` [experts, hidden, inner]. Both are sharded along
  the inner size.
- o_proj and down_proj are sharded by columns; embedding and lm_head by rows of the vocabulary. A tied lm_head does not
  exist. Norms and routers are replicated on every rank.
- The vocabulary is padded with zeros to a multiple of 64 (64 x ranks, if that does not divide by the ranks).
- On the CPU (its `configs.update_config`) inner sizes are padded with zeros to a multiple of 32 x ranks. If the ranks
  do not divide both kinds of heads, key-value heads are padded to a multiple of the ranks, and query heads with them.
  (On a GPU, key-value heads are replicated instead.)

The tiny engine has one rank and pads nothing. `why_not` rejects models with MLA or shared experts, MTP layers, and
quantized engines. It also rejects two forms of models with experts that SGLang 0.5.23 builds as other models: with a
tied head, or with layers without experts. (SGLang ignores `mlp_only_layers` and `decoder_sparse_step`.)

Expert, data and pipeline parallelism in the engine shard differently. Engines on GPUs hash differently, and SGLang
packs matrices on CPUs with AMX. In these cases nothing can be compared, and `layout_of` says so.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.shards import bytes_of
from actors.trainer.weights.export import Work
from actors.trainer.weights.gathering import Bucket
from messages import EngineSums
from runtime.models.blocks import EXPERT_STACKS, Mlp
from runtime.models.checksums import digits_of, engine_checksum
from runtime.models.family import families
from runtime.settings.placement import served_dtype
from runtime.settings.topology import POLICY, Topology, answers_are_recorded

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_DIGITS: Final = 16
_VOCAB_MULTIPLE: Final = 64
_INNER_MULTIPLE: Final = 32
_BY_VOCAB: Final = ("embed_tokens", "lm_head")
_BY_COLUMNS: Final = ("o_proj", "down_proj")
_JOINED: Final[Mapping[str, tuple[str, ...]]] = {  # fused modules, and their parts in row order
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_OF_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {  # parts of each expert, expert by expert
    EXPERT_STACKS[weight.name.partition(".")[0]]: tuple(weight.parts) for weight in Mlp(size=1).weights(1)
}
_MODULE: Final = {module: joined for joined, modules in _JOINED.items() for module in modules}
_PROJECTION: Final = {projection: joined for joined, own in _OF_EXPERTS.items() for projection in own}
_LAYER: Final = re.compile(r"(?P<layer>model\.layers\.\d+\.)(?P<module>.+)\.(?P<kind>weight|bias)")
_EXPERT: Final = re.compile(r"(?P<mlp>.+\.mlp\.experts\.)(?P<expert>\d+)\.(?P<projection>\w+\.weight)")

Checksums = dict[str, str]  # of a rank's tensors, by the engine's names


class Layout(NamedTuple):
    """Dtype and sharding of an engine's weights."""

    tp_size: int = 1
    dtype: torch.dtype = torch.float32
    is_padded: bool = True  # pads as SGLang does; the tiny engine does not


class _Sharding(NamedTuple):
    """How a tensor is sharded over the ranks."""

    dim: int  # -1: replicated on every rank
    size: int  # of that dimension, with padding


def layout_of(topology: Topology, model: HfConfig, device: torch.device) -> Layout | str:
    """Return how the engines of a run hold their weights, or why their checksums cannot be computed here.

    Args:
        topology: of the run.
        model: the model that engines serve.
        device: of the trainer.
    """
    pool = topology.engines.get(POLICY)
    if pool is None or answers_are_recorded(topology):
        return "no engine loads the weights"
    if pool.verify == "never":
        return f'engines.{POLICY}.verify = "never"'
    if pool.weight_format == "fp8":
        return "engines store FP8 weights in forms of their own"
    dtype: torch.dtype = getattr(torch, served_dtype(topology, pool))
    if pool.kind == "tiny":
        layout = Layout(dtype=dtype, is_padded=False)
    elif pool.gpus is not None or device.type != "cpu":
        return "SGLang hashes and pads tensors on GPUs in a way of its own"
    elif _has_amx():
        return "SGLang packs matrices on CPUs with AMX"
    else:
        layout = Layout(tp_size=pool.num_processes, dtype=dtype)
    return why_not(model, layout) or layout


@cache
def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False


def joined_sums(layout: Layout, shares: Iterable[Mapping[str, Sequence[str]]]) -> EngineSums:
    """Make the announced sums of a version from those of the ranks that wrote or sent it.

    Args:
        layout: of the engines.
        shares: for each of these ranks, the checksums of the engine's tensors on each of the engine's ranks.
    """
    every = {name: hashes for share in shares for name, hashes in share.items()}
    ranks = [{name: hashes[rank] for name, hashes in every.items()} for rank in range(layout.tp_size)]
    return EngineSums(
        tp_size=layout.tp_size,
        dtype=str(layout.dtype).removeprefix("torch."),
        is_padded=layout.is_padded,
        checksum=engine_checksum(ranks),
        tensors=digits_of(ranks),
    )


class SumsSink:
    """Computes the checksums of a rank's tensors from the buckets of an export."""

    def __init__(self, model: HfConfig, layout: Layout) -> None:
        self._expected = ExpectedChecksums(model, layout)

    def take(self, bucket: Bucket) -> Work:
        """Take a bucket on the host."""
        named = list(bucket)
        return lambda: self._expected.add(named)

    def close(self) -> dict[str, list[str]]:
        """Return the checksums of the engine's tensors on each of its ranks."""
        return self._expected.complete()


def why_not(model: HfConfig, layout: Layout) -> str | None:
    """Explain why checksums of a model in a layout cannot be predicted. None: they can."""
    experts = model.experts
    if not families()[model.model_type].predicts_sums:
        predicted = ", ".join(name for name, family in families().items() if family.predicts_sums)
        return f"model_type {model.model_type}: checksums are predicted of {predicted}"
    if model.mla is not None or (experts is not None and experts.shared_size):
        return f"model_type {model.model_type} with MLA or shared experts"
    if model.num_mtp_layers:
        return "MTP layers, which the engine does not load"
    if experts is not None and model.tie_word_embeddings:
        return "tie_word_embeddings of a model with experts: SGLang has a head of its own there, and does not fill it"
    if experts is not None and model.has_dense_layers:
        return "layers without experts in a model with experts: SGLang has experts in each, and does not fill those"
    if layout.dtype not in _DTYPES:
        return f"an engine in {layout.dtype}: checksums are predicted in {', '.join(map(str, _DTYPES))}"
    if layout.tp_size > 1 and not layout.is_padded:
        return "a tiny engine over several ranks"
    return None


class ExpectedChecksums:
    """Predicts the checksums of each engine rank from all tensors of a model, added once in any order.

    A fused tensor is hashed as its parts arrive. A part that arrives too early is copied and kept.
    """

    def __init__(self, model: HfConfig, layout: Layout) -> None:
        """Compute how tensors are fused and sharded.

        Raises:
            ValueError: checksums of this model cannot be predicted. The message says why.
        """
        if reason := why_not(model, layout):
            raise ValueError(f"checksums of an engine cannot be predicted: {reason}")
        self._layout = layout
        self._num_experts = 0 if model.experts is None else model.experts.num_experts
        self._shardings = {name: _sharding(name, shape, model, layout) for name, shape in hf_shapes(model).items()}
        names = {place_of(name).name for name in self._shardings}
        self._fused = {name: _Fused(made_of(name, self._num_experts), layout) for name in sorted(names)}

    def add(self, bucket: Bucket) -> None:
        """Add full tensors.

        Raises:
            ValueError: the model has no such tensor, or it was added before.
        """
        for name, tensor in bucket:
            if name not in self._shardings:
                raise ValueError(f"{name} is no tensor of this model")
            self._fused[place_of(name).name].take(name, tensor, self._shardings[name])

    def complete(self) -> dict[str, list[str]]:
        """Return the checksums of the tensors of which all parts were added, on each of the engine's ranks."""
        return {name: fused.hashes() for name, fused in self._fused.items() if not fused.missing}

    def checksums(self) -> list[Checksums]:
        """Return the predicted checksums of each rank, by its number.

        Raises:
            ValueError: tensors are missing. The message names the first.
        """
        missing = [name for fused in self._fused.values() for name in fused.missing]
        if missing:
            raise ValueError(f"{len(missing)} tensors have not come, the first is {missing[0]}")
        hashes = {name: fused.hashes() for name, fused in self._fused.items()}
        return [{name: own[rank] for name, own in hashes.items()} for rank in range(self._layout.tp_size)]


def expected_checksums(tensors: Iterable[Bucket], model: HfConfig, layout: Layout) -> list[Checksums]:
    """Predict each engine rank's checksums of weights in buckets. Raises the errors of `ExpectedChecksums`."""
    expected = ExpectedChecksums(model, layout)
    for bucket in tensors:
        expected.add(bucket)
    return expected.checksums()


class _Fused:
    """A tensor of the engine, fused from Hugging Face's tensors."""

    def __init__(self, names: Sequence[str], layout: Layout) -> None:
        self._names = names
        self._layout = layout
        self._next = 0
        self._early: dict[str, list[Tensor]] = {}
        self._hashers = [hashlib.sha256() for _ in range(layout.tp_size)]

    @property
    def missing(self) -> list[str]:
        return [name for name in self._names[self._next :] if name not in self._early]

    def take(self, name: str, tensor: Tensor, sharding: _Sharding) -> None:
        """Hash a tensor if it is next, and then those that waited for it."""
        if name in self._early or name in self._names[: self._next]:
            raise ValueError(f"{name} came twice")
        parts = [_part(tensor, sharding, rank, self._layout) for rank in range(self._layout.tp_size)]
        if name != self._names[self._next]:
            self._early[name] = [part.to("cpu", copy=True) for part in parts]  # the caller may change it
            return
        self._hash(parts)
        while self._next < len(self._names) and self._names[self._next] in self._early:
            self._hash(self._early.pop(self._names[self._next]))

    def hashes(self) -> list[str]:
        return [hasher.hexdigest()[:_DIGITS] for hasher in self._hashers]

    def _hash(self, parts: Sequence[Tensor]) -> None:
        for hasher, part in zip(self._hashers, parts, strict=True):
            hasher.update(bytes_of(part))
        self._next += 1


def _part(tensor: Tensor, sharding: _Sharding, rank: int, layout: Layout) -> Tensor:
    """Return a rank's shard of a tensor, padded with zeros."""
    if sharding.dim < 0:
        return tensor.detach().to(layout.dtype)
    share = sharding.size // layout.tp_size
    start = min(rank * share, tensor.shape[sharding.dim])
    own = tensor.detach().narrow(sharding.dim, start, min(share, tensor.shape[sharding.dim] - start)).to(layout.dtype)
    missing = share - own.shape[sharding.dim]
    if not missing:
        return own
    zeros = own.new_zeros(*own.shape[: sharding.dim], missing, *own.shape[sharding.dim + 1 :])
    return torch.cat([own, zeros], dim=sharding.dim)


def _sharding(name: str, shape: Sequence[int], model: HfConfig, layout: Layout) -> _Sharding:
    module, size = name.split(".")[-2], model.attention.head_dim
    heads, kv_heads = _heads(model, layout)
    sizes = {
        "q_proj": heads * size,
        "k_proj": kv_heads * size,
        "v_proj": kv_heads * size,
        "o_proj": heads * size,
        **dict.fromkeys(_BY_VOCAB, _vocab_size(model, layout)),
    }
    if module in ("gate_proj", "up_proj", "down_proj"):
        dim = int(module == "down_proj")
        return _Sharding(dim, _up_to(shape[dim], _INNER_MULTIPLE * layout.tp_size) if layout.is_padded else shape[dim])
    if module not in sizes:
        return _Sharding(-1, 0)
    return _Sharding(int(module in _BY_COLUMNS), sizes[module])


def _heads(model: HfConfig, layout: Layout) -> tuple[int, int]:
    """Return the numbers of query and key-value heads, with padding."""
    heads, kv_heads = model.attention.heads, model.attention.kv_heads
    if heads % layout.tp_size == 0 and kv_heads % layout.tp_size == 0:
        return heads, kv_heads
    padded = _up_to(kv_heads, layout.tp_size)
    return padded * (heads // kv_heads), padded


def _vocab_size(model: HfConfig, layout: Layout) -> int:
    if not layout.is_padded:
        return model.vocab_size
    size = _up_to(model.vocab_size, _VOCAB_MULTIPLE)
    return size if size % layout.tp_size == 0 else _up_to(model.vocab_size, _VOCAB_MULTIPLE * layout.tp_size)


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Place(NamedTuple):
    """The position of a Hugging Face tensor in an engine."""

    name: str
    number: int  # among the parts of the fused tensor


def place_of(name: str) -> Place:
    """Return the position of a Hugging Face tensor in an engine."""
    if match := _EXPERT.fullmatch(name):
        joined = _PROJECTION[match["projection"]]
        own = _OF_EXPERTS[joined]
        return Place(match["mlp"] + joined, int(match["expert"]) * len(own) + own.index(match["projection"]))
    match = _LAYER.fullmatch(name)
    if match is None or match["module"] not in _MODULE:
        return Place(name, 0)
    joined = _MODULE[match["module"]]
    return Place(f"{match['layer']}{joined}.{match['kind']}", _JOINED[joined].index(match["module"]))


def made_of(name: str, num_experts: int = 0) -> list[str]:
    """Return the Hugging Face names of the parts of an engine's tensor, in their order.

    Args:
        name: the engine's tensor name.
        num_experts: number of experts per layer.
    """
    module, _, last = name.rpartition(".")
    if last in _OF_EXPERTS:
        return [f"{module}.{expert}.{own}" for expert in range(num_experts) for own in _OF_EXPERTS[last]]
    for joined, modules in _JOINED.items():
        if module.endswith(f".{joined}"):
            return [f"{module.removesuffix(joined)}{own}.{last}" for own in modules]
    return [name]
