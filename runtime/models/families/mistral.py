"""Mistral, with a sliding window in all layers or in none."""

from typing import ClassVar

from runtime.models.family import Family
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
)
