"""Ministral 3, its text model: YaRN, and queries that grow with their position."""

from typing import ClassVar

import msgspec

from runtime.models.family import Composite, Family
from runtime.models.readers import MlpKeys, WindowKeys
from runtime.models.rope import QueryGrowth, Rope, RopeKeys, read_rope

BETA = "llama_4_scaling_beta"


class AttentionKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    reads_layer_types: ClassVar = False
    rope_type: ClassVar[str] = "yarn"
    without_keys: ClassVar = {"qkv_bias": False, "output_bias": False}
    head_dim: int | None = 128
    sliding_window: int | None = None

    def rope(self) -> Rope:
        """Read the rotary embedding."""
        given = dict(self.rope_scaling or {}) | dict(self.rope_parameters or {})
        if not isinstance(beta := given.pop(BETA, None), int | float):
            raise ValueError(f"{BETA} {beta!r} of rope_parameters is not a number")
        given.pop("max_position_embeddings", None)
        rope = read_rope(RopeKeys(rope_theta=self.rope_theta, rope_parameters=given), share=1.0, stretching="yarn")
        if rope.yarn is None:
            raise ValueError("rope_type 'default' is not supported; supported: 'yarn'")
        length = rope.yarn.original_max_position_embeddings
        return msgspec.structs.replace(rope, growth=QueryGrowth(float(beta), length))


FAMILY = Family(
    model_type="ministral3",
    title="Ministral 3",
    architecture="Ministral3ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    composite=Composite(
        model_type="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        takes_any_text=True,
        names={"model": "language_model.model", "lm_head": "language_model.lm_head"},
        copied=("vision_tower", "multi_modal_projector"),
        without_effect=(
            *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer"),
            *("multimodal_projector_bias", "spatial_merge_size"),
        ),
    ),
)
