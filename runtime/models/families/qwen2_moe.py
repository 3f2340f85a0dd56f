"""Qwen1.5-MoE and Qwen2-MoE: experts of a softmax router, and a shared expert behind a gate."""

from typing import ClassVar

import msgspec

from runtime.models.blocks import Attention
from runtime.models.expert_readers import SharedExpertKeys
from runtime.models.family import Family
from runtime.models.readers import LateWindowKeys
from runtime.models.rope import Rope


class AttentionKeys(LateWindowKeys, frozen=True, kw_only=True):
    """Keys of the attention. Without layer_types, every second of the first layers has the window."""

    without_keys: ClassVar = {"output_bias": False}
    qkv_bias: bool = True

    def block(self, rope: Rope) -> Attention:
        """Return the block of a layer."""
        return msgspec.structs.replace(super().block(rope), qkv_bias=self.qkv_bias)

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        if self.layer_types is None:
            return index % 2 == 0 and index < self.max_window_layers
        return super().is_windowed(index)


FAMILY = Family(
    model_type="qwen2_moe",
    title="Qwen1.5-MoE, Qwen2-MoE",
    architecture="Qwen2MoeForCausalLM",
    attention=AttentionKeys,
    mlp=SharedExpertKeys,
    names={"mlp.shared_experts": "mlp.shared_expert"},
)
