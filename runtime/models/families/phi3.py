"""Phi-3 and Phi-4, without LongRoPE: the files join queries, keys and values, and gate and up."""

from typing import ClassVar

from runtime.models.blocks import Mlp
from runtime.models.family import Family
from runtime.models.readers import MlpKeys as Mlps
from runtime.models.readers import WindowKeys


class AttentionKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"is_stored_joined": True}
    rope_type: ClassVar[str] = "default"
    sliding_window: int | None = None

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window: all have."""
        del index
        return True


class MlpKeys(Mlps, frozen=True, kw_only=True):
    """Keys of the MLPs."""

    def block(self, index: int) -> Mlp:
        """Return the block of a layer."""
        del index
        return Mlp(size=self.intermediate_size, is_stored_joined=True)


FAMILY = Family(
    model_type="phi3",
    title="Phi-3, Phi-4",
    architecture="Phi3ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    without_effect=("embd_pdrop", "resid_pdrop", "original_max_position_embeddings"),
)
