"""DeepSeek-V3 and R1, and models of others with its architecture: Moonlight, Kimi-K2, and the text of Kimi-K2.5."""

from collections.abc import Iterator

from runtime.models.family import Composite, Family
from runtime.models.readers import LatentKeys, SigmoidExpertKeys


class Experts(SigmoidExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts and dense layers, with those of published code that transformers' class does not read."""

    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        for key, only in {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
            if getattr(self, key) != only:
                yield f"{key} {getattr(self, key)!r} is not supported; supported: {only!r}"


FAMILY = Family(
    model_type="deepseek_v3",
    same=("kimi_k2",),
    title="DeepSeek-V3, Moonlight, Kimi-K2",
    architecture="DeepseekV3ForCausalLM",
    attention=LatentKeys,
    mlp=Experts,
    code={
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    composite=Composite(
        model_type="kimi_k25",
        architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        names={"model": "language_model.model", "lm_head": "language_model.lm_head"},
        copied=("vision_tower", "mm_projector"),
        without_effect=(
            *("auto_map", "vision_config", "ignore_index", "use_unified_vision_chunk", "video_placeholder"),
            *("image_token_id", "video_token_id", "media_placeholder_token_id", "vision_start_token_id"),
            *("vision_end_token_id", "projection_hidden_size", "projection_layer_norm_eps"),
        ),
    ),
)
