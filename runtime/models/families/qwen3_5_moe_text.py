"""Qwen3.5-MoE, its text model: a gated delta net in three of four layers, gated attention, and experts."""

from collections.abc import Iterator
from typing import ClassVar

from runtime.models.expert_readers import SharedExpertKeys
from runtime.models.family import Composite, Family
from runtime.models.hybrid_readers import HybridKeys
from runtime.models.readers import DecoderKeys


class ModelKeys(DecoderKeys, frozen=True, kw_only=True):
    """Keys that belong to no block."""

    has_centred_norms: ClassVar[bool] = True


class AttentionKeys(HybridKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    head_dim: int | None = 256


class MlpKeys(SharedExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts, which each layer has. The class has no keys of dense layers, and always normalizes."""

    intermediate_size: int = 1

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        for key, only in {"mlp_only_layers": (), "decoder_sparse_step": 1, "norm_topk_prob": True}.items():
            if (found := getattr(self, key)) not in (None, only):
                yield f"{key} {found!r} is not supported; supported: {only!r}"


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    title="Qwen3.5-MoE",
    architecture="Qwen3_5MoeForCausalLM",
    decoder=ModelKeys,
    attention=AttentionKeys,
    mlp=MlpKeys,
    names={"mlp.shared_experts": "mlp.shared_expert"},
    copied=("mtp",),
    composite=Composite(
        model_type="qwen3_5_moe",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        names={"model": "model.language_model"},
        copied=("model.visual",),
        without_effect=(
            *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        ),
        has_stacked_experts=True,
    ),
)
