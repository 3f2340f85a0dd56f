"""Readers of config.json: the keys of each block, and the block that they make. No family's name.

A declaration names a reader of attention and one of MLPs, or derives its own from one. A key that a file lacks has the
default of transformers' class, unless the default here is None; the others are for this module alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, cast

import msgspec

from runtime.models.blocks import Attention, DeltaNet, Experts, Mla, Mlp
from runtime.models.problems import Problems, Unsupported
from runtime.models.rope import Rope, RopeKeys, read_rope

MAX_CONTEXT: Final = 1 << 20  # tokens; a larger value is taken for a mistake in the config
GEGLU: Final = "gelu_pytorch_tanh"  # GeGLU with the approximation by tanh
DTYPES: Final = ("float64", "float32", "bfloat16", "float16")  # of weights, Hugging Face names


class DecoderKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of every model that belong to no block."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] | None = None
    initializer_range: float = 0.02
    has_centred_norms: ClassVar[bool] = False  # an RMSNorm multiplies by 1 plus its weight
    has_layer_scales: ClassVar[bool] = False  # each layer's output is multiplied by a number, which is never trained
    dtype: str | None = None  # transformers 5
    torch_dtype: str | None = None  # transformers 4

    @property
    def weights_dtype(self) -> str:
        """Dtype of the weights."""
        return self.dtype or self.torch_dtype or "float32"

    @property
    def embedding_scale(self) -> float:
        """Factor of embedded tokens."""
        return 1.0

    @property
    def logit_cap(self) -> float | None:
        """Largest size of a logit, to which tanh bends them; None: none."""
        return None

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        if min(self.vocab_size, self.hidden_size, self.num_hidden_layers) < 1:
            yield "sizes must be positive: vocab_size, hidden_size, num_hidden_layers"
        if not 1 < self.max_position_embeddings <= MAX_CONTEXT:
            yield f"max_position_embeddings {self.max_position_embeddings} is not in 2..{MAX_CONTEXT}"
        if self.weights_dtype not in DTYPES:
            yield f"dtype {self.weights_dtype!r} is not supported; supported: {', '.join(DTYPES)}"


class AttentionKeys(RopeKeys, frozen=True, kw_only=True):
    """Keys of every kind of attention."""

    rope_share: ClassVar[float] = 1.0  # rotated share of a head unless partial_rotary_factor says otherwise
    rope_type: ClassVar[str] = "llama3"  # supported besides "default"
    theta: ClassVar[float] = 10000.0  # of RoPE if no key has it
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)  # supported in layer_types
    is_interleaved: ClassVar[bool] = False  # RoPE rotates neighbouring coordinates
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    layer_types: tuple[str, ...] | None = None

    def layers(self) -> tuple[Attention | Mla | DeltaNet, ...]:
        """Return the block of each layer, read as transformers does.

        Raises:
            Unsupported: a key is unsupported; the text names it.
        """
        problems = Problems(self.problems())
        rope = problems.of(self.rope)
        if rope is None or problems:
            raise Unsupported(problems)
        block = self.block(msgspec.structs.replace(rope, is_interleaved=self.is_interleaved))
        return tuple(self.of_layer(block, index) for index in range(self.num_hidden_layers))

    def rope(self) -> Rope:
        """Read the rotary embedding."""
        return read_rope(self, share=self.rope_share, stretching=self.rope_type, theta=self.theta)

    def of_layer(self, block: Any, index: int) -> Any:
        """Return the block of one layer, given that of all layers."""
        del index
        return block

    def block(self, rope: Rope) -> Attention | Mla:
        """Return the block of a layer."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        kinds = self.layer_types
        if other := set(kinds or ()) - {*self.layer_kinds}:
            yield f"layer_types {min(other)!r} is not supported; supported: {', '.join(map(repr, self.layer_kinds))}"
        elif kinds is not None and len(kinds) != self.num_hidden_layers:
            yield f"layer_types has {len(kinds)} entries, and num_hidden_layers is {self.num_hidden_layers}"


