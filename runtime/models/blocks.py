"""Blocks of a decoder: the values that a layer computes with, and the tensors that it has. No torch, no family's name.

A block lists its tensors once, as `Weight`s: the name in the trainer, and the tensors of the files that it is fused of.
Shapes, loading, export, checksums, counts and the tiny engine's memory follow from this list. The names in the files
are those that most families use.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec

from runtime.models.rope import Rope
from runtime.models.tensors import Weight, fused, linear, norm, renamed, within

EXPERT_STACKS: Final = {
    "linear_fc1": "w13_weight",
    "linear_fc2": "w2_weight",
}  # engines' names of all experts' matrices


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Causal attention; several query heads may share a key-value head."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None  # None: the layer knows no positions
    scale: float | None = None  # of scores; None: the inverse root of head_dim
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False  # an RMSNorm of each head's query and key
    joint_norms: bool = False  # an RMSNorm of all heads' queries, and one of all keys
    is_stored_joined: bool = False  # the files have queries, keys and values in one tensor
    has_sinks: bool = False  # each head has a score that takes a share of each query's softmax
    window: int | None = None  # number of keys that a query sees, its own among them; None: all up to its own
    has_gate: bool = False  # a sigmoid gate of each head's output, whose rows follow those of the head's query
    has_value_norms: bool = False  # an RMSNorm of each head's value, without a weight
    has_one_projection: bool = False  # a head's value is its key before norm and RoPE: the layer has no v_proj
    of_files: ClassVar[str] = "self_attn"  # the module's name there

    def products(self, length: int) -> float:
        """Return the multiplications of scores and of values for a sequence."""
        seen = min(self.window or length, length)
        return self.heads * 2 * self.head_dim * seen * (length - seen / 2)

    def divided(self) -> Iterator[tuple[str, int]]:
        """Yield the sizes that tensor-parallel ranks share out, by key of config.json."""
        yield "num_key_value_heads", self.kv_heads

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the tensors. The fused rows are groups: the queries of a key-value head, its key, its value."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q_proj": query * (2 if self.has_gate else 1), "k_proj": key, "v_proj": key}
        if self.has_one_projection:
            del rows["v_proj"]
        layout: dict[str, Any] = {"groups": self.kv_heads, "is_stored_joined": self.is_stored_joined}
        yield from fused("linear_qkv", rows, hidden, joined="qkv_proj", bias=self.qkv_bias, **layout)
        if self.head_norms:
            yield norm("q_layernorm", self.head_dim, "q_norm")
            yield norm("k_layernorm", self.head_dim, "k_norm")
        if self.joint_norms:
            yield norm("q_layernorm", query, "q_norm")
            yield norm("k_layernorm", key, "k_norm")
        if self.has_sinks:
            yield Weight("core_attention.sinks", {"sinks": (self.heads,)})
        yield from linear("linear_proj", "o_proj", hidden, query, bias=self.output_bias)


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the keys that a query of sparse attention (DSA) sees: those of the largest scores. Never trained."""

    topk: int  # keys that a query sees, if so many are up to its own
    heads: int
    head_dim: int  # the first coordinates are rotated, as many as of a head of the attention
    is_interleaved: bool  # RoPE rotates neighbouring coordinates
    is_shared: bool = False  # the keys are those that the last layer with an indexer chose: there is none here

    def weights(self, hidden: int, query_rank: int) -> Iterator[Weight]:
        """Yield the tensors."""
        yield from linear("wq_b", "wq_b", self.heads * self.head_dim, query_rank)
        yield from linear("wk", "wk", self.head_dim, hidden)
        yield norm("k_norm", self.head_dim)
        yield Weight("k_norm.bias", {"k_norm.bias": (self.head_dim,)})
        yield from linear("weights_proj", "weights_proj", self.heads, hidden)


