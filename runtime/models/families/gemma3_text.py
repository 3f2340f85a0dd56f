"""Gemma 3, its text model: norms around each module, GeGLU, and windows with a rotary embedding of their own."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from runtime.models import blocks
from runtime.models.family import Composite, Family
from runtime.models.readers import DecoderKeys, GegluKeys, LayeredRopeKeys
from runtime.models.rope import Rope


class ModelKeys(DecoderKeys, frozen=True, kw_only=True):
    """Keys that belong to no block."""

    has_centred_norms: ClassVar[bool] = True

    @property
    def embedding_scale(self) -> float:
        """Factor of embedded tokens."""
        return self.hidden_size**0.5


class AttentionKeys(LayeredRopeKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"head_norms": True}
    rope_type: ClassVar[str] = "linear"
    theta: ClassVar[float] = 1_000_000.0
    head_dim: int | None = 256
    query_pre_attn_scalar: int = 256
    rope_local_base_freq: float | None = None
    sliding_window_pattern: int = 6

    def block(self, rope: Rope) -> blocks.Attention:
        """Return the block of a layer."""
        return msgspec.structs.replace(super().block(rope), scale=self.query_pre_attn_scalar**-0.5)

    def window_rope(self) -> Rope:
        """Read the rotary embedding of layers with the window."""
        return self._rope_of("sliding_attention", self.rope_local_base_freq or self.window_theta, None)

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        if self.layer_types is None:
            return (index + 1) % self.sliding_window_pattern != 0
        return super().is_windowed(index)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        for key in ("query_pre_attn_scalar", "sliding_window_pattern"):
            if getattr(self, key) < 1:
                yield f"{key} {getattr(self, key)} is not positive"


FAMILY = Family(
    model_type="gemma3_text",
    title="Gemma 3",
    architecture="Gemma3ForCausalLM",
    decoder=ModelKeys,
    attention=AttentionKeys,
    mlp=GegluKeys,
    norms=blocks.Norms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    composite=Composite(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        names={"model": "language_model.model", "lm_head": "language_model.lm_head"},
        copied=("vision_tower", "multi_modal_projector"),
        without_effect=(
            *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
            *("boi_token_id", "eoi_token_id", "image_token_id"),
        ),
    ),
)