class HeadKeys(AttentionKeys, frozen=True, kw_only=True):
    """Keys of attention with heads that are projected directly."""

    without_keys: ClassVar[Mapping[str, bool]] = {}  # values of the block that follow from the family, not from a key
    hidden_size: int
    attention_bias: bool = False

    def block(self, rope: Rope) -> Attention:
        """Return the block of a layer."""
        biases: Mapping[str, bool] = {"qkv_bias": self.attention_bias, "output_bias": self.attention_bias}
        return Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            rope=rope,
            **{**biases, **self.without_keys},
        )

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.num_attention_heads < 1 or self.num_attention_heads % (self.num_key_value_heads or 1):
            yield "sizes must be positive, and num_key_value_heads must divide num_attention_heads"
        elif not self.head_dim and self.hidden_size % self.num_attention_heads:
            yield f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"


class WindowKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of attention with a sliding window in all layers, or in those that layer_types names."""

    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    reads_layer_types: ClassVar[bool] = True  # whether the class of transformers does; otherwise the window is in all
    sliding_window: int | None = 4096

    @property
    def window(self) -> int | None:
        """Number of keys that a query of such a layer sees, its own among them. None: all up to its own."""
        return self.sliding_window

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        if not self.reads_layer_types or self.layer_types is None:
            return True
        return self.layer_types[index] == "sliding_attention"

    def of_layer(self, block: Attention, index: int) -> Attention:
        """Return the block of one layer, given that of all layers."""
        return msgspec.structs.replace(block, window=self.window) if self.is_windowed(index) else block

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.window is None and "sliding_attention" in (self.layer_types or ()):
            yield "layer_types 'sliding_attention' needs a sliding_window"
        elif self.window is not None and self.window < 1:
            yield f"sliding_window {self.window} is not positive"


class SwitchedWindowKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of attention with a window that has to be switched on."""

    use_sliding_window: bool = False

    @property
    def window(self) -> int | None:
        """Number of keys that a query of such a layer sees, its own among them. None: all up to its own."""
        return self.sliding_window if self.use_sliding_window else None


class LateWindowKeys(SwitchedWindowKeys, frozen=True, kw_only=True):
    """Keys of attention with a window that has to be switched on. Without layer_types the first layers have none."""

    max_window_layers: int = 28

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        return index >= self.max_window_layers if self.layer_types is None else super().is_windowed(index)


class LayeredRopeKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of attention whose layers with a window have a rotary embedding of their own.

    The RoPE keys of transformers 4 are those of the layers without a window. transformers 5 has both by their kind.
    """

    window_theta: ClassVar[float] = 10000.0  # of layers with a window, if no key has it

    def rope(self) -> Rope:
        """Read the rotary embedding of layers without a window."""
        return self._rope_of("full_attention", self.rope_theta or self.theta, self.rope_scaling)

    def window_rope(self) -> Rope:
        """Read the rotary embedding of layers with the window."""
        return self._rope_of("sliding_attention", self.window_theta, None)

    def _rope_of(self, kind: str, theta: float, scaling: dict[str, Any] | None) -> Rope:
        """Read the rotary embedding of a kind of layers, given what transformers 4 has of it."""
        parameters: Any = (self.rope_parameters or {}).get(kind) or {}
        if not isinstance(parameters, dict):
            raise ValueError(f"rope_parameters of {kind} is not an object")
        own = cast("dict[str, Any]", parameters)
        keys = RopeKeys(rope_theta=theta, rope_scaling=scaling, rope_parameters=own)
        return read_rope(keys, share=self.rope_share, stretching=self.rope_type)

    def of_layer(self, block: Attention, index: int) -> Attention:
        """Return the block of one layer, given that of all layers."""
        rope = self.window_rope() if self.is_windowed(index) else block.rope
        return msgspec.structs.replace(super().of_layer(block, index), rope=rope)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if other := {*(self.rope_parameters or {})} - {"full_attention", "sliding_attention"}:
            yield f"rope_parameters has {min(other)!r}; supported: 'full_attention' and 'sliding_attention'"


class LatentKeys(AttentionKeys, frozen=True, kw_only=True):
    """Keys of multi-latent attention."""

    rope_type: ClassVar[str] = "yarn"
    attention_bias: bool = False
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    qk_head_dim: int | None = None  # sum of the two previous sizes, which transformers writes
    v_head_dim: int = 128
    rope_interleave: bool = True

    def rope(self) -> Rope:
        """Read the rotary embedding."""
        return read_rope(self, share=self.rope_share, stretching=self.rope_type, of_heads=False)

    def block(self, rope: Rope) -> Mla:
        """Return the block of a layer."""
        return Mla(
            heads=self.num_attention_heads,
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank,
            plain_dim=self.qk_nope_head_dim,
            rotated_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            rope=rope,
        )

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.attention_bias:
            yield "attention_bias is not supported"
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            yield (
                f"num_key_value_heads {self.num_key_value_heads} is not supported with multi-latent attention; "
                f"supported: num_attention_heads, {self.num_attention_heads}"
            )
        if not self.rope_interleave:
            yield "rope_interleave false is not supported; supported: true"
        if self.head_dim not in (None, self.qk_rope_head_dim):  # of the part with RoPE
            yield f"head_dim {self.head_dim} is not supported; supported: qk_rope_head_dim, {self.qk_rope_head_dim}"
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for key in ("num_attention_heads", *ranks):
            if (size := getattr(self, key)) is not None and size < 1:
                yield f"{key} {size} is not positive"
        if self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim {self.qk_rope_head_dim} is not even"


class MlpKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the MLPs of a model without experts."""

    activations: ClassVar[tuple[str, ...]] = ("silu",)  # supported in hidden_act
    num_hidden_layers: int
    intermediate_size: int
    hidden_act: str = "silu"

    @property
    def num_further_layers(self) -> int:
        """Number of MTP layers, after the last layer."""
        return 0

    def layers(self) -> tuple[Mlp | Experts, ...]:
        """Return the block of each layer, read as transformers does.

        Raises:
            Unsupported: a key is unsupported; the text names it.
        """
        if problems := [*self.problems()]:
            raise Unsupported(problems)
        return tuple(self.block(index) for index in range(self.num_hidden_layers))

    def block(self, index: int) -> Mlp | Experts:
        """Return the block of a layer."""
        del index
        return Mlp(size=self.intermediate_size)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        if self.intermediate_size < 1:
            yield f"intermediate_size {self.intermediate_size} is not positive"
        if self.hidden_act not in self.activations:
            supported = ", ".join(map(repr, self.activations))
            yield f"hidden_act {self.hidden_act!r} is not supported; supported: {supported}"


class BiasedMlpKeys(MlpKeys, frozen=True, kw_only=True):
    """Keys of MLPs that may have biases."""

    mlp_bias: bool = False

    def block(self, index: int) -> Mlp:
        """Return the block of a layer."""
        del index
        return Mlp(size=self.intermediate_size, bias=self.mlp_bias)


class GegluKeys(MlpKeys, frozen=True, kw_only=True):
    """Keys of MLPs with GeGLU. The class does not read hidden_act."""

    activations: ClassVar[tuple[str, ...]] = ("silu", GEGLU)
    hidden_activation: str = GEGLU

    def block(self, index: int) -> Mlp | Experts:
        """Return the block of a layer."""
        del index
        return Mlp(size=self.intermediate_size, activation="gelu_tanh")

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.hidden_activation != GEGLU:
            yield f"hidden_activation {self.hidden_activation!r} is not supported; supported: {GEGLU!r}"
