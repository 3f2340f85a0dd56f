"""Mistral, with a sliding window in all layers or in none."""

from runtime.models.family import Family
from runtime.models.readers import MlpKeys, WindowKeys


class AttentionKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of the attention. The class of transformers does not read the types of layers."""

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        del index
        return True


FAMILY = Family(
    model_type="mistral",
    title="Mistral",
    architecture="MistralForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
)
