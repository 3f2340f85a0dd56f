"""OLMo 3: one norm of all queries and of all keys, and a window without YaRN in three of four layers."""

from typing import ClassVar

from runtime.models.blocks import NORMS_AFTER
from runtime.models.family import Family
from runtime.models.readers import LayeredRopeKeys, MlpKeys


class AttentionKeys(LayeredRopeKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"joint_norms": True}
    rope_type: ClassVar[str] = "yarn"
    theta: ClassVar[float] = 500_000.0
    window_theta: ClassVar[float] = 500_000.0

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        return (index + 1) % 4 != 0 if self.layer_types is None else super().is_windowed(index)


FAMILY = Family(
    model_type="olmo3",
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    norms=NORMS_AFTER,
)