class Mla(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Multi-latent attention: low-rank queries, low-rank keys and values, and a rotated part of each head."""

    heads: int
    query_rank: int | None  # None: queries are projected from the hidden state directly
    key_value_rank: int
    plain_dim: int  # part of a head's query and key without RoPE
    rotated_dim: int  # part with RoPE; the keys' part is shared by all heads
    value_dim: int
    rope: Rope
    indexer: Indexer | None = None  # None: a query sees all keys up to its own
    of_files: ClassVar[str] = "self_attn"

    @property
    def kv_heads(self) -> int:
        """Each head has keys and values of its own."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Dimension of a query or key."""
        return self.plain_dim + self.rotated_dim

    def products(self, length: int) -> float:
        """Return the multiplications of scores and of values for a sequence."""
        seen = length if self.indexer is None else min(self.indexer.topk, length)
        found = self.heads * (self.head_dim + self.value_dim) * seen * (length - seen / 2)
        if self.indexer is None or self.indexer.is_shared:
            return found
        return found + self.indexer.heads * self.indexer.head_dim * length * length / 2

    def divided(self) -> Iterator[tuple[str, int]]:
        """Yield the sizes that tensor-parallel ranks share out, by key of config.json."""
        yield "num_key_value_heads", self.heads
        yield "kv_lora_rank + qk_rope_head_dim", self.key_value_rank + self.rotated_dim  # Megatron-core asks for it
        yield "q_lora_rank", self.query_rank or 0

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the tensors."""
        query, rank = self.heads * self.head_dim, self.key_value_rank
        if self.query_rank is None:
            yield from linear("linear_q_proj", "q_proj", query, hidden)
        else:
            yield from linear("linear_q_down_proj", "q_a_proj", self.query_rank, hidden)
            yield norm("q_layernorm", self.query_rank, "q_a_layernorm")
            yield from linear("linear_q_up_proj", "q_b_proj", query, self.query_rank)
        yield from linear("linear_kv_down_proj", "kv_a_proj_with_mqa", rank + self.rotated_dim, hidden)
        yield norm("kv_layernorm", rank, "kv_a_layernorm")
        up = self.heads * (self.plain_dim + self.value_dim)
        yield from linear("linear_kv_up_proj", "kv_b_proj", up, rank)
        if self.indexer is not None and not self.indexer.is_shared:
            for weight in within(self.indexer.weights(hidden, self.query_rank or hidden), "indexer"):
                yield msgspec.structs.replace(weight, is_frozen=True)
        yield from linear("linear_proj", "o_proj", hidden, self.heads * self.value_dim)


class DeltaNet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gated delta net: linear attention, whose value heads have a state each, behind a short causal convolution."""

    key_heads: int
    value_heads: int  # several in a row share the query and key of a key head
    key_dim: int
    value_dim: int
    width: int  # of the convolution: positions that one depends on, its own among them
    is_fused: bool = False  # the files have all rows of a key head together, and not those of all queries
    of_files: ClassVar[str] = "linear_attn"
    rope: ClassVar[None] = None

    @property
    def shared(self) -> int:
        """Number of value heads of each key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Number of channels that pass the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def products(self, length: int) -> float:
        """Return the multiplications with states for a sequence: to correct, to write, and to read them."""
        return 3.0 * self.value_heads * self.key_dim * self.value_dim * length

    def divided(self) -> Iterator[tuple[str, int]]:
        """Yield the sizes that tensor-parallel ranks share out, by key of config.json."""
        yield "linear_num_key_heads", self.key_heads

    def projected(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the rows of both input projections. Those of a key head are a group: query, key, values; gates."""
        key, value, heads = self.key_heads * self.key_dim, self.value_heads * self.value_dim, self.value_heads
        if self.is_fused:
            return {"in_proj_qkvz": 2 * key + 2 * value}, {"in_proj_ba": 2 * heads}
        return {"q_proj": key, "k_proj": key, "v_proj": value}, {
            "in_proj_z": value,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the tensors."""
        first, second = self.projected()
        groups, is_joined = self.key_heads, not self.is_fused
        joined = "in_proj_qkv" if is_joined else ""
        yield from fused("linear_qkv", first, hidden, joined=joined, groups=groups, is_stored_joined=is_joined)
        yield from fused("linear_gates", second, hidden, joined="" if self.is_fused else "in_proj_zba", groups=groups)
        rows = {"q": self.key_heads * self.key_dim, "k": self.key_heads * self.key_dim}
        filters = {f"conv1d.{part}": (size, 1, self.width) for part, size in (rows | {"v": self._values}).items()}
        yield Weight("conv", filters, groups, joined="conv1d.weight", is_stored_joined=True)
        yield Weight("dt_bias", {"dt_bias": (self.value_heads,)}, start="one")
        yield Weight("A_log", {"A_log": (self.value_heads,)}, start="decay")
        yield Weight("norm", {"norm.weight": (self.value_dim,)}, start="one")
        yield from linear("linear_proj", "out_proj", hidden, self._values)

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_dim


class Mlp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A gated linear unit."""

    size: int
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gate: SwiGLU, or GeGLU with the approximation by tanh
    bias: bool = False
    is_stored_joined: bool = False  # the files have gate and up in one tensor

    def divided(self) -> Iterator[tuple[str, int]]:
        """Yield the sizes that tensor-parallel ranks share out, by key of config.json."""
        yield "intermediate_size", self.size

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the tensors."""
        rows = {"gate_proj": self.size, "up_proj": self.size}
        stored = self.is_stored_joined
        yield from fused("linear_fc1", rows, hidden, joined="gate_up_proj", bias=self.bias, is_stored_joined=stored)
        yield from linear("linear_fc2", "down_proj", hidden, self.size, bias=self.bias)


class Clamped(msgspec.Struct, frozen=True, kw_only=True):
    """A gated unit in the place of SwiGLU: `gate * sigmoid(gain * gate) * (up + 1)`.

    The gate is at most `limit`, and `up` between `-limit` and `limit`. Every projection, and the router, has a bias.
    """

    gain: float
    limit: float


class Experts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Mixture of experts (MoE), and how the router chooses and weights them."""

    num_experts: int
    num_experts_per_tok: int
    size: int  # of each expert
    score: str  # of the router's logits: "softmax" or "sigmoid"
    has_bias: bool  # a per-expert bias that affects the choice only
    norm_topk_prob: bool  # whether the chosen experts' weights are normalized to sum 1
    min_sum: float | None = None  # a smaller sum of them counts as this; None: the sum counts as it is
    is_bias_row: bool = False  # the bias is a matrix of one row, in the trainer too
    routed_scaling_factor: float = 1.0
    shared_size: int = 0  # of the shared expert, which every token passes; 0: none
    has_shared_gate: bool = False  # the shared expert is weighted by a sigmoid of its own
    num_groups: int | None = None  # expert groups; None: a token's experts are chosen among all
    num_groups_per_tok: int | None = None  # groups to choose from: those with the largest sums of their two best scores
    clamped: Clamped | None = None  # None: gated units without biases
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gates, those of the shared expert too
    has_norms: bool = False  # see `_norms`
    router: str = "gate"  # its name in the files
    is_stacked: bool = False  # the files have a tensor of all experts in the place of one of each

    def divided(self) -> Iterator[tuple[str, int]]:
        """Yield nothing: `check_layout` knows which ranks share out experts."""
        yield from ()

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the tensors."""
        yield from linear("router", self.router, self.num_experts, hidden, bias=self.clamped is not None)
        if self.has_bias:
            row = (1,) if self.is_bias_row else ()
            yield Weight("router.expert_bias", {"gate.e_score_correction_bias": (*row, self.num_experts)})
        if self.has_norms:
            yield from self._norms(hidden)
        for number in range(self.num_experts):
            if self.clamped is not None:
                yield from self._stacked(number, hidden)
                continue
            own = Mlp(size=self.size, is_stored_joined=self.is_stacked).weights(hidden)
            named = within(
                own, f"experts.local_experts.{number}", "experts" if self.is_stacked else f"experts.{number}"
            )
            yield from (self._stacked_row(weight, number) for weight in named) if self.is_stacked else named
        if self.shared_size:
            yield from within(Mlp(size=self.shared_size).weights(hidden), "shared_experts")
        if self.has_shared_gate:
            yield Weight("shared_experts.gate_weight", {"shared_expert_gate.weight": (1, hidden)})

    def _norms(self, hidden: int) -> Iterator[Weight]:
        """Yield the tensors of experts that read the residual itself, as the router and the shared expert do.

        Each of the three has a norm of its own. The router's has no weight: it multiplies coordinates by a scale, and
        the weights of chosen experts by a factor of each. What experts and shared expert add is normalized, too.
        """
        for name in ("before_shared", "after_shared", "before_experts", "after_experts"):
            yield msgspec.structs.replace(norm(name, hidden), start="one")
        yield Weight("router.scale", {"router.scale": (hidden,)}, start="one")
        yield Weight("router.expert_scales", {"router.per_expert_scale": (self.num_experts,)}, start="one")

    def _stacked_row(self, weight: Weight, number: int) -> Weight:
        """Give an expert's tensor its place in that of all experts, which has no ending."""
        parts = {part.removesuffix(".weight"): shape for part, shape in weight.parts.items()}
        joined, place = weight.joined.removesuffix(".weight"), (number, self.num_experts)
        return msgspec.structs.replace(weight, parts=parts, joined=joined, place=place)

    def _stacked(self, number: int, hidden: int) -> Iterator[Weight]:
        """Yield the tensors of an expert that lie in those of all experts."""
        sizes = {"linear_fc1": ("gate_up_proj", hidden, 2 * self.size), "linear_fc2": ("down_proj", self.size, hidden)}
        for name, (part, columns, rows) in sizes.items():
            for kind, ending, shape in (("weight", "", (columns, rows)), ("bias", "_bias", (rows,))):
                yield Weight(
                    f"experts.local_experts.{number}.{name}.{kind}",
                    {f"experts.{part}{ending}": shape},
                    place=(number, self.num_experts),
                    is_transposed=True,
                    is_alternating=name == "linear_fc1",
                )


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """The RMSNorms of a layer, by their names in the files. Empty: the layer has no norm there."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""  # of what attention adds to the residual
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


NORMS_AFTER: Final = Norms(  # of what each module adds, and none before it
    before_attention="",
    after_attention="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)


class Layer(msgspec.Struct, frozen=True):
    """A decoder layer: attention and an MLP or experts, with norms before, after, or on both sides of them."""

    attention: Attention | Mla | DeltaNet
    mlp: Mlp | Experts
    norms: Norms = Norms()
    has_scale: bool = False  # its output is multiplied by a number, which is never trained

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the tensors."""
        norms = self.norms
        yield from _norm_if(norms.before_attention, "input_layernorm", hidden)
        yield from within(self.attention.weights(hidden), "self_attention", self.attention.of_files)
        yield from _norm_if(norms.after_attention, "self_attn_bda", hidden)
        yield from _norm_if(norms.before_mlp, "pre_mlp_layernorm", hidden)
        yield from within(self.mlp.weights(hidden), "mlp")
        yield from _norm_if(norms.after_mlp, "mlp_bda", hidden)
        if self.has_scale:
            yield Weight("mlp_bda.scale", {"layer_scalar": (1,)}, is_frozen=True, start="one")

    def weights_of_a_token(self, hidden: int, *, matrices_only: bool = True) -> int:
        """Count the weights that each token is multiplied with; it passes only the experts chosen for it."""
        shapes = (shape for weight in self.weights(hidden) for shape in weight.shapes)
        met = sum(math.prod(shape) for shape in shapes if len(shape) == 2 or not matrices_only)
        if isinstance(self.mlp, Experts):
            met -= (self.mlp.num_experts - self.mlp.num_experts_per_tok) * 3 * self.mlp.size * hidden
        return met


def _norm_if(of_files: str, name: str, hidden: int) -> Iterator[Weight]:
    if of_files:
        yield norm(name, hidden, of_files)


def mtp_weights(hidden: int) -> Iterator[Weight]:
    """Yield the tensors of an MTP layer besides those of the decoder layer in it."""
    yield norm("enorm", hidden)
    yield norm("hnorm", hidden)
    yield norm("final_layernorm", hidden, "shared_head.norm")
    yield from linear("eh_proj", "eh_proj", hidden, 2 * hidden)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one decoder-only model. Two models with equal shapes can exchange weights."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of layers without experts
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0  # factor of embedded tokens
    has_centred_norms: bool = False  # an RMSNorm multiplies by 1 plus its weight
    logit_cap: float | None = None  # logits are `cap * tanh(logits / cap)`; None: they are not capped
    names: tuple[tuple[str, str], ...] = ()  # pieces of names that the files spell otherwise than the blocks
    copied: tuple[str, ...] = ()  # modules of the files that are not built, and that exports have unchanged

    def spelled(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Give the tensors their names in the files."""
        return (weight.renamed(dict(self.names)) for weight in weights) if self.names else iter(weights)

    def name_of(self, usual: str) -> str:
        """Return the name in the files of a tensor, given the name that most families use."""
        return renamed(usual, dict(self.names))

    def is_copied(self, name: str) -> bool:
        """Whether a tensor of the files is of a module that is not built, and that exports have unchanged."""
        return name.startswith(tuple(f"{module}." for module in self.copied))

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without MTP layers."""
        return len(self.layers)

    @property
    def attention(self) -> Attention | Mla:
        """Attention of the first layer that is not linear. Heads of other layers may have other sizes."""
        return next(layer.attention for layer in self.layers if not isinstance(layer.attention, DeltaNet))

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The different rotary embeddings of the layers, each with the size of the heads."""
        blocks = (layer.attention for layer in self.layers if not isinstance(layer.attention, DeltaNet))
        return tuple(dict.fromkeys((block.rope, block.head_dim) for block in blocks if block.rope is not None))

    @property
    def has_equal_heads(self) -> bool:
        """Whether heads have the same sizes in all layers with attention."""
        blocks = (layer.attention for layer in self.layers if not isinstance(layer.attention, DeltaNet))
        kinds = {(block.head_dim, block.kv_heads, getattr(block, "has_one_projection", False)) for block in blocks}
        return len(kinds) == 1

    @property
    def mla(self) -> Mla | None:
        """MLA; None: queries, keys and values are projected directly."""
        return self.attention if isinstance(self.attention, Mla) else None

    @property
    def has_indexers(self) -> bool:
        """Whether layers see the keys that an indexer chooses."""
        return self.mla is not None and self.mla.indexer is not None

    def source_of(self, index: int) -> int | None:
        """Return the number of the layer whose indexer chooses the keys that a layer sees. None: it sees all."""
        for number in range(index, -1, -1):
            attention = self.layers[number].attention
            if not isinstance(attention, Mla) or attention.indexer is None:
                return None
            if not attention.indexer.is_shared:
                return number
        return None

    @property
    def experts(self) -> Experts | None:
        """Experts of the layers that have them; None: no layer has."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)), None)

    @property
    def activation(self) -> str:
        """Activation of the gates, which all layers have in common."""
        return self.layers[0].mlp.activation

    @property
    def has_dense_layers(self) -> bool:
        """Whether a layer has an MLP instead of experts."""
        return any(isinstance(layer.mlp, Mlp) for layer in self.layers)
