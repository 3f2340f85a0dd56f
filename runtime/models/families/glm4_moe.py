"""GLM-4.5 to GLM-4.7 with experts: half of each head is rotated."""

from typing import ClassVar

import msgspec

from runtime.models.blocks import Attention
from runtime.models.expert_readers import SigmoidExpertKeys
from runtime.models.family import Family
from runtime.models.readers import HeadKeys
from runtime.models.rope import Rope


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    rope_share: ClassVar[float] = 0.5
    without_keys: ClassVar = {"output_bias": False}
    use_qk_norm: bool = False

    def block(self, rope: Rope) -> Attention:
        """Return the block of a layer."""
        return msgspec.structs.replace(super().block(rope), head_norms=self.use_qk_norm)


FAMILY = Family(
    model_type="glm4_moe",
    title="GLM-4.5, GLM-4.6, GLM-4.7",
    architecture="Glm4MoeForCausalLM",
    attention=AttentionKeys,
    mlp=SigmoidExpertKeys,
    on_sglang="yes",
)
