"""Qwen3.5, its text model without experts: a gated delta net in three of four layers, and gated attention."""

from typing import ClassVar

from runtime.models.family import Composite, Family
from runtime.models.hybrid_readers import HybridKeys
from runtime.models.readers import DecoderKeys, MlpKeys


class ModelKeys(DecoderKeys, frozen=True, kw_only=True):
    """Keys that belong to no block."""

    has_centred_norms: ClassVar[bool] = True


class AttentionKeys(HybridKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    head_dim: int | None = 256


FAMILY = Family(
    model_type="qwen3_5_text",
    title="Qwen3.5",
    architecture="Qwen3_5ForCausalLM",
    decoder=ModelKeys,
    attention=AttentionKeys,
    mlp=MlpKeys,
    copied=("mtp",),
    composite=Composite(
        model_type="qwen3_5",
        architectures=("Qwen3_5ForConditionalGeneration",),
        names={"model": "model.language_model"},
        copied=("model.visual",),
        without_effect=(
            *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        ),
    ),
)
