"""DeepSeek-V3 and R1, and models of others with its architecture: Moonlight, Kimi-K2, and the text of Kimi-K2.5."""

from runtime.models.expert_readers import PublishedExpertKeys
from runtime.models.family import Composite, Family
from runtime.models.readers import LatentKeys

FAMILY = Family(
    model_type="deepseek_v3",
    same=("kimi_k2",),
    title="DeepSeek-V3, Moonlight, Kimi-K2",
    architecture="DeepseekV3ForCausalLM",
    attention=LatentKeys,
    mlp=PublishedExpertKeys,
    composite=Composite(
        model_type="kimi_k25",
        architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        names={"model": "language_model.model", "lm_head": "language_model.lm_head"},
        copied=("vision_tower", "mm_projector"),
        without_effect=(
            *("vision_config", "ignore_index", "use_unified_vision_chunk", "video_placeholder"),
            *("image_token_id", "video_token_id", "media_placeholder_token_id", "vision_start_token_id"),
            *("vision_end_token_id", "projection_hidden_size", "projection_layer_norm_eps"),
        ),
    ),
)
