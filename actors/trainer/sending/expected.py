"""What an engine on the CPU will say of its weights when it is asked for their checksums, reckoned by the trainer.

SGLang 0.5.23 answers `/weights_checker` with a hash of each tensor that a rank holds: the first 16 hex digits of the
sha256 of its bytes, in the engine's dtype (`managers/mm_utils.py`, `tensor_hash`). What a rank holds of which tensors
is said by the model's layers (`layers/linear.py`, `vocab_parallel_embedding.py`, `moe/fused_moe_triton/layer.py`):

- query, key and value, and gate and up, are joined, each cut into as many parts as there are ranks; experts' gate and
  up are `w13_weight` [experts, 2 x inner, hidden], their down `w2_weight` [experts, hidden, inner]; cut are inner
  sizes. Projections back (o_proj, down_proj) are cut by columns; embedding and lm_head by rows of the vocabulary. A
  tied lm_head is not there. Norms and routers are whole on every rank.
- Zeros fill up the vocabulary to a multiple of 64 (64 x ranks, where that cannot be divided by the ranks).
- On the CPU (`configs/update_config.py`) zeros fill up inner sizes to a multiple of 32 x ranks, and, where the ranks
  divide not both kinds of heads, key-value heads to a multiple of the ranks and query heads with them. (On a GPU
  key-value heads are copied instead.)

Our embedded engine has one rank and fills up nothing. Refused by `why_not`: models with multi-latent attention or
shared experts, layers for further tokens, quantized engines, and two forms of Qwen3-MoE that SGLang 0.5.23 builds as
other models: with a tied head, or with layers without experts (it does not look at `mlp_only_layers` and
`decoder_sparse_step`). Not seen from here: expert, data and pipeline parallelism in the engine cut otherwise, engines
on GPUs hash otherwise, and on CPUs with AMX SGLang packs matrices. There nothing can be compared.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from actors.trainer.models.config import HfConfig
from actors.trainer.models.gathering import Bucket
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.shards import bytes_of
from runtime.weights.fused import made_of, place_of

FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_DIGITS: Final = 16
_VOCAB_MULTIPLE: Final = 64
_INNER_MULTIPLE: Final = 32
_BY_VOCAB: Final = ("embed_tokens", "lm_head")
_BY_COLUMNS: Final = ("o_proj", "down_proj")

Checksums = dict[str, str]  # of a rank's tensors, by their names in the engine


class Layout(NamedTuple):
    """How an engine holds weights."""

    tp_size: int = 1
    dtype: torch.dtype = torch.float32
    is_filled_up: bool = True  # as SGLang does; the embedded engine does not


class _Cut(NamedTuple):
    """How a tensor is divided among ranks."""

    dim: int  # -1: it is whole on every rank
    size: int  # of that side, with what is filled up


def why_not(model: HfConfig, layout: Layout) -> str | None:
    """Why checksums are not reckoned of a model in a layout; none: they are."""
    experts = model.experts
    if model.model_type not in FAMILIES:
        return f"model_type {model.model_type}: checksums are reckoned of {', '.join(FAMILIES)}"
    if model.latent is not None or (experts is not None and experts.shared_intermediate_size):
        return f"model_type {model.model_type} with latent attention or shared experts"
    if model.num_mtp_layers:
        return "layers for further tokens, which the engine does not load"
    if experts is not None and model.tie_word_embeddings:
        return "tie_word_embeddings of a model with experts: SGLang has a head of its own there, and does not fill it"
    if experts is not None and not all(experts.layers):
        return "layers without experts in a model with experts: SGLang has experts in each, and does not fill those"
    if layout.dtype not in _DTYPES:
        return f"an engine in {layout.dtype}: checksums are reckoned in {', '.join(map(str, _DTYPES))}"
    if layout.tp_size > 1 and not layout.is_filled_up:
        return "an embedded engine over several ranks"
    return None


class Expected:
    """Takes all tensors of a model once, in any order, and says what each rank of an engine will.

    Joined tensors are hashed as their parts come; of parts that come before their turn a copy is kept.
    """

    def __init__(self, model: HfConfig, layout: Layout) -> None:
        """Reckon what is joined and how it is cut.

        Raises:
            ValueError: checksums are not reckoned of such a model; says why.
        """
        if reason := why_not(model, layout):
            raise ValueError(f"checksums of an engine are not reckoned: {reason}")
        self._layout = layout
        self._num_experts = 0 if model.experts is None else model.experts.num_experts
        self._cuts = {name: _cut(name, shape, model, layout) for name, shape in hf_shapes(model).items()}
        names = {place_of(name).name for name in self._cuts}
        self._joined = {name: _Joined(made_of(name, self._num_experts), layout) for name in sorted(names)}

    @property
    def num_hashes(self) -> int:
        """How many there will be."""
        return len(self._joined) * self._layout.tp_size

    def add(self, bucket: Bucket) -> None:
        """Take whole tensors.

        Raises:
            ValueError: the model has no such tensor, or it came already.
        """
        for name, tensor in bucket:
            if name not in self._cuts:
                raise ValueError(f"{name} is no tensor of this model")
            self._joined[place_of(name).name].take(name, tensor, self._cuts[name])

    def checksums(self) -> list[Checksums]:
        """What each rank will say, by its number.

        Raises:
            ValueError: tensors have not come; names the first.
        """
        missing = [name for joined in self._joined.values() for name in joined.missing]
        if missing:
            raise ValueError(f"{len(missing)} tensors have not come, the first is {missing[0]}")
        return self.so_far()

    def so_far(self) -> list[Checksums]:
        """The same of those whose parts have all come, as those of one pipeline stage."""
        hashes = {name: joined.hashes() for name, joined in self._joined.items() if not joined.missing}
        return [{name: own[rank] for name, own in hashes.items()} for rank in range(self._layout.tp_size)]


def expected_checksums(tensors: Iterable[Bucket], model: HfConfig, layout: Layout) -> list[Checksums]:
    """What each rank of an engine will say of weights that come in buckets; raises as `Expected` does."""
    expected = Expected(model, layout)
    for bucket in tensors:
        expected.add(bucket)
    return expected.checksums()


def rank_checksum(checksums: Mapping[str, str]) -> str:
    """What a rank says of all its tensors: `per_gpu_checksum`."""
    return hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()


def engine_checksum(ranks: Iterable[Mapping[str, str]]) -> str:
    """What an engine says of all its ranks: `per_engine_checksum`."""
    return hashlib.sha256("".join(map(rank_checksum, ranks)).encode()).hexdigest()


class _Joined:
    """A tensor of the engine that is made of some of Hugging Face's."""

    def __init__(self, names: Sequence[str], layout: Layout) -> None:
        self._names = names
        self._layout = layout
        self._next = 0
        self._early: dict[str, list[Tensor]] = {}
        self._hashers = [hashlib.sha256() for _ in range(layout.tp_size)]

    @property
    def missing(self) -> list[str]:
        return [name for name in self._names[self._next :] if name not in self._early]

    def take(self, name: str, tensor: Tensor, cut: _Cut) -> None:
        """Hash it if it is its turn, and those that waited for it."""
        if name in self._early or name in self._names[: self._next]:
            raise ValueError(f"{name} came twice")
        parts = [_part(tensor, cut, rank, self._layout) for rank in range(self._layout.tp_size)]
        if name != self._names[self._next]:
            self._early[name] = [part.to("cpu", copy=True) for part in parts]  # who gave it may change it
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


