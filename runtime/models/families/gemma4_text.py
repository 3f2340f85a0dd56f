"""Gemma 4, its text model: larger heads without v_proj in layers of full attention, and experts beside the MLP."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from runtime.models import blocks
from runtime.models.expert_readers import FurtherExpertKeys
from runtime.models.family import Composite, Family
from runtime.models.readers import DecoderKeys
from runtime.models.rope import Rope
from runtime.models.sized_readers import SizedHeadKeys

MISSING = {  # values of keys whose block is missing: the only one that is built, and the block
    "hidden_size_per_layer_input": (0, "embeddings of each layer"),
    "num_kv_shared_layers": (0, "layers that share keys and values of an earlier one"),
    "attention_bias": (False, "attention with biases"),
}


def lacking(keys: msgspec.Struct) -> Iterator[str]:
    """Yield each value whose block is missing."""
    for key in keys.__struct_fields__:
        only, block = MISSING.get(key, (None, ""))
        if block and getattr(keys, key) != only:
            yield f"{key} {getattr(keys, key)!r} is not supported: not implemented yet: {block}; supported: {only!r}"


class ModelKeys(DecoderKeys, frozen=True, kw_only=True):
    """Keys that belong to no block."""

    has_layer_scales: ClassVar[bool] = True
    hidden_size_per_layer_input: int = 256
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None  # "vision": of the tokens of an image alone

    @property
    def embedding_scale(self) -> float:
        """Factor of embedded tokens."""
        return self.hidden_size**0.5

    @property
    def logit_cap(self) -> float | None:
        """Largest size of a logit."""
        return self.final_logit_softcapping

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from (*super().problems(), *lacking(self))
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            yield f"final_logit_softcapping {self.final_logit_softcapping} is not positive"
        if self.use_bidirectional_attention not in (None, "vision"):
            yield "use_bidirectional_attention 'all' is not supported; supported: null and 'vision'"


class AttentionKeys(SizedHeadKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"head_norms": True, "has_value_norms": True}
    theta: ClassVar[float] = 1_000_000.0
    proportion: ClassVar[float] = 0.25
    window_interval: ClassVar[int] = 6
    num_kv_shared_layers: int = 0

    def block(self, rope: Rope) -> blocks.Attention:
        """Return the block of a layer. Scores are not scaled, as queries and keys have norms."""
        return msgspec.structs.replace(super().block(rope), scale=1.0)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from (*super().problems(), *lacking(self))


FAMILY = Family(
    model_type="gemma4_text",
    title="Gemma 4",
    architecture="Gemma4ForCausalLM",
    decoder=ModelKeys,
    attention=AttentionKeys,
    mlp=FurtherExpertKeys,
    norms=blocks.Norms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    names={
        **{"mlp.before_shared": "pre_feedforward_layernorm", "mlp.after_shared": "post_feedforward_layernorm_1"},
        **{"mlp.before_experts": "pre_feedforward_layernorm_2", "mlp.after_experts": "post_feedforward_layernorm_2"},
        **{"mlp.router": "router", "mlp.experts": "experts", "mlp.shared_experts": "mlp"},
    },
    without_effect=("vocab_size_per_layer_input", "use_double_wide_mlp"),
    composite=Composite(
        model_type="gemma4",
        architectures=("Gemma4ForConditionalGeneration",),
        names={"model": "model.language_model"},
        copied=("model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"),
        without_effect=(
            *("vision_config", "audio_config", "vision_soft_tokens_per_image", "image_token_id", "video_token_id"),
            *("audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        ),
    ),
)
