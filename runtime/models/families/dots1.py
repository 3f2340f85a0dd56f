"""dots.llm1: a norm of each head's query and key, and experts of a sigmoid router after the first layers."""

from typing import ClassVar

from runtime.models.expert_readers import SigmoidExpertKeys
from runtime.models.family import Family
from runtime.models.readers import WindowKeys


class AttentionKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of the attention. Without layer_types, layers from max_window_layers on have the window."""

    without_keys: ClassVar = {"head_norms": True}
    max_window_layers: int = 62

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        return index >= self.max_window_layers if self.layer_types is None else super().is_windowed(index)


FAMILY = Family(
    model_type="dots1",
    title="dots.llm1",
    architecture="Dots1ForCausalLM",
    attention=AttentionKeys,
    mlp=SigmoidExpertKeys,
)