def _part(tensor: Tensor, cut: _Cut, rank: int, layout: Layout) -> Tensor:
    """What a rank has of a tensor."""
    if cut.dim < 0:
        return tensor.detach().to(layout.dtype)
    share = cut.size // layout.tp_size
    start = min(rank * share, tensor.shape[cut.dim])
    own = tensor.detach().narrow(cut.dim, start, min(share, tensor.shape[cut.dim] - start)).to(layout.dtype)
    missing = share - own.shape[cut.dim]
    if not missing:
        return own
    zeros = own.new_zeros(*own.shape[: cut.dim], missing, *own.shape[cut.dim + 1 :])
    return torch.cat([own, zeros], dim=cut.dim)


def _cut(name: str, shape: Sequence[int], model: HfConfig, layout: Layout) -> _Cut:
    module = name.split(".")[-2]
    heads, kv_heads = _heads(model, layout)
    sizes = {
        "q_proj": heads * model.head_dim,
        "k_proj": kv_heads * model.head_dim,
        "v_proj": kv_heads * model.head_dim,
        "o_proj": heads * model.head_dim,
        **dict.fromkeys(_BY_VOCAB, _vocab_size(model, layout)),
    }
    if module in ("gate_proj", "up_proj", "down_proj"):
        dim = int(module == "down_proj")
        return _Cut(dim, _up_to(shape[dim], _INNER_MULTIPLE * layout.tp_size) if layout.is_filled_up else shape[dim])
    if module not in sizes:
        return _Cut(-1, 0)
    return _Cut(int(module in _BY_COLUMNS), sizes[module])


def _heads(model: HfConfig, layout: Layout) -> tuple[int, int]:
    """Query and key-value heads with those that are filled up."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % layout.tp_size == 0 and kv_heads % layout.tp_size == 0:
        return heads, kv_heads
    filled = _up_to(kv_heads, layout.tp_size)
    return filled * (heads // kv_heads), filled


def _vocab_size(model: HfConfig, layout: Layout) -> int:
    if not layout.is_filled_up:
        return model.vocab_size
    size = _up_to(model.vocab_size, _VOCAB_MULTIPLE)
    return size if size % layout.tp_size == 0 else _up_to(model.vocab_size, _VOCAB_MULTIPLE * layout.tp_size)


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
