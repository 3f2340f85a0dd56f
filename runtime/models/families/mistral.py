"""Mistral, with a sliding window in all layers or in none."""

from typing import ClassVar

from runtime.models.family import Composite, Family
from runtime.models.readers import MlpKeys, WindowKeys


class AttentionKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    reads_layer_types: ClassVar = False


FAMILY = Family(
    model_type="mistral",
    title="Mistral",
    architecture="MistralForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    composite=Composite(
        model_type="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        names={"model": "language_model.model", "lm_head": "language_model.lm_head"},
        copied=("vision_tower", "multi_modal_projector"),
        without_effect=(
            *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer"),
            *("multimodal_projector_bias", "spatial_merge_size"),
        ),
    ),
)
